"""One HTTP/1.1 connection to an engine, on asyncio and httptools' parser, and the response that it carries.

Bytes are passed on as they come, without redirects, cookies, proxies or decompression.
``engine_connection_pool`` opens connections and keeps idle ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from .proxy_headers import RawHeaders

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a response's headers, and of the bytes between two parts of its body."""
MAX_UNREAD_BYTES = 256 << 10
"""Maximum bytes of an answer that wait for ``EngineResponse.read_some``. While more bytes wait, the gateway
reads nothing from the engine."""
_JOINED_BODY_BYTES = 64 << 10
"""Maximum bytes of a body that is sent in one write with its headers. That costs a copy of the body."""


class EngineConnectionError(Exception):
    """An engine gave no complete response. The text says why."""


class EngineConnectError(EngineConnectionError):
    """No connection to the engine could be opened."""


class GatewayConnectError(Exception):
    """The gateway has no file descriptor, port or buffer for another connection. No engine is at fault. The
    text is for the client."""


class EngineProtocolError(EngineConnectionError):
    """A response is not HTTP/1.1, or exceeds a limit."""


class EngineConnectionLost(EngineConnectionError):
    """The connection ended before the response was complete."""

    def __init__(self, text: str, *, is_written: bool, idle_s: float) -> None:
        """``is_written``: whether the operating system had accepted the whole request. Over TLS, whether the
        TLS layer had. ``idle_s``: seconds for which the connection was idle before the request; 0 if it was
        new or the response had begun."""
        super().__init__(text)
        self.is_written = is_written
        self.idle_s = idle_s


class EngineResponse:
    """A response of an engine. One task reads it, once."""

    __slots__ = (
        "_connection", "_error", "_max_unread_bytes", "_parts", "_unread_bytes", "_waiter", "_wants_all",
        "is_complete", "raw_headers", "status",
    )  # fmt: skip

    def __init__(self, connection: EngineConnection) -> None:
        self.status = 0
        """HTTP status; 0: the headers have not arrived."""
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self._connection: EngineConnection | None = connection
        """The connection; ``None``: the response is complete, or was broken off."""
        self.is_complete = False
        """Whether the whole body has arrived."""
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._max_unread_bytes: float = MAX_UNREAD_BYTES
        self._error: Callable[[], EngineConnectionError] | None = None
        """Function that makes the exception for the reader. A stored exception would refer to the reader's
        frames and keep them in memory."""
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False

    @property
    def media_type(self) -> bytes:
        """``Content-Type`` in lower case, without parameters. Empty if there is no such header."""
        for name, value in self.raw_headers:
            if name.lower() == b"content-type":
                return value.partition(b";")[0].strip().lower()
        return b""

    async def headers(self) -> None:
        """Wait for status and headers. Raises ``EngineConnectionError``."""
        while not self.status:
            await self._next()

    async def read(self, most_bytes: float = math.inf) -> bytes:
        """Wait for the rest of the body, or for more than ``most_bytes`` of it. Return what has arrived. If
        ``is_complete`` is still False, that is only a first part. Raises ``EngineConnectionError``."""
        self._wants_all, self._max_unread_bytes = True, most_bytes
        if self._connection is not None:
            self._connection.resume()
        while not self.is_complete and self._unread_bytes <= most_bytes:
            await self._next()
        self._wants_all, self._max_unread_bytes = False, MAX_UNREAD_BYTES
        return self._take()

    async def read_some(self) -> bytes:
        """Wait for further bytes of the body, and return all that have arrived since the last call. Return
        ``b""`` after the end of the body. Raises ``EngineConnectionError``."""
        while not self._parts:
            if self.is_complete:
                return b""
            await self._next()
        if self._error is not None:
            raise self._error()
        return self._take()

    def close(self) -> None:
        """Give up the rest of the response. If the response is incomplete, this closes the connection, so the
        engine stops computing. A task that reads it then gets an ``EngineConnectionError``."""
        self.break_off(lambda: EngineConnectionError("the response was broken off"))

    # -- for the connection -----------------------------------------------------------

    def add(self, part: bytes) -> bool:
        """Add a part of the body. Returns True if the connection should stop reading for now, because more
        bytes are unread than the reader has asked for."""
        self._parts.append(part)
        self._unread_bytes += len(part)
        is_enough = self._unread_bytes > self._max_unread_bytes
        if is_enough or not self._wants_all:
            self.wake()
        return is_enough

    def complete(self) -> None:
        """Record that the body is complete. The connection is free from now on."""
        self.is_complete, self._connection = True, None
        self.wake()

    def break_off(self, error: Callable[[], EngineConnectionError]) -> None:
        """Abort the connection, and raise ``error()`` in the reader. No effect on a complete response."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._error = error
            connection.abort()
            self.wake()

    def wake(self) -> None:
        """Wake the reader, so that it checks the response again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- internals --------------------------------------------------------------------

    async def _next(self) -> None:
        """Wait until ``wake`` is called. Raises ``EngineConnectionError`` if the response has been broken
        off."""
        if self._error is not None:
            raise self._error()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _take(self) -> bytes:
        """Remove and return the parts that have arrived."""
        parts, self._parts, self._unread_bytes = self._parts, [], 0
        if self._connection is not None:
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)


class ConnectionOwner(Protocol):
    """The methods of the pool that a connection calls."""

    def release(self, connection: EngineConnection) -> None:
        """Take back a connection whose response is complete, so that it can carry the next request."""
        ...

    def lost(self, connection: EngineConnection) -> None:
        """Forget a connection that is closed."""
        ...


class EngineConnection(asyncio.Protocol):
    """A connection to an engine. It carries one request at a time."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._transport: Any = None
        """An ``asyncio.Transport``, or uvloop's transport, which is not a subclass of it."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._response: EngineResponse | None = None
        """The response that is awaited or being read."""
        self._idle_s = 0.0
        self._headers: list[tuple[bytes, bytes]] = []
        self._bytes_beside_body = 0
        """Number of bytes received since the request, or since the last part of the body."""
        self._is_paused = False
        self._is_writing = False
        """Whether bytes of the request wait for the operating system."""
        self._is_interim = False
        """Whether the status received last is below 200. Then another status follows."""
        self._is_answered = False
        """Whether the response is complete. Further bytes then belong to no request."""
        self._keeps_alive = False

    @property
    def is_open(self) -> bool:
        """Whether the connection can carry a request."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, idle_s: float) -> EngineResponse:
        """Send a request. Return its response, whose headers have not arrived yet. ``idle_s``: seconds for
        which the connection was idle; 0 for a new connection."""
        response = self._response = EngineResponse(self)
        self._idle_s, self._headers, self._bytes_beside_body, self._is_answered = idle_s, [], 0, False
        if len(body) <= _JOINED_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if self._transport.is_closing():
            self._is_writing = True  # the write failed at once, and nothing else reports that
        return response

    def resume(self) -> None:
        """Read from the engine again. No effect if the connection is not paused."""
        if self._is_paused:
            self._is_paused = False
            if self.is_open:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once, and break off its response."""
        response, self._response = self._response, None
        if self._transport is not None:
            self._transport.abort()
        if response is not None:
            response.close()

    # -- asyncio.Protocol -------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        # With these limits the event loop writes at once, and reports whether all bytes were accepted. A
        # plain transport pauses above the limit. TLS pauses at the limit, so with 0 it would pause and resume
        # at each event.
        is_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=1 if is_tls else 0)

    def pause_writing(self) -> None:
        self._is_writing = True

    def resume_writing(self) -> None:
        self._is_writing = False

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # no response is awaited
            self.abort()
            return
        self._bytes_beside_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_alive = False
            if not self._is_answered:
                text = f"its response is not HTTP/1.1: {str(error) or type(error).__name__}"
                response.break_off(lambda: EngineProtocolError(text))
                return
        if self._is_answered:
            self._finish(response)
        elif self._bytes_beside_body > MAX_HEAD_BYTES:
            text = f"its response has more than {MAX_HEAD_BYTES} bytes of headers"
            response.break_off(lambda: EngineProtocolError(text))

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost(self)
        self._parser = None  # the parser refers to this object
        response, self._response = self._response, None
        if response is None:
            return
        if error is None and response.status and not _has_length(response.raw_headers):
            response.complete()
            return
        text = (str(error) if error is not None else "") or "it closed the connection"
        is_written, idle_s = not self._is_writing, self._idle_s
        if response.status or self._bytes_beside_body:  # an engine that answers has read the request
            is_written, idle_s = True, 0.0
        response.break_off(lambda: EngineConnectionLost(text, is_written=is_written, idle_s=idle_s))

    # -- callbacks of the parser ------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_answered:
            self._keeps_alive = False  # a response without a request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None and not self._response.status:  # otherwise it is a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        response = self._response
        if response is None or self._is_answered:
            return
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            self._headers = []
            return
        self._keeps_alive = self._parser.should_keep_alive()
        response.status, response.raw_headers = status, self._headers
        response.wake()

    def on_body(self, part: bytes) -> None:
        response = self._response
        if response is None or self._is_answered or self._is_interim:
            return
        self._bytes_beside_body = 0
        if response.add(part) and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if not self._is_interim:
            self._is_answered = True

    def _finish(self, response: EngineResponse) -> None:
        """End a complete response. Give the connection back to the pool, or close it if it cannot be
        reused."""
        self._response = None
        if self._keeps_alive and not self._is_writing and self.is_open:
            self.resume()
            self._owner.release(self)
        else:
            self.abort()
        response.complete()


def _has_length(headers: RawHeaders) -> bool:
    """Whether the headers say where the body ends. If not, the body ends with the connection."""
    return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in headers)
