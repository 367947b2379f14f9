"""uvicorn's HTTP protocol with a deadline for a request's headers, which uvicorn lacks.

Without a deadline, a client that sends half a request holds a connection for ever. Some hundreds of such
clients use up a gateway's file descriptors. ``request_bodies`` has the deadlines of bodies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .answer_deadline import AnswerDeadline

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
    """Whether a request has begun to arrive whose headers are not complete."""

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
        """Close the connection; if a request has begun, answer it with status 408 first."""
        self._deadline = None
        if self._is_serving() or self.transport.is_closing():
            return
        if self._has_begun:
            self.transport.write(_TIMED_OUT)
        self.transport.close()


class DeadlineProtocol(HeaderDeadline, AnswerDeadline, AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The protocol class that uvicorn would choose, with the deadlines for requests and answers added."""
