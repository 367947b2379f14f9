"""The table of all known programs, in bounded memory. The table also applies the programs' status changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest

from sojourn.ids import ProgramId

from .program_state import ProgramState
from .program_status import OVER_STATUSES, TRANSITIONS, ProgramSignal, ProgramStatus

FORGOTTEN_SHARE = 50
"""A full table forgets one in this many programs at once, so that a flood of invented ids costs little."""


class ProgramTable:
    """The programs of one engine, at most ``max_programs``. There are more only while all of them have a
    request in the engine.

    A full table forgets programs without a request in the engine: ended and expired ones first, then those
    that never sent a request, so that a flood of invented ids displaces no real program, then the others. Of
    each, it forgets the longest silent first.

    A program between turns is *silent* after ``idle_s`` seconds without a contact, or after ``promised_s``
    seconds if its client promised heartbeats.
    """

    def __init__(
        self, max_programs: int = 2_000, *, idle_s: float = math.inf, promised_s: float = math.inf
    ) -> None:
        self.max_programs = max_programs
        self.forgotten = 0
        self._idle_s = idle_s
        self._promised_s = promised_s
        self._programs: dict[ProgramId, ProgramState] = {}
        self._next_rank = 0
        self._looked_s = -math.inf
        """Time at which ``silent`` last looked."""

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._programs.values())

    def __contains__(self, program_id: object) -> bool:
        return program_id in self._programs

    def get(self, program_id: ProgramId) -> ProgramState | None:
        """Return the program; ``None`` for an unknown id. This look-up does not count as a contact of the
        client."""
        return self._programs.get(program_id)

    @property
    def counts(self) -> Counter[ProgramStatus]:
        """Number of programs by status."""
        return Counter(program.status for program in self)

    def next_rank(self) -> int:
        """Return a new arrival rank, for a program or for a request without a program."""
        self._next_rank += 1
        return self._next_rank

    def open(self, program_id: ProgramId, now: float) -> tuple[ProgramState, list[ProgramState]]:
        """Find or create the program with this id, and record ``now`` as the time of its last contact.
        Returns the program, and the programs that were removed from a full table to make room for it."""
        program, forgotten = self._programs.get(program_id), []
        if program is None:
            if len(self._programs) >= self.max_programs:
                forgotten = self._make_room()
            program = self._programs[program_id] = ProgramState(program_id, self.next_rank(), now)
        program.last_contact_s = now
        return program, forgotten

    def signal(self, program: ProgramState, signal: ProgramSignal) -> bool:
        """Change a program's status as ``TRANSITIONS`` says. Returns whether the status changed."""
        ended, following = TRANSITIONS[signal]
        if program.status not in ended:
            return False
        program.status = following
        if following not in OVER_STATUSES:
            program.outcome = None
        return True

    def silent(self, now: float) -> list[ProgramState]:
        """Return the silent programs, the longest silent first. Looks at most once a second."""
        if now < self._looked_s + 1.0:
            return []
        self._looked_s = now
        silent = [
            program
            for program in self
            if program.status is ProgramStatus.ACTING
            and now - program.last_contact_s > (self._promised_s if program.heartbeats else self._idle_s)
        ]
        return sorted(silent, key=lambda program: program.last_contact_s)

    def _make_room(self) -> list[ProgramState]:
        idle = [program for program in self if not program.live_requests]
        most = max(1, self.max_programs // FORGOTTEN_SHARE)
        forgotten = nsmallest(most, idle, key=_worth)
        for program in forgotten:
            del self._programs[program.id]
        self.forgotten += len(forgotten)
        return forgotten


def _worth(program: ProgramState) -> tuple[int, float]:
    """Sort key of programs in a full table, the first to be forgotten first."""
    group = 0 if program.status in OVER_STATUSES else 2 if program.ranked else 1
    return group, program.last_contact_s
