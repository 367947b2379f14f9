"""A thread that carries out the copies of one direction, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class TransferThread:
    """Runs work in the order of submission. An exception does not end the thread. Work that hangs does not
    keep the process from ending, as that of a pool would."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"sojourn-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue ``work``. Exceptions that it does not handle itself go to ``threading.excepthook``."""
        self._work.put(work)

    def end_of_work(self) -> threading.Event:
        """Return an event that is set once all work submitted so far has been done."""
        ended = threading.Event()
        self.submit(ended.set)
        return ended

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after the queued work. Waits at most ``timeout_s`` seconds for the thread to end."""
        self._work.put(None)
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread))
                )
