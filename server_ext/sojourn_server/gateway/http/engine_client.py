"""Sends one request to one engine, and returns the engine's answer once its first part has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec

from .engine_connection import (
    EngineConnectError,
    EngineConnectionError,
    EngineConnectionLost,
    EngineResponse,
)
from .engine_connection_pool import CONNECT_TIMEOUT_S, IDLE_CONNECTION_S, EngineConnectionPool
from .proxy_headers import RawHeaders
from .replica_addresses import ReplicaAddress

STALE_CONNECTION_S = 1.0
"""Idle seconds that decide what the loss of a reused connection means. If the connection was idle for at
least this time before the request, the engine has probably closed it without reading the request. After a
shorter idle time, the engine counts as having read the request. The request may then have caused the loss."""
MAX_WHOLE_ANSWER_BYTES = 1 << 20
"""Maximum bytes of an answer that the gateway holds as a whole. A longer answer is passed on in parts, as the
client reads them."""
ENGINE_DEAD_MESSAGE = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""The whole message of vLLM's ``EngineDeadError``. After an engine core has died, its API server runs on for
a moment and answers with this message. Only the whole message counts, because vLLM quotes requests in its
errors."""


class ReplicaRequestError(Exception):
    """A replica gave no answer. The text is the reason, for the log.

    ``computing``: whether the replica had accepted the request. If so, the request itself may have caused the
    failure.
    """

    def __init__(self, how: str, *, computing: bool) -> None:
        super().__init__(how)
        self.computing = computing
        self.replica_id: str | None = None
        """Id of the replica that failed; ``None``: the one to which the core's ``SendRequest`` sent the
        request."""


@dataclass(slots=True)
class EngineAnswer:
    """An engine's answer whose first part has arrived."""

    response: EngineResponse
    first: bytes
    """The complete answer, or the first part of a stream or long answer. ``b""`` if the answer is empty."""
    is_stream: bool
    """Whether the answer is a stream of server-sent events."""

    @property
    def is_complete(self) -> bool:
        """Whether ``first`` is the complete answer. Always False for a stream."""
        return not self.is_stream and self.response.is_complete


class EngineReply(NamedTuple):
    """An engine's complete answer to a query of the gateway, unchanged."""

    status: int
    body: bytes
    media_type: str

    @property
    def document(self) -> dict[str, Any] | None:
        """The JSON object in a successful answer; ``None`` for any other answer."""
        return parse_json_object(self.body) if self.status == 200 else None


def parse_json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` encodes. ``None`` if ``text`` is not valid JSON, or not an
    object."""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


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
    """Send one of the gateway's own queries to an engine. Return the answer, whatever its status. ``None`` if
    no complete answer came within ``timeout_s`` seconds."""
    sent = {**(headers or {}), **({"Authorization": authorization} if authorization is not None else {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, data=body, headers=sent, timeout=timeout) as answer:
            return EngineReply(answer.status, await answer.read(), answer.content_type)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return None


def bearer(key: str | None, authorization: str | None = None) -> str | None:
    """Return the value of the ``Authorization`` header for an engine. It is ``Bearer KEY`` if the gateway has
    its own ``key``, otherwise the client's header ``authorization``. ``None``: no header is sent."""
    return f"Bearer {key}" if key else authorization


def open_session() -> aiohttp.ClientSession:
    """Open the pool of connections for the gateway's own queries. Each query has its own timeout."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # The engine gets the headers of the query, without the library's own.
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        trust_env=False,
    )


async def send_to_engine(
    connections: EngineConnectionPool,
    address: ReplicaAddress,
    target: bytes,
    headers: RawHeaders,
    body: bytes,
) -> EngineAnswer:
    """POST a request, and wait for the first part of the answer. ``target``: path and query.

    The request is sent a second time, over a new connection, if the engine has probably not read it. That is
    so if the request could not be written completely. It is also so if the connection had been idle for
    ``STALE_CONNECTION_S`` and was closed before an answer. In this second case the engine may have read the
    request after all. So any failure of the second attempt counts as ``computing``.

    Raises ``ReplicaRequestError``, or ``GatewayConnectError`` if the engine is not at fault.
    """
    is_written = False
    for reuse in (True, False):
        try:
            response = await connections.request(address.url, b"POST", target, headers, body, reuse=reuse)
        except EngineConnectError as error:
            how = f"connection failed: {error}"
            raise ReplicaRequestError(how, computing=is_written) from None
        except EngineConnectionLost as error:
            is_unseen = not error.is_written or error.idle_s >= STALE_CONNECTION_S
            if not reuse or not is_unseen:
                raise ReplicaRequestError(str(error), computing=True) from None
            is_written = error.is_written  # the other idle connections may be closed too
        except EngineConnectionError as error:
            raise ReplicaRequestError(str(error), computing=True) from None
        else:
            return await _begin_answer(response)
    raise AssertionError("unreachable")


async def _begin_answer(response: EngineResponse) -> EngineAnswer:
    """Wait for the first part of a response: the first bytes of a stream, or up to about
    ``MAX_WHOLE_ANSWER_BYTES`` of any other answer. Raises ``ReplicaRequestError`` if that fails, or if the
    response says that the engine core is dead."""
    is_stream = response.media_type == b"text/event-stream"
    try:
        first = await (response.read_some() if is_stream else response.read(MAX_WHOLE_ANSWER_BYTES))
    except EngineConnectionError as error:
        raise ReplicaRequestError(str(error), computing=True) from None
    except BaseException:
        response.close()
        raise
    failed = first if response.status == 500 else _error_event(first) if is_stream else None
    if failed is not None and _is_engine_dead_error(failed):
        response.close()
        raise ReplicaRequestError("its engine core is dead", computing=True)
    return EngineAnswer(response, first, is_stream)


def is_engine_failure(answer: EngineAnswer) -> bool:
    """Whether an answer shows that the engine failed. True for a status of 500 or more, except 501 (not
    implemented). Also True for a stream that begins with an error, unless its code is from 400 to 499. Such
    an error is the request's own fault."""
    status = answer.response.status
    if status != 200:
        return status >= 500 and status != 501
    event = _error_event(answer.first) if answer.is_stream else None
    if event is None:
        return False
    return not _is_request_at_fault(_error_fields(event))


def _error_event(first: bytes) -> bytes | None:
    """Return the data of the first event of a stream if it is an error event, else ``None``. ``first``: the
    stream's first bytes. Generated text cannot look like an error event."""
    if not first.startswith((b'data: {"error"', b"event: error")):
        return None
    for line in first.splitlines():
        if line.startswith(b"data: "):
            return line[len(b"data: ") :]
    return None


def _error_fields(text: bytes) -> dict[str, Any]:
    """Return the fields of a JSON error, such as ``code`` and ``message``. Empty if ``text`` is not such an
    error."""
    document = parse_json_object(text) or {}
    error = document.get("error", document)
    return error if isinstance(error, dict) else {}


def _is_request_at_fault(error: dict[str, Any]) -> bool:
    """Whether an error's ``code`` is from 400 to 499. ``error``: fields as ``_error_fields`` returns them."""
    code = error.get("code")
    return isinstance(code, int) and 400 <= code < 500


def _is_engine_dead_error(text: bytes) -> bool:
    """Whether a JSON error says that the engine core is dead. Its whole message must be
    ``ENGINE_DEAD_MESSAGE``, and its code must not blame the request."""
    error = _error_fields(text)
    return error.get("message") == ENGINE_DEAD_MESSAGE and not _is_request_at_fault(error)
