"""The lifetimes of programs: they begin with a request, end, fall silent, or make room for others."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.ids import ProgramId

from ..policies.policy_protocols import DecisionReason
from ..programs.program_state import ProgramState
from ..programs.program_status import ProgramSignal, ProgramStatus
from ..programs.program_table import ProgramTable
from .decision_recorder import DecisionRecorder
from .events_and_actions import EngineActionKind
from .lease_manager import LeaseManager
from .scheduler_state import Histories, SchedulerLimits
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

MAX_EXPIRED_PER_TICK = 8
"""Programs given up in one engine step; the rest follow in the next."""


class ProgramLifecycle:
    """Gives programs their place in line, learns from each that leaves, and lets its KV go.

    Times are seconds on the engine's monotonic clock.
    """

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        histories: Histories,
        table: ProgramTable,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        tier_manager: TierManager,
        journal: DecisionRecorder,
    ) -> None:
        self._limits = limits
        self._histories = histories
        self._table = table
        self._lease_manager = lease_manager
        self._workflow_predictor = workflow_predictor
        self._tier_manager = tier_manager
        self._journal = journal

    def open(self, program_id: ProgramId, now: float) -> ProgramState:
        """The program, known or new, of a request that has arrived."""
        program, forgotten = self._table.open(program_id, now)
        self.forget(forgotten, now)
        self._lease_manager.leases.heard(program.id, now)
        if not program.ranked or program.status is ProgramStatus.ENDED:
            # A place in line comes with the first request, not with an announcement; and an id used again
            # after its program's end is a new program.
            program.rank, program.ranked = self._table.next_rank(), True
            if program.status is ProgramStatus.ENDED:
                program.reset_for_reuse()
        return program

    def over(self, program: ProgramState, signal: ProgramSignal, outcome: str, now: float) -> None:
        """A program has ended (``END``) or was given up (``SILENCE``)."""
        if not self._table.signal(program, signal):
            return
        if (
            signal is ProgramSignal.END
        ):  # silence is a guess: a tool may outlast it, and its end is still to be told
            program.tools.clear()
        self._tier_manager.forget(program.id, now)
        if program.turns != program.turns_at_last_end:
            program.turns_at_last_end = program.turns
            self._histories.turns.observe(program.turns)
            # Whoever is not heard of any more has ended, as far as a cache can tell; who was cancelled was
            # broken off.
            self._workflow_predictor.over(program, ended=outcome != "cancelled")
            self._journal.over(program, outcome, now)
        self._workflow_predictor.touched(program)
        if signal is ProgramSignal.END:
            self._lease_manager.order(EngineActionKind.DROP, program.id, DecisionReason.END, now)
        else:
            self._lease_manager.order(EngineActionKind.RELEASE, program.id, DecisionReason.SILENT, now)

    def expire_silent_programs(self, now: float) -> None:
        """Programs that have not been heard of for too long are over."""
        for _ in range(MAX_EXPIRED_PER_TICK):
            program = self._table.silent(
                now, idle_s=self._limits.idle_program_s, promised_s=self._limits.silent_program_s
            )
            if program is None:
                break
            self.over(program, ProgramSignal.SILENCE, "silent", now)

    def forget(self, programs: Sequence[ProgramState], now: float) -> None:
        """Programs that had to leave the table for others: nothing of them stays, least of all KV."""
        for program in programs:
            self._tier_manager.forget(program.id, now)
            self._lease_manager.order(EngineActionKind.DROP, program.id, DecisionReason.SUPERSEDED, now)
            self._lease_manager.let_go.pop(program.id, None)
