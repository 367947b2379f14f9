"""Asking one engine: a request goes to one replica, and an answer or nothing comes back."""

from __future__ import annotations

import asyncio
import errno
import time
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from aiohttp.connector import Connection
from multidict import CIMultiDict
from yarl import URL

from .replicas import Address

CONNECT_TIMEOUT_S = 5.0
IDLE_CONNECTION_S = 3.0
"""vLLM closes connections that were idle for five; to write to one that closes costs a repetition."""
LONG_IDLE_S = 1.0
"""Of a connection that was idle for so long and then breaks it is believed that its engine closed it unread;
of one that was just in use, that the engine read a request and died of it."""
_ENGINE_DEAD = ("EngineDeadError", "EngineCore encountered an issue")
"""What an API server says whose engine core is gone, while it lives a moment longer itself."""


class ReplicaLost(Exception):
    """A replica gave no answer; the text says how, for the log.

    ``computing``: the request had reached it.
    """

    def __init__(self, how: str, *, computing: bool) -> None:
        super().__init__(how)
        self.computing = computing
        self.replica_id: str | None = None
        """Whose answer was waited for, where that was not the one that was decided on to answer."""


@dataclass(slots=True)
class Answer:
    """An engine's answer from its first byte on."""

    response: aiohttp.ClientResponse
    first: bytes
    """All of it where it is no stream; of a stream the first part, ``b""``: there is none."""
    is_stream: bool


def open_session() -> aiohttp.ClientSession:
    """Connections to engines. How many there are at once is not bounded here: the core bounds requests."""
    return aiohttp.ClientSession(
        connector=_Connections(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # What a client sent is what the engine gets: no headers of the library's own.
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=False,
    )


@dataclass(slots=True)
class _Try:
    """What is known of one sending when it fails."""

    idle_s: float = 0.0
    """Its connection's: after long the engine may have closed it a moment ago."""
    answering: bool = False
    """The head of an answer has come."""


_trying: ContextVar[_Try] = ContextVar("trying")


class _Connections(aiohttp.TCPConnector):
    """Notes since when each is idle."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._released_s: WeakKeyDictionary[object, float] = WeakKeyDictionary()

    async def connect(self, *args: Any, **more: Any) -> Connection:
        """A new one or an idle one."""
        connection = await super().connect(*args, **more)
        attempt = _trying.get(None)
        now = time.monotonic()
        if attempt is not None:
            attempt.idle_s = now - self._released_s.get(connection.protocol, now)
        connection.add_callback(partial(self._released, connection.protocol))
        return connection

    def _released(self, protocol: object) -> None:
        self._released_s[protocol] = time.monotonic()


async def ask_engine(
    session: aiohttp.ClientSession,
    address: Address,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
) -> Answer:
    """Send a request and wait for the first byte of its answer. Raises ``ReplicaLost``.

    It is sent a second time only where that engine has not seen it: it could not be written, or its
    connection had been idle for ``LONG_IDLE_S`` and was closed before anything of an answer came. Of the
    latter that is only likely, so whatever fails then counts as if it had been computed.
    """
    attempt = _Try()
    is_written = True
    try:
        return await _ask_once(session, address, method, path, headers, body, attempt)
    except aiohttp.ClientConnectionResetError as error:
        if attempt.answering:
            raise ReplicaLost(_words(error), computing=True) from None
        is_written = False  # nobody has all of it
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise ReplicaLost(f"cannot be connected to: {_words(error)}", computing=False) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        if attempt.answering or attempt.idle_s < LONG_IDLE_S or not _is_closed(error):
            raise ReplicaLost(_words(error), computing=True) from None
    # All idle connections may have been closed with that one.
    fresh = CIMultiDict(headers)
    fresh["Connection"] = "close"
    try:
        return await _ask_once(session, address, method, path, fresh, body, _Try())
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        how = f"cannot be connected to: {_words(error)}"
        raise ReplicaLost(how, computing=is_written) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise ReplicaLost(_words(error), computing=True) from None


def _is_closed(error: BaseException) -> bool:
    """The other end closed the connection."""
    if isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)


async def _ask_once(
    session: aiohttp.ClientSession,
    address: Address,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
    attempt: _Try,
) -> Answer:
    _trying.set(attempt)
    response = await session.request(
        method,
        _url(address.url + path),
        data=body,
        headers=headers,
        allow_redirects=False,
    )
    attempt.answering = True
    try:
        is_stream = response.content_type == "text/event-stream"
        first = await (response.content.readany() if is_stream else response.read())
    except BaseException:
        response.close()
        raise
    failed = first if response.status == 500 else _error_event(first) if is_stream else None
    if failed is not None and _is_of_a_dead_core(failed):
        response.close()
        raise ReplicaLost("its engine core is dead", computing=True)
    return Answer(response, first, is_stream)


def failed(answer: Answer) -> bool:
    """Whether an engine answers that it failed, in place of an answer. Errors that it finds in a request, and
    what it cannot do at all (501), are none of those."""
    status = answer.response.status
    if status != 200:
        return status >= 500 and status != 501
    event = _error_event(answer.first) if answer.is_stream else None
    if event is None:
        return False
    try:
        read = msgspec.json.decode(event)
    except msgspec.DecodeError:
        return True
    error = read.get("error", read) if isinstance(read, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return not (isinstance(code, int) and 400 <= code < 500)


@lru_cache(maxsize=256)
def _url(text: str) -> URL:
    # The path has come percent-encoded, and is not to be encoded again.
    return URL(text, encoded=True)


def _error_event(first: bytes) -> bytes | None:
    """The data of a stream's first event where it is an error's: no answer's text can look so."""
    if not first.startswith((b'data: {"error"', b"event: error")):
        return None
    for line in first.splitlines():
        if line.startswith(b"data: "):
            return line[len(b"data: ") :]
    return None


def _is_of_a_dead_core(document: bytes) -> bool:
    """Whether an error's message says so; what else a document says, such as an answer's text, does not."""
    try:
        read = msgspec.json.decode(document)
    except msgspec.DecodeError:
        return False
    error = read.get("error", read) if isinstance(read, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and any(sign in message for sign in _ENGINE_DEAD)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
