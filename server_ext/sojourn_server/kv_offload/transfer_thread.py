"""A thread that carries out the copies of one direction, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Moved(NamedTuple):
    """The bytes that a piece of work moved, and the seconds that it took."""

    moved_bytes: int
    seconds: float | None = None
    """Seconds of copying; ``None`` if equal to the run time of the work."""


Work = Callable[[], "Moved | int | None"]
"""A piece of work. Returns a ``Moved``, or only the number of bytes moved, or ``None`` if it moved none."""


class TransferThread:
    """Runs work in the order of submission. An exception does not end the thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"sojourn-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Queue ``work``. Exceptions that it does not handle itself go to ``threading.excepthook``."""
        self._work.put(work)

    def end_of_work(self) -> threading.Event:
        """Return an event that is set once all work submitted so far has been done."""
        ended = threading.Event()
        self.submit(ended.set)
        return ended

    def take_moved(self) -> tuple[float, int]:
        """Return the seconds of work, and the bytes moved, since the last call."""
        with self._lock:
            moved = self._seconds, self._bytes
            self._seconds, self._bytes = 0.0, 0
        return moved

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
            began = time.perf_counter()
            moved: Moved | int | None = None
            try:
                moved = work()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread))
                )
            if not isinstance(moved, Moved):
                moved = Moved(moved or 0)
            took_s = moved.seconds if moved.seconds is not None else time.perf_counter() - began
            with self._lock:
                self._seconds += took_s
                self._bytes += moved.moved_bytes
