"""The state machine of one engine: events in, actions out, and a few pure questions.

Theory of operation
-------------------
``handle`` is the only way to change state. It knows no engine, no clock and no network: an adapter
reports events with ``now`` and carries out the actions. The simulator does the same in virtual time,
so a recorded run gives the same decisions again. An action that a failing event left behind is
returned with the next one. Questions (``queue_key``, ``is_parked`` ...) change nothing. The tables
(``table``, ``leases``, ``request_states``, ``contexts`` ...) may be read from outside, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import replace
from typing import Any

from sojourn.ids import EmitterId, ProgramId
from sojourn.wire import Outcome

from ..metrics.decision_log import DecisionLog
from ..metrics.metrics_recorder import MetricsRecorder
from ..metrics.turn_ledger import EvictedBlock, LossCause, TurnLedger, common_prefix_length
from ..policies.costs.engine_profile import PrefillCurve
from ..policies.costs.reload_estimate import ReloadEstimate
from ..policies.eviction.block_labels import BlockLabel
from ..policies.policy_protocols import DecisionReason, RetentionDecision
from ..policies.policy_views import AbandonedBranch, ReclaimRequest, WaitingRequestView
from ..policies.preset import Preset
from ..programs.execution_graphs import GraphStore
from ..programs.program_status import OVER_STATUSES, ProgramSignal
from ..programs.program_table import ProgramTable
from .admission_controller import AdmissionController
from .client_event_handler import ClientEventFolder
from .decision_recorder import DecisionRecorder
from .demand_forecaster import DemandForecaster
from .events_and_actions import (
    Action,
    AdmissionRequested,
    Answer,
    BlockEvicted,
    BlocksNeeded,
    CachedBlocksFound,
    CacheReset,
    ClientEventReceived,
    DemandSampled,
    EngineAction,
    EngineActionKind,
    Event,
    EventAnswered,
    FirstToken,
    LeaseGranted,
    OutputLengthPredicted,
    PrefetchStarted,
    RecoveryChosen,
    RequestAdmitted,
    RequestArrived,
    RequestChosen,
    RequestLetIn,
    RequestPreempted,
    RequestRefused,
    StepCompleted,
    Tick,
    TurnFinished,
    TurnFinishReason,
    UntrackedRequestArrived,
    UntrackedRequestLeft,
    VictimNeeded,
)
from .eviction_keys import EvictionKeys
from .lease_manager import LeaseManager
from .placement_executor import PlacementExecutor
from .program_lifecycle import ProgramLifecycle
from .request_hint import apply_hint
from .request_table import RequestTable
from .scheduler_state import Histories, KVPoolConfig, RequestState, SchedulerLimits
from .tier_manager import TierManager
from .turn_gaps import TurnGaps
from .turn_recorder import TurnRecorder
from .victim_selector import VictimSelector
from .workflow_predictor import WorkflowPredictor


class ProgramScheduler:
    """Program state, leases and policies of one engine."""

    def __init__(
        self,
        preset: Preset,
        pool: KVPoolConfig,
        *,
        limits: SchedulerLimits | None = None,
        curve: PrefillCurve | None = None,
        histories: Histories | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self.preset = preset
        self.pool = pool
        self.limits = limits or SchedulerLimits()
        self.histories = histories or Histories()
        self.reload = ReloadEstimate(curve)
        self.table = ProgramTable(self.limits.max_programs)
        self.graphs = GraphStore(self.limits.max_graphs, self.limits.max_graph_bytes)
        self.ledger = TurnLedger()
        self.decisions = decisions if decisions is not None else DecisionLog()
        self.recorder = MetricsRecorder()
        self.lease_manager = LeaseManager(
            preset,
            pool,
            limits=self.limits,
            histories=self.histories,
            reload=self.reload,
            table=self.table,
            decisions=self.decisions,
            recorder=self.recorder,
        )
        self.leases = self.lease_manager.leases
        self.contexts = self.lease_manager.contexts
        self.requests = RequestTable(self.table)
        self.request_states = self.requests.request_states
        self.gaps = TurnGaps(self.histories, self.recorder)
        self.journal = DecisionRecorder(self.decisions, self.recorder, pool)
        self.records = TurnRecorder(
            pool,
            ledger=self.ledger,
            histories=self.histories,
            lease_manager=self.lease_manager,
            recorder=self.recorder,
        )
        self._outbox: list[Action] = self.lease_manager.actions
        """Actions of the event that is being handled, oldest first."""
        self.workflow_predictor = WorkflowPredictor(
            preset, pool, histories=self.histories, graphs=self.graphs, table=self.table
        )
        moves = PlacementExecutor(self.table, self.lease_manager, self.workflow_predictor, self.journal)
        self.demand_forecaster = DemandForecaster(
            preset,
            pool,
            histories=self.histories,
            reload=self.reload,
            request_states=self.request_states,
            recorder=self.recorder,
        )
        self._victims = VictimSelector(preset.victim, self.demand_forecaster, self.requests)
        self.gate = AdmissionController(
            preset.entry,
            pool,
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            leases=self.leases,
            requests=self.requests,
            demand_forecaster=self.demand_forecaster,
        )
        self.tier_manager = TierManager(preset.placement, pool, histories=self.histories, moved=moves.made)
        self.owners = EvictionKeys(
            preset.eviction,
            table=self.table,
            workflow_predictor=self.workflow_predictor,
            tier_manager=self.tier_manager,
        )
        self.program_lifecycle = ProgramLifecycle(
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            lease_manager=self.lease_manager,
            workflow_predictor=self.workflow_predictor,
            tier_manager=self.tier_manager,
            journal=self.journal,
        )
        self._client_events = ClientEventFolder(
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            graphs=self.graphs,
            contexts=self.contexts,
            lease_manager=self.lease_manager,
            workflow_predictor=self.workflow_predictor,
            program_lifecycle=self.program_lifecycle,
        )
        self._handlers: dict[type, Callable[[Any, float], Answer | None]] = {
            RequestArrived: self._arrived,
            UntrackedRequestArrived: self._untracked_arrived,
            RequestAdmitted: self._admitted,
            FirstToken: self._first_token,
            RequestPreempted: self._preempted,
            TurnFinished: self._finished,
            UntrackedRequestLeft: self._untracked_left,
            ClientEventReceived: self._client_event,
            Tick: self._tick,
            StepCompleted: self._step_completed,
            AdmissionRequested: self._admission_requested,
            BlocksNeeded: self._blocks_needed,
            VictimNeeded: self._victim_needed,
            DemandSampled: self._demand_sampled,
            OutputLengthPredicted: self._output_length_predicted,
            BlockEvicted: self._evicted,
            CachedBlocksFound: self._cached_blocks_found,
            PrefetchStarted: self._prefetch_started,
            CacheReset: self._cache_reset,
        }
        self._steps = 0
        """Engine steps so far."""
        self._now_s = 0.0
        """When it was last told that time passes."""

    # -- the door -------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Change state by one event; return what the engine is to do, in order. An ``Answer`` comes last.

        Raises ``TypeError`` for an unknown event, and what a policy raises. Actions that were due
        before the failure come with the next event.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"{type(event).__name__} is no event; expected one of {Event}")
        answer = handler(event, now)
        actions: list[Action] = self._outbox
        if actions:
            actions = actions.copy()
            self._outbox.clear()
        elif answer is None:
            return []
        else:
            return [answer]
        if answer is not None:
            actions.append(answer)
        return actions

    # -- requests -----------------------------------------------------------

    def _arrived(self, fact: RequestArrived, now: float) -> None:
        self._now_s = now
        program_id = fact.identity.program_id
        program = self.program_lifecycle.open(program_id, now) if program_id is not None else None
        request_state = self.requests.enter(fact.request_id, program, now, fact.prompt_tokens)
        outcome = fact.identity.outcome
        if apply_hint(fact.identity.context, request_state, table=self.table, limits=self.limits):
            outcome = Outcome.CLIPPED
        if outcome is not None:
            self.journal.hint(outcome)
        if program is None:
            return
        gap_s = self.gaps.close(program, now)
        tool = program.pending_tool
        if gap_s is not None:
            self.workflow_predictor.came_back(program, tool, gap_s, fact.prompt_tokens)
        self.workflow_predictor.touched(program)
        request_state.tool, program.pending_tool = tool, None
        program.live_requests.add(fact.request_id)
        self.table.signal(program, ProgramSignal.REQUEST_ARRIVED)
        self.tier_manager.arrived(request_state, now)
        if self.tier_manager.parked(request_state):
            self.table.signal(program, ProgramSignal.GATE)
        leased = self.leases.set_waiting(program.id, True)
        request_state.record = self.records.open(
            fact, program, tool=tool, gap_s=gap_s, leased=leased, now=now
        )

    def _untracked_arrived(self, event: UntrackedRequestArrived, now: float) -> None:
        self.requests.enter(event.request_id, None, now)

    def _untracked_left(self, event: UntrackedRequestLeft, now: float) -> None:
        request_state = self.request_states.pop(event.request_id, None)
        self.demand_forecaster.gone(event.request_id)
        if request_state is not None:
            self.tier_manager.finished(request_state, self._now_s)
            self.requests.stop(request_state, self._now_s)

    def _admitted(self, fact: RequestAdmitted, now: float) -> None:
        request_state = self.request_states.get(fact.request_id)
        if request_state is None:
            return
        first = self.requests.run(request_state, now, self._promoted_s(request_state))
        request_state.output_tokens_at_admission = max(0, fact.tokens - request_state.prompt_tokens)
        self.tier_manager.admitted(request_state, now)
        self.demand_forecaster.admitted(request_state, fact.tokens, fact.most_tokens, now)
        program, record = request_state.program, request_state.record
        if program is None or record is None:
            return
        self.gate.admitted(request_state)
        if not first:
            if fact.resumed:
                record.recomputed_after_preemption += max(0, fact.tokens - fact.cached_tokens)
            return
        before = self.contexts.get(program.id)
        shared = common_prefix_length(before, fact.block_hashes) if before is not None else None
        self.workflow_predictor.admitted(program, fact.block_hashes, len(before or ()), shared)
        self.records.admitted(record, program, fact, before, shared, now)
        self.lease_manager.end(program.id, DecisionReason.RETURN, now)
        self.lease_manager.let_go.pop(program.id, None)

    def _first_token(self, event: FirstToken, now: float) -> None:
        self.records.first_token(event.request_id, now)

    def _preempted(self, event: RequestPreempted, now: float) -> RecoveryChosen:
        request_id, tokens = event.request_id, event.tokens
        request_state = self.request_states.get(request_id)
        self.demand_forecaster.copied(event.offload_s_per_token, event.load_back_s_per_token, event.queued_s)
        recovery = self.demand_forecaster.recovery(tokens, now, copied_tokens=event.copied_tokens)
        self.demand_forecaster.gone(request_id)
        if request_state is not None:
            self.requests.stop(request_state, now)
            self.tier_manager.preempted(request_state, now)
            request_state.preempted = True
            request_state.preemptions += 1
            self.gate.drop_holder(request_id)
            if request_state.record is not None:
                request_state.record.preemptions += 1
        self.journal.preempted(request_state, now, recovery, tokens, self._steps)
        return RecoveryChosen(recovery)

    def _finished(self, fact: TurnFinished, now: float) -> LeaseGranted | None:
        request_state = self.request_states.pop(fact.request_id, None)
        self.gate.drop_holder(fact.request_id)
        self.demand_forecaster.gone(fact.request_id)
        if request_state is None:
            return None
        self.requests.stop(request_state, now)
        failed = fact.outcome in (TurnFinishReason.ABORTED, TurnFinishReason.ERROR)
        if not failed:
            self.demand_forecaster.ended(
                request_state, fact.output_tokens, cut=fact.outcome is TurnFinishReason.LENGTH
            )
        elif fact.outcome is TurnFinishReason.ABORTED:
            self.demand_forecaster.broken_off(request_state, fact.output_tokens)
        self.tier_manager.finished(request_state, now, failed=failed)
        if request_state.program is None:
            return None
        program = request_state.program
        program.attained_s = max(program.attained_s, request_state.attained_s + request_state.ran_s)
        program.waited_s += request_state.waited_s
        record = request_state.record
        if record is not None:
            self.records.close(record, fact, now)
        program.live_requests.discard(fact.request_id)
        program.last_contact_s = now
        self.workflow_predictor.touched(program)
        program.turns += not failed
        if program.live_requests:
            return None
        self.table.signal(program, ProgramSignal.TURN_OVER)
        self.leases.set_waiting(program.id, False)
        if program.status in OVER_STATUSES:  # the client ended it while this request still ran
            self.lease_manager.order(EngineActionKind.DROP, program.id, DecisionReason.END, now)
            return None
        if failed:
            return None
        self.gaps.open(program, fact, now)
        program.hinted_ttl_s = request_state.hinted_ttl_s
        self.contexts.put(program.id, fact.block_hashes[: fact.cached_blocks])
        self.tier_manager.turn_finished(program, fact.cached_blocks, now)
        self.workflow_predictor.turn_finished(program, request_state, fact.cached_blocks, now)
        if record is not None:
            record.goes_on, record.tier, record.p_reuse = program.goes_on, program.tier, program.p_reuse
        if request_state.final:
            self.tier_manager.forget(program.id, now)
            self.lease_manager.log_keep(
                program, RetentionDecision(0.0, DecisionReason.FINAL_TURN), fact.cached_blocks, now
            )
            return None
        if program.id in self.leases:  # a parallel branch of the same program still holds one
            self.lease_manager.end(program.id, DecisionReason.SUPERSEDED, now)
        lease = self.lease_manager.grant(
            program,
            program.pending_tool,
            fact.cached_blocks,
            request_state.hinted_ttl_s,
            now,
            held_blocks=fact.held_blocks,
            unheld_blocks=fact.unheld_blocks,
            running_tokens=self.requests.running_tokens,
            used_blocks=fact.used_blocks,
        )
        if lease is not None and record is not None:
            record.lease_ttl_s = round(lease.ttl_s, 3)
        return LeaseGranted(lease) if lease is not None else None

    def _evicted(self, event: BlockEvicted, now: float) -> None:
        owner, taker_request_id = event.owner, event.taker_request_id
        taker = self.request_states.get(taker_request_id) if taker_request_id is not None else None
        evictor = taker.program.id if taker is not None and taker.program is not None else None
        cause = self.lease_manager.release_cause(owner) or LossCause.EVICTED
        self.lease_manager.eviction_log.add(
            event.block_hash, EvictedBlock(cause, owner, evictor, now, event.score)
        )
        self.journal.evicted(cause)

    # -- time, room, order ---------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        self._now_s = now
        due = self.leases.next_deadline_s()
        if due is not None and due <= now:
            for lease, reason in self.leases.due(now, self.limits.max_ends_per_tick):
                self.lease_manager.ended(lease, reason, now)
        self.program_lifecycle.expire_silent_programs(now)
        self.workflow_predictor.idle(now)
        while (program := self.workflow_predictor.due(now)) is not None:
            self._outbox.append(EngineAction(EngineActionKind.PREFETCH, program.id, DecisionReason.THIS_TOOL))
        self.tier_manager.tick(now)
        for request_state in self.tier_manager.parked_for(self.limits.gate_timeout_s, now):
            self._outbox.append(RequestRefused(request_state.request_id))
            self.journal.refused(request_state, now)

    def _step_completed(self, event: StepCompleted, now: float) -> None:
        self._steps += 1
        self.reload.observe_step(event.tokens, event.seconds, event.requests)
        self.demand_forecaster.record_step(event.seconds)
        self.journal.step(self._steps)

    def _client_event(self, event: ClientEventReceived, now: float) -> EventAnswered:
        return EventAnswered(self._client_events.fold(EmitterId(event.emitter), event.event, now))

    def _blocks_needed(self, event: BlocksNeeded, now: float) -> None:
        need, freed = event.need, event.freed_blocks
        if not need.anything_running:
            need = replace(need, idle_s=self.requests.idle_s(now, False))
        freed_by = freed.__getitem__ if freed is not None else None
        self.lease_manager.make_room(need, now, freed_by, self.owners.current_score)

    def _admission_requested(self, event: AdmissionRequested, now: float) -> RequestLetIn | None:
        enters = self.gate.may_admit(
            self.request_states[event.request_id],
            event.need_blocks,
            event.free_blocks,
            now,
            anything_running=event.anything_running,
            output_tokens=event.output_tokens,
            most_tokens=event.most_tokens,
            preempted=event.preempted,
        )
        return RequestLetIn(event.request_id) if enters else None

    def _victim_needed(self, event: VictimNeeded, now: float) -> RequestChosen | None:
        chosen = self._victims.choose(event.running, event.short_blocks, event.used_blocks, now)
        return RequestChosen(chosen) if chosen is not None else None

    def _demand_sampled(self, event: DemandSampled, now: float) -> RequestChosen | None:
        self.demand_forecaster.copied(event.offload_s_per_token, event.load_back_s_per_token, event.queued_s)
        chosen = self._victims.coming(event.running, event.used_blocks, now)
        return RequestChosen(chosen) if chosen is not None else None

    def _output_length_predicted(self, event: OutputLengthPredicted, now: float) -> None:
        self.demand_forecaster.guessed(
            event.request_id, event.at_tokens, event.remaining, now, most_tokens=event.most_tokens
        )

    def _prefetch_started(self, event: PrefetchStarted, now: float) -> None:
        self.journal.prefetched(
            event.program_id,
            now,
            missing_blocks=event.missing_blocks,
            coming_blocks=event.coming_blocks,
            lost_blocks=event.missing_blocks if event.lost_blocks is None else event.lost_blocks,
        )

    def _cached_blocks_found(self, event: CachedBlocksFound, now: float) -> LeaseGranted | None:
        program = self.table.get(event.program_id)
        if program is None or program.live_requests or program.id in self.leases or not event.blocks:
            return None
        if program.status in OVER_STATUSES:  # it ended between the order and its execution
            return None
        lease = self.lease_manager.grant(
            program,
            program.tool_now(),
            event.blocks,
            program.hinted_ttl_s,
            now,
            "late_keep",
            held_blocks=event.held_blocks,
            unheld_blocks=event.unheld_blocks,
            running_tokens=self.requests.running_tokens,
            used_blocks=event.used_blocks,
        )
        return LeaseGranted(lease) if lease is not None else None

    def _cache_reset(self, event: CacheReset, now: float) -> None:
        for lease in list(self.leases):
            self.lease_manager.end(lease.program_id, DecisionReason.RESET, now)
        for program_id in self.contexts.clear():
            self.lease_manager.record_release(program_id, DecisionReason.RESET)
        self.tier_manager.cache_reset(now)

    # -- questions: they change nothing -----------------------------------------

    def queue_key(self, request_id: str, *, preempted: bool | None = None) -> tuple[Any, ...]:
        """The request's place in the queue, lowest first. ``preempted``: what the engine calls it now."""
        return self.preset.order.key(self.waiting_view(request_id, preempted=preempted))

    def promoted_s(self, request_id: str) -> float:
        """When waiting alone puts the request first in the queue; ``inf``: never, as things are."""
        return self._promoted_s(self.request_states[request_id])

    def waiting_view(self, request_id: str, *, preempted: bool | None = None) -> WaitingRequestView:
        """What the queue order sees of a request."""
        view = self._waiting_view(self.request_states[request_id])
        return view if preempted is None else view._replace(preempted=preempted)

    def subject_to_admission(self, request_id: str, *, preempted: bool | None = None) -> bool:
        """Whether ``AdmissionRequested`` must precede the request's admission."""
        return self.gate.applies_to(self.request_states[request_id], preempted)

    def is_parked(self, request_id: str) -> bool:
        """Whether a waiting request has to wait on, whatever is free: its program is not on the device."""
        return self.tier_manager.parked(self.request_states[request_id])

    def blocks_later_requests(self, request_id: str, now: float) -> bool:
        """Whether a rejected request has waited so long that later requests may not pass it."""
        return self.gate.blocks_later_requests(self.request_states[request_id], now)

    def awaiting_first_token(self) -> KeysView[str]:
        """Ids of admitted requests of programs that have no output token yet."""
        return self.records.awaiting_first_token.keys()

    def may_reclaim(self, need: ReclaimRequest) -> bool:
        """Whether ``BlocksNeeded`` could end a lease: there are leases, and something has changed since the
        same need was last turned down."""
        return self.lease_manager.may_reclaim(need)

    def label(self, program_id: ProgramId | None) -> BlockLabel:
        """The label of a program's blocks in lower tiers; ``None``: of programs that are over."""
        return self.owners.label(program_id)

    def owner_standing(
        self, program_id: ProgramId, left: AbandonedBranch | None = None
    ) -> tuple[float, ...] | None:
        """What the eviction order goes by, of a program or of the branch that its newest turn abandoned.

        It is valid until the program changes. ``None``: the program is unknown.
        """
        return self.owners.standing(program_id, left)

    def owner_score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """The eviction key of a standing; blocks with the lowest are reused first.

        It is valid until ``workflow_predictor.scale_changes`` grows or ``branch_reuse`` changes: the share
        of abandoned blocks that was used again.
        """
        return self.owners.score(standing, branch_reuse)

    def check(self) -> None:
        """Assert the invariants that hold between the tables after every event. For tests."""
        assert not self._outbox, "actions of a handled event are left"
        requests = self.request_states
        running = [state.prompt_tokens for state in requests.values() if state.running]
        assert self.requests.running_tokens == sum(running), "tokens of running requests"
        assert self.leases.blocks == sum(lease.blocks for lease in self.leases), "blocks of leases"
        assert all(lease.program_id in self.table for lease in self.leases), "a lease of an unknown program"
        assert self.awaiting_first_token() <= requests.keys(), "a first token of an unknown request"
        for program in self.table:
            for request_id in program.live_requests:
                assert requests[request_id].program is program, f"request {request_id} of another program"

    # -- inside -----------------------------------------------------------------

    def _waiting_view(self, request_state: RequestState) -> WaitingRequestView:
        leased = request_state.program is not None and request_state.program.id in self.leases
        return self.requests.waiting(request_state, self._now_s, leased=leased)

    def _promoted_s(self, request_state: RequestState) -> float:
        return self.preset.order.promoted_s(self._waiting_view(request_state))

    def close_recording(self, reason: str) -> None:
        """The engine stops. ``RecordingScheduler`` writes the end of its recording here."""
