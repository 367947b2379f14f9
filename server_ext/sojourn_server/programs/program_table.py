"""The table of all known programs, in bounded memory. The table also applies the programs' status changes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from sojourn.ids import ProgramId

from .program_state import ProgramState
from .program_status import OVER_STATUSES, ProgramSignal, ProgramStatus, next_status


class ProgramTable:
    """The programs of one engine, at most ``max_programs``. There are more only while all of them have a
    request in the engine.

    From a full table, ended and expired programs without a request in the engine are removed first, in the
    order in which they ended. Next are programs that never sent a request, oldest first, so that a flood of
    invented ids displaces no real program. Last are other programs without a request in the engine, the
    longest silent first.
    """

    def __init__(self, max_programs: int = 20_000) -> None:
        if max_programs < 1:
            raise ValueError(f"max_programs is {max_programs}; expected at least 1")
        self.max_programs = max_programs
        self.counts: Counter[ProgramStatus] = Counter()
        self.forgotten = 0
        self._programs: OrderedDict[ProgramId, ProgramState] = OrderedDict()
        self._over: OrderedDict[ProgramId, None] = OrderedDict()
        self._announced_only: OrderedDict[ProgramId, None] = OrderedDict()
        """Programs that sent events but no request yet, the oldest first."""
        self._acting: tuple[OrderedDict[ProgramId, None], ...] = (OrderedDict(), OrderedDict())
        """Programs between turns, the longest silent first: in the first table programs without heartbeats,
        in the second programs with heartbeats."""
        self._next_rank = 0

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

    def running_tools(self) -> int:
        """Return the number of running tool calls of all programs. Takes O(programs)."""
        return sum(len(program.tools) for program in self._programs.values())

    def next_rank(self) -> int:
        """Return a new arrival rank, for a program or for a request without a program."""
        self._next_rank += 1
        return self._next_rank

    def open(self, program_id: ProgramId, now: float) -> tuple[ProgramState, list[ProgramState]]:
        """Find or create the program with this id, and record ``now`` as the time of its last contact.
        Returns the program, and the programs that were removed from a full table to make room for it."""
        program = self._programs.get(program_id)
        if program is not None:
            self._programs.move_to_end(program_id)
            acting = self._acting[program.heartbeats]
            if program_id in acting:
                acting.move_to_end(program_id)
            program.last_contact_s = now
            return program, []
        forgotten = self._make_room()
        program = ProgramState(program_id, self.next_rank(), now, last_contact_s=now)
        self._programs[program_id] = program
        self.counts[program.status] += 1
        self._announced_only[program_id] = None
        self._acting[False][program_id] = None
        return program, forgotten

    def signal(self, program: ProgramState, signal: ProgramSignal) -> bool:
        """Change a program's status as ``next_status`` says. Returns whether the status changed."""
        new = next_status(program.status, signal)
        if new is program.status:
            return False
        self.counts[program.status] -= 1
        self.counts[new] += 1
        if new in OVER_STATUSES:
            self._over[program.id] = None
        elif program.status in OVER_STATUSES:
            self._over.pop(program.id, None)
        if new is ProgramStatus.ACTING:
            self._acting[program.heartbeats][program.id] = None
        else:
            self._acting[program.heartbeats].pop(program.id, None)
        if signal is ProgramSignal.REQUEST_ARRIVED:
            self._announced_only.pop(program.id, None)
        program.status = new
        if new not in OVER_STATUSES:
            program.outcome = None
        return True

    def promise_heartbeats(self, program: ProgramState) -> None:
        """Record that the program's client will send heartbeats. Call this method right after ``open``: it
        assumes that no other program has a later contact."""
        if program.heartbeats:
            return
        was_acting = self._acting[False].pop(program.id, 0) is None
        program.heartbeats = True
        if was_acting:
            self._acting[True][program.id] = None

    def silent(self, now: float, *, idle_s: float, promised_s: float) -> ProgramState | None:
        """Return a program between turns that has been silent for too long; ``None`` if there is none.

        The limit is ``promised_s`` seconds if the program's client promised heartbeats, else ``idle_s``
        seconds.
        """
        for acting, silence_s in zip(self._acting, (idle_s, promised_s), strict=True):
            program_id = next(iter(acting), None)
            if program_id is not None:
                program = self._programs[program_id]
                if now - program.last_contact_s > silence_s:
                    return program
        return None

    def longest_idle_s(self, now: float) -> float:
        """The longest time in seconds for which a program between turns has been silent; 0 without such a
        program."""
        oldest = [next(iter(acting)) for acting in self._acting if acting]
        return max((now - self._programs[program_id].last_contact_s for program_id in oldest), default=0.0)

    def _make_room(self) -> list[ProgramState]:
        forgotten: list[ProgramState] = []
        while len(self._programs) >= self.max_programs:
            victim = self._oldest_forgettable()
            if victim is None:
                break  # all programs have requests in the engine, which limits their number
            del self._programs[victim.id]
            self._over.pop(victim.id, None)
            self._announced_only.pop(victim.id, None)
            self._acting[victim.heartbeats].pop(victim.id, None)
            self.counts[victim.status] -= 1
            self.forgotten += 1
            forgotten.append(victim)
        return forgotten

    def _oldest_forgettable(self) -> ProgramState | None:
        for program_id in self._over:
            program = self._programs[program_id]
            if not program.live_requests:
                return program
        for program_id in self._announced_only:
            return self._programs[program_id]
        for program in self._programs.values():
            if not program.live_requests:
                return program
        return None
