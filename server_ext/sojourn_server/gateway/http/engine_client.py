"""Sends one request to one engine, and returns the engine's answer once its first byte is there."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from aiohttp.connector import Connection
from multidict import CIMultiDict
from yarl import URL

from .replica_addresses import ReplicaAddress

CONNECT_TIMEOUT_S = 5.0
IDLE_CONNECTION_S = 3.0
"""Longest idle time, in seconds, of a connection that is used again. vLLM closes connections after five idle
seconds, and a write to a closing connection costs a retry."""
STALE_CONNECTION_S = 1.0
"""Idle time in seconds. If a reused connection was idle for at least this time and breaks during a request,
the engine has probably closed it without reading the request. If it was idle for less, the engine counts as
having read the request and failed because of it."""
_ENGINE_DEAD = ("EngineDeadError", "EngineCore encountered an issue")
"""Texts in the errors of an API server whose engine core is dead. The server keeps running for a moment."""


class ReplicaRequestError(Exception):
    """A replica gave no answer. The text is the reason, for the log.

    ``computing``: whether the replica had accepted the request, so that the request may be the cause.
    """

    def __init__(self, how: str, *, computing: bool) -> None:
        super().__init__(how)
        self.computing = computing
        self.replica_id: str | None = None
        """Id of the replica that failed; ``None``: the replica of the ``SendRequest``."""


@dataclass(slots=True)
class EngineAnswer:
    """An engine's answer, from its first byte on."""

    response: aiohttp.ClientResponse
    first: bytes
    """The complete answer, or the first part of a stream; ``b""``: the answer is empty."""
    is_stream: bool
    """Whether the answer is a stream of server-sent events."""


class EngineReply(NamedTuple):
    """An engine's complete answer to a query of the gateway, unchanged."""

    status: int
    body: bytes
    media_type: str

    @property
    def document(self) -> dict[str, Any] | None:
        """The JSON object in a successful answer; ``None`` for any other answer."""
        if self.status != 200:
            return None
        try:
            document = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return document if isinstance(document, dict) else None


def break_off(response: aiohttp.ClientResponse) -> None:
    """Close an engine's answer. A task that is reading it gets a new ``ClientConnectionError``.

    ``close`` alone would raise the same exception object in the readers of all closed answers. The traceback
    of that object would keep the frames of every reader, and so their requests, in memory for ever.
    """
    if response.content.exception() is None:
        response.content.set_exception(aiohttp.ClientConnectionError("the answer was broken off"))
    response.close()


async def ask_engine(
    session: aiohttp.ClientSession,
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    authorization: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> EngineReply | None:
    """Send a query of the gateway itself to an engine, and return the answer with any status. ``None``: no
    complete answer came within ``timeout_s`` seconds."""
    sent = {**(headers or {}), **({"Authorization": authorization} if authorization is not None else {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, data=body, headers=sent, timeout=timeout) as answer:
            return EngineReply(answer.status, await answer.read(), answer.content_type)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return None


def bearer(key: str | None, authorization: str | None = None) -> str | None:
    """The ``Authorization`` header for an engine: ``key``, the gateway's own key for engines, if it has one,
    else the client's header ``authorization``. ``None``: no header."""
    return f"Bearer {key}" if key else authorization


def open_session() -> aiohttp.ClientSession:
    """Open a pool of connections to engines. Their number is not limited, because the routing core bounds the
    number of requests."""
    return aiohttp.ClientSession(
        connector=_TrackedConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # The engine gets the client's headers, without the library's own.
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=False,
    )


@dataclass(slots=True)
class _SendAttempt:
    """State of one attempt to send a request, from which follows whether a failed attempt may be repeated."""

    idle_s: float = 0.0
    """Seconds for which the reused connection was idle before this request; 0 for a new connection."""
    answering: bool = False
    """Whether the status line and headers of an answer have arrived."""


_current_attempt: ContextVar[_SendAttempt] = ContextVar("send_attempt")
"""The attempt of the current task, in which ``_TrackedConnector`` stores ``idle_s``."""


class _TrackedConnector(aiohttp.TCPConnector):
    """Connector that records how long each connection was idle before a request uses it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._released_s: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        """Time at which each connection became idle, by its protocol object."""

    async def connect(self, *args: Any, **more: Any) -> Connection:
        """Return a new or an idle connection. Sets ``idle_s`` of the current attempt."""
        connection = await super().connect(*args, **more)
        attempt = _current_attempt.get(None)
        now = time.monotonic()
        if attempt is not None:
            attempt.idle_s = now - self._released_s.get(connection.protocol, now)
        connection.add_callback(partial(self._released, connection.protocol))
        return connection

    def _released(self, protocol: object) -> None:
        self._released_s[protocol] = time.monotonic()


async def send_to_engine(
    session: aiohttp.ClientSession,
    address: ReplicaAddress,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
) -> EngineAnswer:
    """Send a request, and wait for the first byte of the answer. Raises ``ReplicaRequestError``.

    The request is sent once more, over a new connection, in two cases in which the engine has probably not
    seen it. First case: the request could not be written completely. Second case: the connection had been
    idle for ``STALE_CONNECTION_S`` and was closed before an answer. In the second case the engine may have
    read the request after all, so any failure of the repeated request counts as ``computing``.
    """
    attempt = _SendAttempt()
    is_written = True
    try:
        return await _send_once(session, address, method, path, headers, body, attempt)
    except aiohttp.ClientConnectionResetError as error:
        if attempt.answering:
            raise ReplicaRequestError(_error_text(error), computing=True) from None
        is_written = False  # the engine has not read all of it
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise ReplicaRequestError(f"connection failed: {_error_text(error)}", computing=False) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        if attempt.answering or attempt.idle_s < STALE_CONNECTION_S or not _is_closed(error):
            raise ReplicaRequestError(_error_text(error), computing=True) from None
    # All idle connections may be closed like this one.
    fresh = CIMultiDict(headers)
    fresh["Connection"] = "close"
    try:
        return await _send_once(session, address, method, path, fresh, body, _SendAttempt())
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        how = f"cannot be connected to: {_error_text(error)}"
        raise ReplicaRequestError(how, computing=is_written) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise ReplicaRequestError(_error_text(error), computing=True) from None


def _is_closed(error: BaseException) -> bool:
    """Whether the error means that the engine closed the connection."""
    if isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError)):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)


async def _send_once(
    session: aiohttp.ClientSession,
    address: ReplicaAddress,
    method: str,
    path: str,
    headers: CIMultiDict[str],
    body: bytes | None,
    attempt: _SendAttempt,
) -> EngineAnswer:
    """Send a request once, and wait for the first byte of the answer. Raises aiohttp's errors, and
    ``ReplicaRequestError`` if the answer says that the engine core is dead."""
    _current_attempt.set(attempt)
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
    if failed is not None and _is_engine_dead_error(failed):
        response.close()
        raise ReplicaRequestError("its engine core is dead", computing=True)
    return EngineAnswer(response, first, is_stream)


def is_engine_failure(answer: EngineAnswer) -> bool:
    """Whether an answer shows that the engine failed: a status from 500 on except 501 (not implemented), or a
    stream that begins with an error. Errors with a code from 400 to 499 are the request's own fault."""
    status = answer.response.status
    if status != 200:
        return status >= 500 and status != 501
    event = _error_event(answer.first) if answer.is_stream else None
    if event is None:
        return False
    try:
        read = msgspec.json.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    error = read.get("error", read) if isinstance(read, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return not (isinstance(code, int) and 400 <= code < 500)


@lru_cache(maxsize=256)
def _url(text: str) -> URL:
    # The path is percent-encoded already.
    return URL(text, encoded=True)


def _error_event(first: bytes) -> bytes | None:
    """The data of the first event in ``first`` if it is an error event, else ``None``. ``first``: the first
    bytes of a stream. Generated text cannot look like an error event."""
    if not first.startswith((b'data: {"error"', b"event: error")):
        return None
    for line in first.splitlines():
        if line.startswith(b"data: "):
            return line[len(b"data: ") :]
    return None


def _is_engine_dead_error(document: bytes) -> bool:
    """Whether the field ``message`` of a JSON error says that the engine core is dead."""
    try:
        read = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    error = read.get("error", read) if isinstance(read, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and any(sign in message for sign in _ENGINE_DEAD)


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__
