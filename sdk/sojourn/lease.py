"""When a program must be heard from: heartbeats keep a lease while an agent is silent for a good reason."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from .program import Program


class _Watch:
    """When an open program was last heard from."""

    __slots__ = ("last_s",)

    def __init__(self, now: float) -> None:
        self.last_s = now


class Heartbeats:
    """Open programs and the time of each one's last beat. No thread, no clock: the sender asks ``due``.

    Programs are held weakly: one that an agent let go of without ending it falls silent. There is no lock
    either: each access is one atomic operation of a dict, and a beat more or less at the end does no harm.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        # By object: two blocks may run under one id, and the end of one must not silence the other.
        self._open: dict[ref[Program], _Watch] = {}

    @property
    def promised(self) -> bool:
        """Somebody counts on a beat. May be true for a moment longer."""
        return bool(self._open)

    def opened(self, program: Program, now: float) -> None:
        """The first beat of ``program`` comes one interval from ``now`` (monotonic seconds)."""
        self._open[ref(program)] = _Watch(now)

    def closed(self, program: Program) -> None:
        """No beat follows."""
        self._open.pop(ref(program), None)

    def find(self, program_id: str) -> Program | None:
        """An open program of this id that promised to be heard from."""
        for reference in self._open.copy():
            program = reference()
            if program is not None and program.id == program_id and program.is_open:
                return program
        return None

    def due(self, now: float) -> tuple[list[Program], float | None]:
        """Programs to beat for at ``now``, and how many seconds to sleep until the next could be due.

        A program whose request is in flight is silent: the server sees that request itself.
        Without an open program the second value is ``None``.
        """
        beating: list[Program] = []
        wait_s: float | None = None
        for reference, watch in self._open.copy().items():
            program = reference()
            if program is None:
                self._open.pop(reference, None)
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
