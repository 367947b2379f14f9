"""A client's connection: uvicorn's HTTP protocol with deadlines, and with limits on pipelined requests and on
the size of headers.

- Without a deadline for headers, a client that sends half a request keeps its connection for ever. Some
  hundreds of such clients use up the gateway's file descriptors.
- Without a deadline for reading answers, a client that reads nothing occupies an engine. uvicorn waits for
  such a client without limit.
- Without the limits, a client without a key can fill the memory over a single connection.

The deadlines for request bodies are in ``request_bodies``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import httptools
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...metrics.rate_limited_log import LOG_INTERVAL_S

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
"""``raise_open_file_limit`` raises a gateway's soft limit of open files to at least this number, if the hard
limit permits. The usual soft limit of a process is 1024."""


def raise_open_file_limit(most_waiting: int) -> None:
    """Raise this process's soft limit of open files to ``MAX_OPEN_FILES`` or twice ``most_waiting``,
    whichever is larger. The hard limit caps it. Logs a warning if the limit stays below ``most_waiting``.

    ``most_waiting``: number of requests that may wait. A waiting request has one connection, to its client. A
    sent request has a second one, to its engine.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MAX_OPEN_FILES, 2 * most_waiting)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays: %s", error)
    if limit != resource.RLIM_INFINITY and limit < most_waiting:
        logger.warning(
            "this process may open %d files, fewer than the %d requests that may wait; raise the hard limit "
            "(ulimit -n, systemd: LimitNOFILE) or lower the number of requests",
            limit,
            most_waiting,
        )


UNREAD_TIMEOUT_S = 60.0
"""Seconds within which a client must read ``MIN_READ_BYTES`` while its connection's write buffer is full."""
MIN_READ_BYTES = 64 << 10
"""Minimum number of bytes that a client must read in ``UNREAD_TIMEOUT_S``."""


class _AcceptErrorFilter(logging.Filter):
    """Passes asyncio's error about a failed ``accept`` at most once per ``LOG_INTERVAL_S``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._logged_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("socket.accept() out of system resource"):
            return True
        now = self._clock()
        if now - self._logged_s < LOG_INTERVAL_S:
            return False
        self._logged_s = now
        return True


def log_accept_errors_rarely(clock: Callable[[], float] = time.monotonic) -> None:
    """Log asyncio's error about a failed ``accept`` at most once per ``LOG_INTERVAL_S``. Without free file
    descriptors, asyncio logs up to 2048 such errors each second, with tracebacks. A second call has no
    effect."""
    log = logging.getLogger("asyncio")
    if not any(isinstance(one, _AcceptErrorFilter) for one in log.filters):
        log.addFilter(_AcceptErrorFilter(clock))


class AnswerDeadline(asyncio.Protocol):
    """A mix-in for uvicorn's protocols that aborts a connection whose client does not read the answer. The
    request's handler then sees that the client has disconnected.

    While the connection's write buffer is full, ``_check`` runs every ``UNREAD_TIMEOUT_S``. But the end of an
    answer may stay in a buffer that is not full, and even a closed transport waits for the client to read it.
    So ``_check_end`` checks connections with complete answers every ``UNREAD_TIMEOUT_S``.
    """

    loop: asyncio.AbstractEventLoop
    transport: Any
    cycle: Any
    """uvicorn's current request cycle; ``None`` before the first request."""
    _unread_bytes = 0
    """Bytes that waited for the client when ``_unread_deadline`` was set."""
    _unread_deadline: asyncio.TimerHandle | None = None
    """The next call of ``_check``; ``None``: the buffer is not full."""
    _end_deadline: asyncio.TimerHandle | None = None
    """The next call of ``_check_end``."""
    _unread_end: tuple[Any, int] | None = None
    """(request cycle, number of unread bytes) at the last call of ``_check_end``; ``None``: all bytes had
    been read, or the answer was not complete."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end_deadline = self.loop.call_later(UNREAD_TIMEOUT_S, self._check_end)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self._end_deadline is not None:
            self._end_deadline.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._stop_watching()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._unread_deadline = self.loop.call_later(UNREAD_TIMEOUT_S, self._check)

    def _stop_watching(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _check(self) -> None:
        # An answer of up to a MiB is in the buffer as a whole, so its client may need several periods.
        if self._unread_bytes - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._watch()
        else:
            self._unread_deadline = None
            self.transport.abort()  # ``close`` would wait for the client too

    def _check_end(self) -> None:
        """Abort the connection if a complete answer waits for the client, and the client has read less than
        ``MIN_READ_BYTES`` of it since the last call."""
        self._end_deadline = self.loop.call_later(UNREAD_TIMEOUT_S, self._check_end)
        cycle, unread_bytes = self.cycle, self.transport.get_write_buffer_size()
        is_complete = self.transport.is_closing() or cycle is None or cycle.response_complete
        before = self._unread_end
        self._unread_end = (cycle, unread_bytes) if is_complete and unread_bytes else None
        if before is None or self._unread_end is None or before[0] is not cycle:
            return
        if before[1] - unread_bytes < MIN_READ_BYTES:
            self.transport.abort()


HEADERS_TIMEOUT_S = 10.0
"""Maximum seconds from a request's first byte to the end of its headers."""
FIRST_BYTE_TIMEOUT_S = 75.0
"""Maximum seconds from a new connection to its first byte. Later requests have uvicorn's keep-alive
timeout."""
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HeaderDeadline(asyncio.Protocol):
    """A mix-in for uvicorn's protocols that closes a connection whose request headers take too long."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    """uvicorn's current request cycle; ``None`` before the first request."""
    _deadline: asyncio.TimerHandle | None = None
    _has_begun = False
    """Whether a part of a request has arrived, but not all of its headers."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(FIRST_BYTE_TIMEOUT_S, self._time_out)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_serving():
            self._cancel_deadline()
            self._has_begun = False
        elif not self._has_begun:  # further bytes do not move the deadline
            self._cancel_deadline()
            self._has_begun = True
            self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _is_serving(self) -> bool:
        """Whether a request is being answered: its headers are complete, and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        """If a request has begun, answer it with status 408. Then close the connection."""
        self._deadline = None
        if self._is_serving() or self.transport.is_closing():
            return
        if self._has_begun:
            self.transport.write(_TIMED_OUT)
        self.transport.close()


MAX_PIPELINED_REQUESTS = 100
"""Maximum number of requests that a client may send before the answer to an earlier one is complete."""
MAX_PIPELINED_BYTES = 64 << 10
"""Maximum bytes of further requests that are read while a request is being answered. uvicorn keeps as many
bytes of a body. The limit is checked after each read, so one read may exceed it."""
_HEADER_SEPARATOR_BYTES = 4
"""Bytes of a header besides its name and value: a colon, a space and the end of the line."""
PIPELINE_TIMEOUT_S = 10.0
"""Maximum seconds without a complete answer while a client has sent more than ``MAX_PIPELINED_BYTES`` ahead.
Meanwhile the gateway may not notice that the client disconnects."""


class PipelineLimit(asyncio.Protocol):
    """A mix-in for uvicorn's protocol on httptools that aborts a connection with too many pipelined requests.
    It also reports a disconnect to the request that is being answered.

    uvicorn keeps all requests that have arrived, and reports a disconnect only to the newest of them. It also
    stops reading when a request has to wait. A transport that does not read notices no disconnect.

    So this class goes on reading up to ``MAX_PIPELINED_BYTES``, then pauses. It aborts the connection if no
    answer becomes complete within ``PIPELINE_TIMEOUT_S``. It does not abort at once, because an honest client
    may send its next request a moment before uvicorn has ended the answer.
    """

    loop: asyncio.AbstractEventLoop
    transport: Any
    flow: Any
    """uvicorn's control of reading and writing."""
    cycle: Any
    """uvicorn's newest request cycle."""
    pipeline: Collection[Any] = ()
    """Requests that wait for the answer to an earlier request."""
    _cycles: tuple[Any, ...] = ()
    """Request cycles without a complete answer, oldest first. The newest cycle is always included."""
    headers: list[tuple[bytes, bytes]]
    """Headers of the newest request."""
    _head_bytes: int
    """Bytes of the newest request's URL, header names and header values."""
    _pipelined_bytes: deque[int]
    """Size in bytes of each request in ``pipeline``, newest first, as in ``pipeline``."""
    _pause_deadline: asyncio.TimerHandle | None = None
    """The abort of this connection; ``None``: reading is not paused."""

    def connection_made(self, transport: Any) -> None:
        self._pipelined_bytes = deque()
        super().connection_made(transport)

    @property
    def _bytes_ahead(self) -> int:
        """Bytes that have arrived of the requests in ``pipeline``."""
        return sum(self._pipelined_bytes)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.pipeline or self.transport.is_closing():
            return
        if self._bytes_ahead <= MAX_PIPELINED_BYTES:
            self.flow.resume_reading()
            return
        self.flow.pause_reading()
        if self._pause_deadline is None:
            self._pause_deadline = self.loop.call_later(PIPELINE_TIMEOUT_S, self._abort)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self.transport.abort()
            return
        super().on_headers_complete()  # type: ignore[misc]
        self._cycles = (*(one for one in self._cycles if not one.response_complete), self.cycle)
        if len(self.pipeline) > len(self._pipelined_bytes):
            separators = _HEADER_SEPARATOR_BYTES * len(self.headers)
            self._pipelined_bytes.appendleft(self._head_bytes + separators)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)  # type: ignore[misc]
        if self._pipelined_bytes:  # the newest request waits, and this is its body
            self._pipelined_bytes[0] += len(body)

    def on_response_complete(self) -> None:
        self._cancel_pause_deadline()
        super().on_response_complete()  # type: ignore[misc]
        while len(self._pipelined_bytes) > len(self.pipeline):
            self._pipelined_bytes.pop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_pause_deadline()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _cancel_pause_deadline(self) -> None:
        if self._pause_deadline is not None:
            self._pause_deadline.cancel()
            self._pause_deadline = None

    def _abort(self) -> None:
        logger.info(
            "disconnected a client that sent %d bytes ahead of an answer, which did not end in %g s; "
            "expected at most %d bytes",
            self._bytes_ahead,
            PIPELINE_TIMEOUT_S,
            MAX_PIPELINED_BYTES,
        )
        self.transport.abort()


MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a request's URL and headers. Also the maximum bytes between two parts of a body or after
its last part, such as trailers. Incomplete data is checked after each read, so one read may exceed the
limit."""
_HEAD_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class HeadLimit(asyncio.Protocol):
    """A mix-in for uvicorn's protocol on httptools that refuses headers beyond ``MAX_HEAD_BYTES``. uvicorn's
    protocol on h11 has such a limit already."""

    app: Any
    transport: Any
    cycle: Any
    _head_bytes = 0
    """Bytes of the URL and of the complete headers of the newest request."""
    _bytes_beside_body = 0
    """Number of bytes received since the newest request began, its headers ended, or the newest part of its
    body came, whichever was last. Bytes of the same read as that event do not count."""

    def data_received(self, data: bytes) -> None:
        self._bytes_beside_body += len(data)
        super().data_received(data)
        if self._bytes_beside_body <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LONG)
            self.transport.close()
        else:  # these are trailers, or another request behind the one that is being answered
            self.transport.abort()

    def on_message_begin(self) -> None:
        self._head_bytes = self._bytes_beside_body = 0
        super().on_message_begin()  # type: ignore[misc]

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._bytes_beside_body = 0
        app = self.app
        if self._head_bytes > MAX_HEAD_BYTES:
            self.app = _refuse_head
        try:
            super().on_headers_complete()  # type: ignore[misc]
        finally:
            self.app = app

    def on_body(self, body: bytes) -> None:
        self._bytes_beside_body = 0
        super().on_body(body)  # type: ignore[misc]


async def _refuse_head(scope: Any, receive: Any, send: Any) -> None:
    """ASGI application that answers a request whose headers are too long."""
    headers = [(b"connection", b"close"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body"})


class UpgradeIgnored(asyncio.Protocol):
    """A mix-in for uvicorn's protocol on httptools that ignores a client's offer to change to another
    protocol. Java's HTTP client offers HTTP/2 with its first request.

    A server may ignore the header ``Upgrade`` (RFC 9110 §7.8). But httptools treats all bytes after such
    headers as bytes of the other protocol. The request would lose its body, and uvicorn would parse the body
    as the next request.
    """

    transport: Any
    parser: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if hasattr(self, "parser"):  # h11 has none, and needs none
            self.parser = _UpgradeIgnoringParser(self.parser, self)

    def on_headers_complete(self) -> None:
        if not self.offers_upgrade:
            super().on_headers_complete()  # type: ignore[misc]

    def on_message_complete(self) -> None:
        if not self.offers_upgrade:
            super().on_message_complete()  # type: ignore[misc]

    @property
    def offers_upgrade(self) -> bool:
        """Whether the newest request offers another protocol. Its headers have just been parsed. False for
        ``CONNECT``, which uvicorn handles."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes:
        """Return the newest request's line and headers, without the offer of another protocol."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                parts = [part.strip() for part in value.split(b",")]
                value = b", ".join(part for part in parts if part.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))


_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class _UpgradeIgnoringParser:
    """httptools' parser. If a request offers another protocol, the parser reads its headers again without the
    offer."""

    def __init__(self, parser: Any, protocol: UpgradeIgnored) -> None:
        self._parser = parser
        self._protocol = protocol
        self.get_http_version, self.get_method = parser.get_http_version, parser.get_method
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade

    def feed_data(self, data: bytes) -> None:
        """Parse the next bytes. Raises ``HttpParserError``."""
        protocol = self._protocol
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not protocol.offers_upgrade or protocol.transport.is_closing():
                    raise
                data = protocol.head_without_upgrade() + data[upgrade.args[0] :]


class DeadlineProtocol(
    UpgradeIgnored,
    PipelineLimit,
    HeadLimit,
    HeaderDeadline,
    AnswerDeadline,
    AutoHTTPProtocol,  # type: ignore[misc, valid-type]
):
    """The protocol class that uvicorn would choose, with the deadlines and limits of this module added."""
