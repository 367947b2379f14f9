"""``CancelScope``, a ``with`` block that other code can end early, at once or after a delay."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class CancelScope:
    """Context manager whose block other code can end early, by ``end_now()`` or ``end_after(seconds)``.

    The block then ends without an exception, and ``ended_early`` is True. The scope starts no task: one task
    per request would cost as much as all routing decisions. ``asyncio.wait`` starts tasks, and so does
    ``asyncio.wait_for`` before Python 3.12.

    On Python 3.10, one iteration of the event loop may bring two cancellations: the scope's own, and one from
    outside. Then the one from outside is lost.
    """

    def __init__(self) -> None:
        self.ended_early = False
        """Whether the block was ended early."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._soon: asyncio.Handle | None = None
        self._cancels_before = 0

    def __enter__(self) -> CancelScope:
        task = self._task = asyncio.current_task()
        assert task is not None
        if sys.version_info >= (3, 11):
            self._cancels_before = task.cancelling()
        return self

    def end_now(self) -> None:
        """End the block at its current ``await``. Further calls, and calls after the block, do nothing."""
        # The loop calls ``_cancel`` while the task waits. A running task would be cancelled at a later await.
        if self._task is not None and not self.ended_early:
            self._set(self._loop.call_soon(self._cancel))

    def end_after(self, delay_s: float) -> None:
        """End the block in ``delay_s`` seconds. Replaces an earlier delay."""
        if self._task is not None and not self.ended_early:
            self._set(self._loop.call_later(delay_s, self._cancel))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        self._set(None)
        if not self.ended_early or task is None:
            return False
        if sys.version_info >= (3, 11) and task.uncancel() > self._cancels_before:
            return False  # the task is cancelled from outside as well
        return kind is asyncio.CancelledError

    def _set(self, handle: asyncio.Handle | None) -> None:
        """Cancel the scheduled call of ``_cancel``, if any. ``handle``: the new scheduled call; ``None``:
        there is none."""
        if self._soon is not None:
            self._soon.cancel()
        self._soon = handle

    def _cancel(self) -> None:
        if self._task is not None:
            self.ended_early = True
            self._task.cancel()
