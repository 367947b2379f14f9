"""Lifecycle of requests: their arrival, admission, preemption and end.

A turn ends when the last of its requests leaves.
"""

from __future__ import annotations

from sojourn.wire_codec import Outcome

from ..metrics.turn_ledger import common_prefix_length
from ..policies.policy_protocols import DecisionReason, RetentionDecision
from ..policies.policy_views import WaitingRequestView
from ..programs.program_status import OVER_STATUSES, ProgramSignal
from .admission_controller import AdmissionController
from .decision_recorder import DecisionRecorder
from .demand_forecaster import DemandForecaster
from .events_and_actions import (
    EngineActionKind,
    LeaseGranted,
    LoadGivenUp,
    RecoveryChosen,
    RequestAdmitted,
    RequestArrived,
    RequestPreempted,
    TurnFinished,
    TurnFinishReason,
    UntrackedRequestArrived,
    UntrackedRequestLeft,
)
from .lease_manager import LeaseManager
from .program_lifecycle import ProgramLifecycle
from .request_hints import has_unused_field, unused_hint_fields
from .request_table import RequestState
from .scheduler_state import SchedulerState
from .tier_manager import TierManager
from .turn_gap_tracker import TurnGapTracker
from .workflow_predictor import WorkflowPredictor


class RequestLifecycle:
    """Handles events of requests: updates the tables and calls the scheduler's parts that need the event.
    Times are seconds on the engine's monotonic clock."""

    def __init__(
        self,
        state: SchedulerState,
        program_lifecycle: ProgramLifecycle,
        *,
        lease_manager: LeaseManager,
        turns: TurnGapTracker,
        predictor: WorkflowPredictor,
        forecaster: DemandForecaster,
        admission: AdmissionController,
        tiers: TierManager,
        decision_recorder: DecisionRecorder,
    ) -> None:
        self._state = state
        self._unused_hints = unused_hint_fields(state.preset)
        self._programs = state.programs
        self._requests = state.requests
        self._leases = state.leases
        self._program_lifecycle = program_lifecycle
        self._lease_manager = lease_manager
        self._turns = turns
        self._predictor = predictor
        self._forecaster = forecaster
        self._admission = admission
        self._tiers = tiers
        self._decision_recorder = decision_recorder
        self.now_s = 0.0
        """Time of the last ``RequestArrived`` or ``Tick`` event."""

    def waiting_view(self, request_state: RequestState) -> WaitingRequestView:
        """Return the request's data in the form that the queue order policy reads, as of ``now_s``."""
        program = request_state.program
        leased = program is not None and program.id in self._leases
        return self._requests.waiting(request_state, self.now_s, leased=leased)

    def promoted_s(self, request_state: RequestState) -> float:
        """Time at which the request moves to the front of the queue because of its long wait. ``inf``: the
        request does not move."""
        return self._state.preset.order.promoted_s(self.waiting_view(request_state))

    def arrived(self, event: RequestArrived, now: float) -> None:
        """Add a request, and open its program. The arrival ends the gap after the program's last turn."""
        self.now_s = now
        self._end_missing_request(event.request_id, now)
        program_id, context = event.identity.program_id, event.identity.context
        program = self._program_lifecycle.open(program_id, now) if program_id is not None else None
        request_state = self._requests.enter(event.request_id, program, now, event.prompt_tokens)
        request_state.priority = event.priority
        ttl_clipped = self._requests.apply_hint(request_state, context, self._state.limits.max_hinted_ttl_s)
        outcome = event.identity.outcome
        # A hint with an invalid field counts as clipped, even if it also has fields that are not used.
        if outcome is not Outcome.CLIPPED:
            if program is not None and context is not None and has_unused_field(context, self._unused_hints):
                outcome = Outcome.UNSUPPORTED
            elif ttl_clipped:
                outcome = Outcome.CLIPPED
        if outcome is not None:
            self._decision_recorder.count_hint(outcome)
        if program is None:
            return
        tool_s, tool_before = self._turns.tools_of_gap_s(program, now), program.tool_of_gap()
        gap_s = self._turns.close_gap(program, now)
        tool = program.pending_tool
        if gap_s is not None:
            self._predictor.came_back(program, tool, gap_s, event.prompt_tokens)
        self._predictor.eviction_key_changed(program)
        request_state.tool, program.pending_tool = tool, None
        program.priority = event.priority
        program.live_requests.add(event.request_id)
        self._programs.signal(program, ProgramSignal.REQUEST_ARRIVED)
        self._tiers.arrived(request_state, now)
        if self._tiers.parked_requests.is_parked(request_state):
            self._programs.signal(program, ProgramSignal.GATE)
        leased = self._leases.set_waiting(program.id, True)
        request_state.record = self._turns.open(
            event,
            program,
            tool=tool if gap_s is None else tool_before,
            gap_s=gap_s,
            tool_s=tool_s,
            leased=leased,
            now=now,
        )

    def _end_missing_request(self, request_id: str, now: float) -> None:
        """End a request that the engine no longer has, for example because its id arrives again."""
        if request_id in self._requests.states:
            self.finished(TurnFinished(request_id, TurnFinishReason.ERROR, (), 0, 0, 0, ()), now)

    def untracked_arrived(self, event: UntrackedRequestArrived, now: float) -> None:
        """Add a request whose program could not be read."""
        self._end_missing_request(event.request_id, now)
        self._requests.enter(event.request_id, None, now)

    def untracked_left(self, event: UntrackedRequestLeft, now: float) -> None:
        """Remove a request without a program."""
        request_state = self._requests.states.get(event.request_id)
        if request_state is not None and request_state.program is not None:
            self._end_missing_request(event.request_id, now)
            return
        self._forecaster.request_left(event.request_id)
        if request_state is not None:
            del self._requests.states[event.request_id]
            self._tiers.finished(request_state, now)
            self._requests.stop(request_state, now)

    def admitted(self, event: RequestAdmitted, now: float) -> None:
        """Record that a request got its blocks. The first admission ends its program's lease."""
        request_state = self._requests.states.get(event.request_id)
        if request_state is None:
            return
        first = self._requests.run(request_state, now, self.promoted_s(request_state))
        request_state.output_tokens_at_admission = max(0, event.tokens - request_state.prompt_tokens)
        self._tiers.admitted(request_state, now, event.block_hashes)
        self._forecaster.admitted(request_state, event.tokens, event.most_tokens, now)
        program, record = request_state.program, request_state.record
        if program is None or record is None:
            return
        self._admission.admitted(request_state)
        if not first:
            if event.resumed:
                record.recomputed_after_preemption += max(0, event.tokens - event.cached_tokens)
            return
        before = self._state.contexts.get(program.id)
        shared = common_prefix_length(before, event.block_hashes) if before is not None else None
        self._predictor.admitted(program, event.block_hashes, len(before or ()), shared)
        self._turns.admitted(record, program, event, before, shared, now)
        self._lease_manager.end(program.id, DecisionReason.RETURN, now)
        self._state.release_reasons.pop(program.id, None)

    def preempted(self, event: RequestPreempted, now: float) -> RecoveryChosen:
        """Record that a running request lost its blocks; choose how it recovers its KV."""
        request_id, tokens = event.request_id, event.tokens
        request_state = self._requests.states.get(request_id)
        link = self._state.host_link
        link.observe_stores(event.offload_s_per_token, event.queued_s)
        link.observe_loads(event.load_back_s_per_token)
        recovery = self._forecaster.recovery(tokens, now, copied_tokens=event.copied_tokens)
        self._forecaster.request_left(request_id)
        if request_state is not None:
            self._requests.stop(request_state, now)
            self._tiers.preempted(request_state, now)
            request_state.preempted = True
            request_state.preemptions += 1
            self._admission.drop_holder(request_id)
            if request_state.record is not None:
                request_state.record.preemptions += 1
        self._state.last_shortage_s = now
        self._decision_recorder.preempted(request_state, now, recovery, tokens)
        return RecoveryChosen(recovery)

    def load_given_up(self, event: LoadGivenUp, now: float) -> None:
        """Record that a request lost its blocks during or after the load of its KV, before it ran any step.

        This counts as a preemption of the request, so that it is not chosen as victim every time.
        """
        request_state = self._requests.states.get(event.request_id)
        self._forecaster.request_left(event.request_id)
        self._admission.drop_holder(event.request_id)
        if request_state is not None:
            request_state.preemptions += 1
        self._decision_recorder.load_given_up(request_state, now)

    def finished(self, event: TurnFinished, now: float) -> LeaseGranted | None:
        """Remove a request that has left the engine. If the request is the last of its turn, the turn ends,
        and the program may get a lease. Returns that lease, or ``None``."""
        request_state = self._requests.states.pop(event.request_id, None)
        self._admission.drop_holder(event.request_id)
        self._forecaster.request_left(event.request_id)
        if request_state is None:
            return None
        self._requests.stop(request_state, now)
        failed = event.outcome in (TurnFinishReason.ABORTED, TurnFinishReason.ERROR)
        if not failed:
            self._forecaster.ended(
                request_state, event.output_tokens, cut=event.outcome is TurnFinishReason.LENGTH
            )
        elif event.outcome is TurnFinishReason.ABORTED:
            self._forecaster.output_aborted(request_state, event.output_tokens)
        self._tiers.finished(request_state, now, failed=failed)
        if request_state.program is None:
            return None
        program = request_state.program
        # A request may outlive its program's end, and the id may stand for another program by now.
        is_current = request_state.rank == program.rank
        if is_current:
            program.attained_s = max(program.attained_s, request_state.attained_s + request_state.ran_s)
            program.waited_s += request_state.waited_s
        record = request_state.record
        if record is not None:
            self._turns.close(record, event, now)
        program.live_requests.discard(event.request_id)
        program.last_contact_s = now
        self._predictor.eviction_key_changed(program)
        program.turns += is_current and not failed
        if program.live_requests:
            if self._tiers.places and not self._tiers.parked_requests.any_of(program.id):
                self._programs.signal(program, ProgramSignal.UNGATE)  # the request that left was parked
            return None
        program.disconnected = event.outcome is TurnFinishReason.ABORTED
        self._programs.signal(program, ProgramSignal.TURN_OVER)
        self._leases.set_waiting(program.id, False)
        if program.status in OVER_STATUSES:  # the client ended the program while this request still ran
            self._lease_manager.order_action(EngineActionKind.DROP, program.id, DecisionReason.END, now)
            return None
        if failed:
            program.turn_final = False  # the program went on after a turn that was announced as the last
            return None
        self._turns.open_gap(program, event, now)
        program.hinted_ttl_s = request_state.hinted_ttl_s
        self._state.contexts.put(program.id, event.block_hashes)
        self._tiers.turn_finished(program, event.cached_blocks, now, event.block_hashes)
        program.turn_final = request_state.final
        self._predictor.turn_finished(program, request_state, event.cached_blocks, now)
        if record is not None:
            record.continuation_probability = program.continuation_probability
            record.prediction_source, record.p_reuse = program.prediction_source, program.p_reuse
        if request_state.final:
            self._tiers.forget(program.id, now)
            self._lease_manager.log_keep(
                program, RetentionDecision(0.0, DecisionReason.FINAL_TURN), event.cached_blocks, now
            )
            return None
        if program.id in self._leases:  # a parallel branch of the same program still holds a lease
            self._lease_manager.end(program.id, DecisionReason.SUPERSEDED, now)
        lease = self._lease_manager.grant(program, program.pending_tool, event.cached_blocks, event, now)
        if lease is not None and record is not None:
            record.lease_ttl_s = round(lease.ttl_s, 3)
        return LeaseGranted(lease) if lease is not None else None
