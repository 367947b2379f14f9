"""A block that its task can be made to leave: what ``asyncio.timeout`` does for a time, for any reason."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Leave:
    """``with Leave() as leave``: whoever calls ``leave.now()`` or set a time for it ends the block early.

    It takes no task of its own, as ``asyncio.wait`` and ``asyncio.wait_for`` (before Python 3.12) do: for
    each request that would cost as much as all decisions about it. On Python 3.10, where a task cannot say
    who cancelled it, a cancellation by somebody else in the same turn of the loop is taken for ours.
    """

    def __init__(self) -> None:
        self.left = False
        """The block was ended early."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._soon: asyncio.Handle | None = None
        self._cancels_before = 0

    def __enter__(self) -> Leave:
        task = self._task = asyncio.current_task()
        assert task is not None
        if sys.version_info >= (3, 11):
            self._cancels_before = task.cancelling()
        return self

    def now(self) -> None:
        """End the block where it waits. Called a second time, or after its end, it does nothing."""
        # By the loop, when the task waits: cancelled while it runs, it would end at an await after the block.
        if self._task is not None and not self.left:
            self._set(self._loop.call_soon(self._cancel))

    def after(self, delay_s: float) -> None:
        """End it then, if it has not ended; instead of the time that was set before."""
        if self._task is not None and not self.left:
            self._set(self._loop.call_later(delay_s, self._cancel))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        self._set(None)
        if not self.left or task is None:
            return False
        if sys.version_info >= (3, 11) and task.uncancel() > self._cancels_before:
            return False  # somebody else cancels the task as well
        return kind is asyncio.CancelledError

    def _set(self, handle: asyncio.Handle | None) -> None:
        if self._soon is not None:
            self._soon.cancel()
        self._soon = handle

    def _cancel(self) -> None:
        if self._task is not None:
            self.left = True
            self._task.cancel()
