"""The lifetimes of programs: they begin with a request, end, fall silent, or make room for others."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.ids import ProgramId

from ..policy.base import Reason
from ..program.record import Program
from ..program.status import ProgramStatus, Signal
from ..program.table import ProgramTable
from .facts import ActionKind
from .foreseer import Foreseer
from .journal import Journal
from .keeper import Keeper
from .placer import Placer
from .state import Histories, StewardLimits

MAX_SILENT_PER_TICK = 8
"""Programs given up in one engine step; the rest follow in the next."""


class Lifetimes:
    """Gives programs their place in line, learns from each that leaves, and lets its KV go.

    Times are seconds on the engine's monotonic clock.
    """

    def __init__(
        self,
        *,
        limits: StewardLimits,
        histories: Histories,
        table: ProgramTable,
        keeper: Keeper,
        foreseer: Foreseer,
        placer: Placer,
        journal: Journal,
    ) -> None:
        self._limits = limits
        self._histories = histories
        self._table = table
        self._keeper = keeper
        self._foreseer = foreseer
        self._placer = placer
        self._journal = journal

    def open(self, program_id: ProgramId, now: float) -> Program:
        """The program, known or new, of a request that has arrived."""
        program, forgotten = self._table.open(program_id, now)
        self.forget(forgotten, now)
        self._keeper.leases.heard(program.id, now)
        if not program.ranked or program.status is ProgramStatus.ENDED:
            # A place in line comes with the first request, not with an announcement; and an id used again
            # after its program's end is a new program.
            program.rank, program.ranked = self._table.next_rank(), True
            if program.status is ProgramStatus.ENDED:
                program.begin_again()
        return program

    def over(self, program: Program, signal: Signal, outcome: str, now: float) -> None:
        """A program has ended (``END``) or was given up (``SILENCE``)."""
        if not self._table.signal(program, signal):
            return
        if signal is Signal.END:  # silence is a guess: a tool may outlast it, and its end is still to be told
            program.tools.clear()
        self._placer.forget(program.id, now)
        if program.turns != program.turns_when_over:
            program.turns_when_over = program.turns
            self._histories.turns.observe(program.turns)
            # Whoever is not heard of any more has ended, as far as a cache can tell; who was cancelled was
            # broken off.
            self._foreseer.over(program, ended=outcome != "cancelled")
            self._journal.over(program, outcome, now)
        self._foreseer.touched(program)
        if signal is Signal.END:
            self._keeper.order(ActionKind.DROP, program.id, Reason.END, now)
        else:
            self._keeper.order(ActionKind.RELEASE, program.id, Reason.SILENT, now)

    def give_up_silent(self, now: float) -> None:
        """Programs that have not been heard of for too long are over."""
        for _ in range(MAX_SILENT_PER_TICK):
            program = self._table.silent(
                now, idle_s=self._limits.idle_program_s, promised_s=self._limits.silent_program_s
            )
            if program is None:
                break
            self.over(program, Signal.SILENCE, "silent", now)

    def forget(self, programs: Sequence[Program], now: float) -> None:
        """Programs that had to leave the table for others: nothing of them stays, least of all KV."""
        for program in programs:
            self._placer.forget(program.id, now)
            self._keeper.order(ActionKind.DROP, program.id, Reason.SUPERSEDED, now)
            self._keeper.let_go.pop(program.id, None)
