"""When a program must be heard from: heartbeats keep a lease while an agent is silent for a good reason."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from .program import Program


class Heartbeats:
    """Open programs and the time of each one's last beat. No thread, no clock: the sender asks ``due``.

    Programs are held weakly: one that an agent let go of without ending it falls silent.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._open: WeakValueDictionary[str, Program] = WeakValueDictionary()
        self._last_s: dict[str, float] = {}
        self._lock = threading.RLock()

    def opened(self, program: Program, now: float) -> None:
        """The first beat of ``program`` comes one interval from ``now`` (monotonic seconds)."""
        with self._lock:
            self._open[program.id] = program
            self._last_s[program.id] = now

    def closed(self, program: Program) -> None:
        """No beat follows."""
        with self._lock:
            self._open.pop(program.id, None)
            self._last_s.pop(program.id, None)

    def due(self, now: float) -> tuple[list[Program], float | None]:
        """Programs to beat for at ``now``, and how many seconds to sleep until the next could be due.

        A program whose request is in flight is silent: the server sees that request itself.
        Without an open program the second value is ``None``.
        """
        with self._lock:
            beating: list[Program] = []
            wait_s: float | None = None
            for program_id in list(self._last_s):
                program = self._open.get(program_id)
                if program is None:
                    del self._last_s[program_id]
                    continue
                left_s = self._last_s[program_id] + self.interval_s - now
                if left_s <= 0:
                    self._last_s[program_id] = now
                    left_s = self.interval_s
                    if program.running_tools or not program.open_requests:
                        beating.append(program)
                wait_s = left_s if wait_s is None else min(wait_s, left_s)
            return beating, wait_s

    def after_fork(self) -> None:
        """A child does not speak for its parent's programs."""
        self._lock = threading.RLock()
        self._open = WeakValueDictionary()
        self._last_s = {}
