"""Records decisions on requests, programs and blocks in the decision log and the counters.

``LeaseManager`` records decisions on leases, ``TurnGapTracker`` records turns and gaps.
"""

from __future__ import annotations

from sojourn.ids import ProgramId
from sojourn.wire_codec import Outcome

from ..metrics.preemption_cascades import PreemptionCascades
from ..metrics.turn_ledger import LossCause
from ..policies.placement.placement_policy import MoveTiming, TierMove
from ..policies.policy_protocols import DecisionReason
from ..policies.preemption_policies import RecoveryMethod
from ..programs.program_state import ProgramState
from .request_table import RequestState
from .scheduler_state import SchedulerState


class DecisionRecorder:
    """Writes the decision log and counters of one engine. Times are seconds on the engine's monotonic
    clock."""

    def __init__(self, state: SchedulerState) -> None:
        self._decisions = state.decisions
        self._recorder = state.recorder
        self._pool = state.pool
        self._cascades = PreemptionCascades()
        self._steps = 0
        """Number of completed engine steps."""

    def count_hint(self, outcome: Outcome) -> None:
        """Count a request's hint by its outcome."""
        self._recorder.count("sojourn_hints_total", outcome=outcome.value)

    def preempted(
        self, request_state: RequestState | None, now: float, recovery: RecoveryMethod, tokens: int
    ) -> None:
        """Log that a running request was preempted and lost the KV of ``tokens`` tokens. An unknown request
        (``None``) is only counted."""
        self._cascade(self._cascades.preempted(self._steps))
        self._preempted(request_state, now, recovery.value, tokens, in_cascade=self._cascades.length)

    def load_given_up(self, request_state: RequestState | None, now: float) -> None:
        """Log that a request lost the blocks into which its KV was being loaded. An unknown request
        (``None``) is only counted."""
        self._preempted(request_state, now, "load", 0)

    def _preempted(
        self, request_state: RequestState | None, now: float, mode: str, tokens: int, **more: float
    ) -> None:
        self._recorder.count("sojourn_preemptions_total", mode=mode)
        if request_state is not None:
            numbers = {"tokens": tokens, "times": request_state.preemptions, **more}
            self._decisions.add(now, "preempt", request_state.program_id, mode, **numbers)

    def side_request(self, program_id: ProgramId, tokens: int, now: float) -> None:
        """Log that a request with a prompt of ``tokens`` tokens is no turn of its program."""
        self._decisions.add(now, "side_request", program_id, "other_context", tokens=tokens)

    def step_completed(self) -> None:
        """Count an engine step."""
        self._steps += 1
        if self._cascades.length:
            self._cascade(self._cascades.end_if_stale(self._steps))

    def _cascade(self, length: int) -> None:
        if length:
            self._recorder.observe("sojourn_preemption_cascade_length", length)

    def refused(self, request_state: RequestState, now: float) -> None:
        """Log that the engine refused a request because placement kept it waiting for too long."""
        self._recorder.count("sojourn_gate_timeouts_total")
        self._decisions.add(now, "refuse", request_state.program_id, DecisionReason.PLACED.value)

    def evicted(self, cause: LossCause, blocks: int) -> None:
        """Count the eviction of cached blocks, by cause."""
        lost, recorder = cause.value, self._recorder
        recorder.count("sojourn_evictions_total", blocks, tier="device", cause=lost)
        evicted_bytes = blocks * self._pool.block_bytes
        recorder.count("sojourn_evicted_bytes_total", evicted_bytes, tier="device", cause=lost)

    def count_ended_program(self, program: ProgramState, outcome: str, now: float) -> None:
        """Count a program that has ended or expired, and its duration."""
        self._recorder.count("sojourn_programs_finished_total", outcome=outcome)
        self._recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)

    def moved(self, program_id: ProgramId, move: TierMove, now: float) -> None:
        """Log a decision of placement: a program moves to another tier now, or will move after its turn."""
        kind = "to_" + move.to.value if move.when is MoveTiming.NOW else "leaves_after_turn"
        self._decisions.add(now, kind, program_id, move.reason.value, **dict(move.terms))
        self._recorder.count(
            "sojourn_placements_total", to=move.to.value, when=move.when.value, reason=move.reason.value
        )

    def prefetched(
        self,
        program_id: ProgramId,
        now: float,
        *,
        missing_blocks: int,
        coming_blocks: int,
        lost_blocks: int,
        load_blocks: int,
    ) -> None:
        """Log the prefetch of a program's prefix. ``missing_blocks`` were not on the device. Of these,
        ``coming_blocks`` are read from disk, ``lost_blocks`` are in no tier, and ``load_blocks`` are loaded
        into the device."""
        if load_blocks:
            reason = DecisionReason.TO_DEVICE
        elif coming_blocks:
            reason = DecisionReason.FROM_DISK
        elif not missing_blocks:
            reason = DecisionReason.IN_PLACE
        else:
            reason = DecisionReason.NO_TIER if lost_blocks == missing_blocks else DecisionReason.IN_HOST
        blocks = load_blocks or missing_blocks
        self._decisions.add(now, "prefetch", program_id, reason.value, blocks=blocks)
        self._recorder.count("sojourn_prefetches_total", outcome=reason.value)
