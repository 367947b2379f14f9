"""The gateway's HTTP client to engines, on aiohttp: clients' requests with their headers, engines' answers,
and the gateway's own queries."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from sojourn.dialects import header_text
from yarl import URL

from ...api.client_identity import HEADER_ROWS, wire_id

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds until a new connection is open, including name lookup and TLS."""
IDLE_CONNECTION_S = 3.0
"""Maximum idle seconds of a connection that is used again. vLLM closes an idle connection after five, so it
closes none over which a request is sent."""
MAX_WHOLE_ANSWER_BYTES = 1 << 20
"""Maximum bytes of an answer that the gateway holds as a whole. A longer one is passed on in parts."""
_LARGE_BODY_BYTES = 64 << 10
"""Bytes of a body from which it is written in pieces, so that other requests do not wait."""
ENGINE_DEAD_MESSAGE = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""The whole message of vLLM's ``EngineDeadError``, which its API server sends for a moment after the engine
core has died. Only the whole message counts, because vLLM quotes requests in its errors."""

RawHeaders = Collection[tuple[bytes, bytes]]
ClientHeaders = Mapping[str, str]
"""Headers of a client's request, as engines read them: names in lower case, values decoded as Latin-1, the
first of repeated headers."""
EngineHeaders = CIMultiDict[str]

RANK = "x-data-parallel-rank"
"""Request header that chooses a data-parallel rank of an engine, in lower case."""
PASSED = "x-sojourn-passed"
"""Request header, in lower case, of requests that another gateway has passed on, which are not again."""
REPLICA = "X-Sojourn-Replica"
"""Header with the id of the replica, which the gateway adds to every answer of an engine."""
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# The gateway handles these itself: it reads the body, chooses the rank, names the session, and agrees with
# the engine on the encoding of the answer.
_NOT_SENT = _HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"accept-encoding", RANK.encode(), PASSED.encode(),
}  # fmt: skip
# They name programs by the clients' ids, with which one tenant could name another's program at an engine.
_IDENTITY = frozenset(name.encode() for row in HEADER_ROWS for name in row[1:] if name)
_KEYS = frozenset((b"authorization", b"x-api-key"))
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
# Anthropic's ``input_tokens`` are without the prompt's tokens that the cache had or got.
_PROMPT = re.compile(
    rb'"(?:prompt|input|cache_read_input|cache_creation_input)_tokens"\s*:\s*(\d{1,18})(?!\d)'
)
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,18})(?!\d)')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,200})"')
_TAIL_BYTES, _HEAD_BYTES = 4096, 2048
"""Bytes kept of an answer's end, which has the token counts, and of its beginning, which has the id."""
_EVENT_ENDS = (b"\n\n", b"\n\r", b"\r\r")
"""Two ends of lines, which end an event of a stream. A line ends with LF, CR LF or CR."""
_BETWEEN_EVENTS = re.compile(rb"(?:(?::[^\r\n]*)?(?:\r\n?|\n))*")
"""Comments, such as ``: ping``, and empty lines between two events."""


def headers_not_sent(*, key: str | None, session_header: str | None = None) -> frozenset[bytes]:
    """Return the names of clients' headers that engines do not get. For the options of ``GatewayOptions``."""
    own = {session_header.lower().encode("latin-1", "replace")} if session_header else set()
    return _NOT_SENT | _IDENTITY | own | (_KEYS if key is not None else set())


def engine_request_headers(
    headers: RawHeaders,
    *,
    dropped: frozenset[bytes],
    key: str | None,
    rank: int | None,
    identity: Mapping[str, str] = MappingProxyType({}),
) -> EngineHeaders:
    """Return the headers to send to an engine with a client's request.

    ``dropped``: a result of ``headers_not_sent``. ``key``: replaces the client's key. ``rank``: the
    data-parallel rank to choose. ``identity``: headers of our own that name the program.
    """
    sent = EngineHeaders()
    for name, value in end_to_end_headers(headers, dropped):
        # aiohttp writes headers as UTF-8, so the bytes stay what they are.
        sent.add(name.decode("latin-1"), value.decode("utf-8", "replace"))
    sent["accept-encoding"] = "identity"
    if key is not None:
        sent["authorization"] = f"Bearer {key}"
    if rank is not None:
        sent[RANK] = str(rank)
    for header, text in identity.items():
        sent[header] = header_id(text).encode("latin-1").decode()  # aiohttp writes what the client sent
    return sent


def header_id(text: str) -> str:
    """Return an id as an engine reads it in a header that aiohttp writes, as UTF-8, decoded as Latin-1."""
    try:
        text.encode("latin-1").decode()
    except UnicodeError:
        return wire_id(header_text(text)) or ""
    return text


def end_to_end_headers(
    headers: RawHeaders, dropped: frozenset[bytes] = _NOT_RETURNED
) -> list[tuple[bytes, bytes]]:
    """Return the headers to pass on, with names in lower case: without those in ``dropped``, and without
    those that the header ``Connection`` lists, which concern one connection (RFC 9110 §7.6.1)."""
    kept = []
    for name, value in headers:
        name = name.lower()
        if name == b"connection":
            dropped |= {part.strip().lower() for part in value.split(b",")}
        kept.append((name, value))
    return [pair for pair in kept if pair[0] not in dropped]


class ReplicaRequestError(Exception):
    """A replica gave no complete answer. The text is the reason, for the log. ``computing``: whether the
    replica may have read the request, which may then have caused the failure."""

    def __init__(self, how: str, *, computing: bool = True) -> None:
        super().__init__(how)
        self.computing = computing


class EngineAnswer:
    """An engine's answer whose first part has arrived."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, *, is_stream: bool) -> None:
        self.response = response
        self.status = response.status
        self.first = first
        """The complete answer, or the first part of a stream or long answer; empty if the answer is."""
        self.is_stream = is_stream
        """Whether the answer is a stream of server-sent events."""
        self.is_complete = not is_stream and response.content.at_eof()
        """Whether ``first`` is the complete answer. Always False for a stream."""
        self.error = _error_fields(first, is_stream) if is_stream or self.status == 500 else None
        """Fields, such as ``message``, of an engine's failure with which a stream begins, or which comes with
        status 500; ``None``: there is none."""

    async def next_part(self) -> bytes:
        """Wait for further bytes, and return them; ``b""`` after the end. Raises ``ReplicaRequestError`` if
        the answer breaks off."""
        try:
            return await self.response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaRequestError(_text(error)) from None

    def close(self) -> None:
        """Give up the rest of the answer; an engine then stops computing."""
        self.response.close()

    def raise_for_failure(self) -> None:
        """Close the answer and raise ``ReplicaRequestError`` if the engine failed: a status of 500 or more,
        except 501 (not implemented), or a stream that begins with an error of the engine."""
        if (self.status >= 500 and self.status != 501) or (self.status == 200 and self.error is not None):
            self.close()
            raise ReplicaRequestError(f"it failed, status {self.status}")


class ResponseMeter:
    """Reads an answer on its way through the gateway: token counts, id, and the ends of streamed events. Any
    content is accepted. ``is_stream``: whether it is a stream of server-sent events."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._tail = self._head = self._held = b""
        self._events = 0

    def push(self, chunk: bytes) -> bytes:
        """Read the next chunk. Return the bytes that may be passed on now. Of a stream they end with a
        complete event or comment, so that an error event can follow at any time."""
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]
        if not self._is_stream:
            return chunk
        self._events += chunk.count(b"data:")
        if self._held:
            chunk, self._held = self._held + chunk, b""
        if chunk.endswith(b"\n\n"):
            return chunk
        end = max((chunk.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in chunk), default=0)
        # The second CR may belong to a CR LF.
        between = _BETWEEN_EVENTS.match(chunk, end - chunk.endswith(b"\r", 0, end))
        end = between.end() if between is not None else end
        self._held = chunk[end:]
        return chunk[:end]

    def rest(self) -> bytes:
        """Return the bytes still held back. Call this after the answer has ended regularly."""
        return self._held

    def counts(self) -> tuple[int | None, int]:
        """Return the engine's counts of (prompt tokens, output tokens). If it reports none: ``None``, and the
        number of a stream's events minus one, or 0 if the answer is not a stream."""
        usage = self._tail[self._tail.rfind(b'"usage"') :]
        prompt, output = _PROMPT.findall(usage), _OUTPUT.findall(usage)
        prompt_tokens = sum(map(int, prompt)) if prompt else None
        return prompt_tokens, int(output[-1]) if output else max(0, self._events - 1)

    @property
    def response_id(self) -> str | None:
        """Id of an answer of the responses API; ``None``: there is none."""
        found = _RESPONSE_ID.search(self._head)
        return found.group(1).decode("utf-8", "replace") if found else None


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
    """Return the JSON object that ``text`` encodes; ``None`` if it encodes none."""
    try:
        return msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


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
    """Send one of the gateway's own queries to an engine. Return the answer, whatever its status; ``None``:
    no complete one came within ``timeout_s`` seconds."""
    sent = {**(headers or {}), **({"Authorization": authorization} if authorization is not None else {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body
    try:
        async with session.request(method, url, data=data, headers=sent, timeout=timeout) as answer:
            return EngineReply(answer.status, await answer.read(), answer.content_type)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return None


def bearer(key: str | None, authorization: str | None = None) -> str | None:
    """Return the ``Authorization`` header for an engine: of the gateway's ``key``, if it has one, else the
    client's ``authorization``. ``None``: no header is sent."""
    return f"Bearer {key}" if key else authorization


class EngineClient:
    """The connections of a gateway to its engines, which open at their first use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return a pool of connections, whose requests have no timeout but that of the connection."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                # The engine gets the headers of the client or the query, without the library's own.
                skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(
        self, url: str, headers: EngineHeaders, body: bytes, *, method: str = "POST"
    ) -> EngineAnswer:
        """Send a request, and wait for the first part of the answer. ``url``: with path and query. Raises
        ``ReplicaRequestError``."""
        data = body if len(body) <= _LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            response = await self.session().request(
                method, URL(url, encoded=True), data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise ReplicaRequestError(f"connection failed: {_text(error)}", computing=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaRequestError(_text(error)) from None
        return await _begin_answer(response)


async def _begin_answer(response: aiohttp.ClientResponse) -> EngineAnswer:
    """Wait for the first bytes of a response, or all of up to ``MAX_WHOLE_ANSWER_BYTES``. Raises
    ``ReplicaRequestError`` if that fails, or if the response says that the engine core is dead."""
    is_stream = response.content_type == "text/event-stream"
    is_short = response.content_length is not None and response.content_length <= MAX_WHOLE_ANSWER_BYTES
    try:
        first = await (response.read() if is_short and not is_stream else response.content.readany())
    except (aiohttp.ClientError, OSError) as error:
        raise ReplicaRequestError(_text(error)) from None
    except BaseException:
        response.close()
        raise
    answer = EngineAnswer(response, first, is_stream=is_stream)
    if answer.error is not None and answer.error.get("message") == ENGINE_DEAD_MESSAGE:
        answer.close()
        raise ReplicaRequestError("its engine core is dead")
    return answer


def _error_fields(first: bytes, is_stream: bool) -> dict[str, Any] | None:
    """Return the fields of a JSON error, or of the error event with which a stream begins; ``None``: there is
    none, or it is the request's own fault. Generated text cannot look like an error event."""
    if is_stream:
        if not first.startswith((b'data: {"error"', b"event: error")):
            return None
        first = next((line[6:] for line in first.splitlines() if line.startswith(b"data: ")), b"")
    if (document := parse_json_object(first)) is None:
        return None
    error = document.get("error", document)
    fields: dict[str, Any] = error if isinstance(error, dict) else {}
    code = fields.get("code")
    return None if isinstance(code, int) and 400 <= code < 500 else fields


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
