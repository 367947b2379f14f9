"""A deadline for clients that do not read their answers, which uvicorn lacks.

uvicorn waits without limit for room in a connection's buffer. Without a deadline, a client that reads nothing
keeps its request, its place at an engine and its share for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

UNREAD_TIMEOUT_S = 60.0
"""While a connection's buffer is full, its client must read ``MIN_READ_BYTES`` in each period of so many
seconds."""
MIN_READ_BYTES = 64 << 10


class AnswerDeadline(asyncio.Protocol):
    """A mix-in for uvicorn's protocols that aborts a connection whose client does not read. For the request
    this is a disconnect of its client."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    _unread_bytes = 0
    """Bytes that waited for the client when ``_unread_deadline`` was set."""
    _unread_deadline: asyncio.TimerHandle | None = None
    """The next call of ``_check``; ``None``: the buffer is not full."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
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
        # A long answer waits as a whole: its client may need many periods for it.
        if self._unread_bytes - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._watch()
        else:
            self._unread_deadline = None
            self.transport.abort()  # ``close`` would wait for the client too
