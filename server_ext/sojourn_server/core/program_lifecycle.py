"""Lifecycle of programs: requests open programs, then programs end or expire."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.ids import ProgramId

from ..policies.policy_protocols import DecisionReason
from ..programs.program_state import ProgramState
from ..programs.program_status import ProgramOutcome, ProgramSignal, ProgramStatus
from .decision_recorder import DecisionRecorder
from .lease_manager import LeaseManager
from .scheduler_state import ANY_TYPE, SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

MAX_EXPIRED_PER_TICK = 8
"""Maximum number of programs that expire in one engine step; further ones expire in later steps."""
OWN_TOOLS_PER_PROGRAM = 4
"""Number of running tool calls that each program may always have, even when all programs together have
``client_event_handler.MAX_RUNNING_TOOLS``. Without this minimum, one client that reports 100,000 calls would
suppress the reports of all other clients."""


class ProgramLifecycle:
    """Opens, ends and expires programs. Learns from ended programs and releases their KV. Times are seconds
    on the engine's monotonic clock."""

    def __init__(
        self,
        state: SchedulerState,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        tier_manager: TierManager,
        decision_recorder: DecisionRecorder,
    ) -> None:
        self._state = state
        self._programs = state.programs
        self._leases = state.leases
        self._lease_manager = lease_manager
        self._workflow_predictor = workflow_predictor
        self._tier_manager = tier_manager
        self._decision_recorder = decision_recorder

    def open(self, program_id: ProgramId, now: float) -> ProgramState:
        """Return the program of a request that has arrived. An unknown id or the id of an ended program
        begins a new program with a new rank."""
        program, forgotten = self._programs.open(program_id, now)
        self.forget(forgotten, now)
        self._leases.heard(program.id, now)
        program.disconnected = False
        if not program.ranked or program.status is ProgramStatus.ENDED:
            # The first request determines the rank, a program_start does not. An id that is used again after
            # its program ended is a new program.
            program.rank, program.ranked = self._programs.next_rank(), True
            if program.status is ProgramStatus.ENDED:
                program.reset_for_reuse(now)
        return program

    def end_program(
        self, program: ProgramState, signal: ProgramSignal, outcome: ProgramOutcome, now: float
    ) -> None:
        """End a program because it is done (``END``) or was silent for too long (``SILENCE``). The
        scheduler's ``Histories`` learn the program's turns and workflow steps. ``END`` drops the program's
        KV; ``SILENCE`` only ends its lease.
        """
        if not self._programs.signal(program, signal):
            return
        program.outcome = outcome
        # After silence a tool may still run, and its end may be reported. More than a few running tools are
        # not worth the memory: an expired program stays in the table until others need its place.
        if signal is ProgramSignal.END or len(program.tools) > OWN_TOOLS_PER_PROGRAM:
            program.tools.clear()
        self._tier_manager.forget(program.id, now)
        if program.turns != program.turns_at_last_end:
            program.turns_at_last_end = program.turns
            self._state.histories.turns.observe(program.turns)
            # A program without a turn had no service. Clients could flood the history with such programs.
            if program.turns and outcome is not ProgramOutcome.CANCELLED:
                self._state.histories.service.observe(program.agent_type or ANY_TYPE, program.attained_s)
            # An expired program counts as ended. A cancelled program does not, since it could have gone on.
            self._workflow_predictor.learn_ended_program(
                program, ended=outcome is not ProgramOutcome.CANCELLED
            )
            self._decision_recorder.count_ended_program(program, outcome.value, now)
        self._workflow_predictor.eviction_key_changed(program)
        if signal is ProgramSignal.END:
            self._lease_manager.drop(program.id, DecisionReason.END, now)
        else:
            self._lease_manager.end(program.id, DecisionReason.SILENT, now)

    def expire_silent_programs(self, now: float) -> None:
        """End at most ``MAX_EXPIRED_PER_TICK`` programs that have been silent for too long."""
        for program in self._programs.silent(now)[:MAX_EXPIRED_PER_TICK]:
            self.end_program(program, ProgramSignal.SILENCE, program.silent_outcome(), now)

    def forget(self, programs: Sequence[ProgramState], now: float) -> None:
        """Drop the KV and all other data of programs that were removed from the table."""
        for program in programs:
            self._tier_manager.forget(program.id, now)
            self._lease_manager.drop(program.id, DecisionReason.SUPERSEDED, now)
            # A preset that leaves the KV of ended programs in the cache keeps their contexts, too.
            self._state.contexts.drop(program.id)
            self._state.owners.contexts.pop(program.id, None)
            self._state.release_reasons.pop(program.id, None)
