"""When a program must be heard from: heartbeats keep a lease while an agent is silent for a good reason."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from .program import Program


class _Watch:
    """One open program and its last beat."""

    __slots__ = ("last_s", "program")

    def __init__(self, program: Program, now: float) -> None:
        self.program = ref(program)
        self.last_s = now


class Heartbeats:
    """Open programs and the time of each one's last beat. No thread, no clock: the sender asks ``due``.

    Programs are held weakly: one that an agent let go of without ending it falls silent. There is no lock
    either: each access is one atomic operation of a dict, and a beat more or less at the end does no harm.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._open: dict[str, _Watch] = {}

    def opened(self, program: Program, now: float) -> None:
        """The first beat of ``program`` comes one interval from ``now`` (monotonic seconds)."""
        self._open[program.id] = _Watch(program, now)

    def closed(self, program: Program) -> None:
        """No beat follows."""
        self._open.pop(program.id, None)

    def due(self, now: float) -> tuple[list[Program], float | None]:
        """Programs to beat for at ``now``, and how many seconds to sleep until the next could be due.

        A program whose request is in flight is silent: the server sees that request itself.
        Without an open program the second value is ``None``.
        """
        beating: list[Program] = []
        wait_s: float | None = None
        for program_id, watch in self._open.copy().items():
            program = watch.program()
            if program is None:
                self._open.pop(program_id, None)
                continue
            left_s = watch.last_s + self.interval_s - now
            if left_s <= 0:
                watch.last_s = now
                left_s = self.interval_s
                if program.running_tools or not program.open_requests:
                    beating.append(program)
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        return beating, wait_s

    def after_fork(self) -> None:
        """A child does not speak for its parent's programs."""
        self._open = {}
