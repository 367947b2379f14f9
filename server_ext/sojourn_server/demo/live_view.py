"""Progress of a demo arm, as lines on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rich.console import Console

from .demo_tasks import DemoTask

INTERVAL_S = 15.0
"""Seconds between two lines of progress."""


class LiveView:
    """Context manager that displays the progress of one arm. The programs' threads call ``update``."""

    def __init__(self, arm: str, tasks: Sequence[DemoTask], console: Console) -> None:
        self._arm, self._console = arm, console
        self._names = [task.name for task in tasks]
        self._turns = sum(len(task.turns) for task in tasks)
        self._state, self._done = ["waiting"] * len(tasks), [0] * len(tasks)
        """State of each program, and the number of its answered requests."""
        self._lock = threading.Lock()
        self._first_s: float | None = None
        self._last_s = self._said_s = time.monotonic()
        self._closed = False

    def __enter__(self) -> LiveView:
        self._said_s = time.monotonic()
        self._say(f"{len(self._names)} programs start")
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True  # programs of an interrupted arm go on in their threads
        self._say(self._totals())

    def update(self, index: int, state: str, turn: int, text: str) -> None:
        """Set the state of program ``index``: ``thinking``, ``tool``, ``done`` or ``failed``. ``turn`` counts
        from 1. ``text``: the turn's thought, its command, or how the program ended."""
        if self._closed:
            return
        with self._lock:
            self._state[index], self._done[index] = state, turn - (state == "thinking")
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
            if state in ("done", "failed"):
                self._say(f"{self._names[index]}: {text}, turn {turn}")
            elif self._last_s - self._said_s >= INTERVAL_S:
                self._said_s = self._last_s
                self._say(self._totals())

    def _totals(self) -> str:
        """Return the seconds from the first program's start to the last update, as in the report, and the
        numbers of turns and programs by state."""
        count = self._state.count
        return (
            f"{self._last_s - (self._first_s or self._last_s):.0f} s, {sum(self._done)}/{self._turns} turns, "
            f"{count('thinking')} thinking, {count('tool')} in tools, "
            f"{count('done') + count('failed')}/{len(self._state)} ended"
        )

    def _say(self, text: str) -> None:
        self._console.print(f"{self._arm}: {text}", highlight=False, soft_wrap=True, markup=False)
