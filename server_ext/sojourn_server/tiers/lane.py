"""One direction of copying: a thread that does one thing after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Lane:
    """Work in the order in which it was given. Nothing that fails here ends the thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"sojourn-{name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], int]) -> None:
        """``work`` returns the bytes that it moved, and sees to its own errors."""
        self._work.put(work)

    def note_moved(self, seconds: float, moved_bytes: int) -> None:
        """Something went this way without the thread, because it could not wait."""
        with self._lock:
            self._seconds += seconds
            self._bytes += moved_bytes

    def take_moved(self) -> tuple[float, int]:
        """Seconds of work and bytes moved since it was last asked."""
        with self._lock:
            moved = self._seconds, self._bytes
            self._seconds, self._bytes = 0.0, 0
        return moved

    def close(self, timeout_s: float = 5.0) -> None:
        """What was given is done; wait for it so long."""
        self._work.put(None)
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Its thread has not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            began = time.perf_counter()
            moved = 0
            try:
                moved = work()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread))
                )
            with self._lock:
                self._seconds += time.perf_counter() - began
                self._bytes += moved
