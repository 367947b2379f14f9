"""The state machine of one engine: it takes events, returns actions, and has read-only queries.

Only ``handle`` changes the tables. This module uses no engine, no clock and no network. An adapter reports
events with ``now`` and carries out the returned actions. In the simulator, ``now`` is virtual time. The same
events always give the same decisions, so a recorded run can be replayed. If an event causes an exception, the
actions that were added before the exception are returned with the actions of the next event.

Queries such as ``queue_place`` change nothing. Other packages also ask the parts ``predictor``,
``forecaster``, ``tiers`` and ``lease_manager``. The ``take_…`` methods of ``predictor`` empty the list that
they return. The tables are in ``state``. Only ``core`` and ``recording`` may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, KeysView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from sojourn.ids import ProgramId
from sojourn.wire_codec import Outcome

from ..metrics.preemption_cascades import PreemptionCascades
from ..metrics.turn_ledger import EvictedBlock, LossCause, TurnRecord, common_prefix_length
from ..policies.eviction_policies import LABEL_OF_TIER, BlockLabel
from ..policies.placement.placement_policy import MoveTiming, TierMove
from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason, RetentionDecision
from ..policies.policy_views import AbandonedBranch, LeaseView, WaitingRequestView
from ..policies.preset import switched_off
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES, ProgramSignal
from . import events_and_actions as ev
from .demand_forecaster import AdmissionController, DemandForecaster
from .leases import LeaseManager
from .program_lifecycle import ProgramLifecycle
from .request_hints import has_unused_field, unused_hint_fields
from .request_table import RequestState
from .scheduler_state import SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor


class QueueState(Enum):
    """What keeps a waiting request from being admitted, besides requests before it."""

    OPEN = "open"
    """Nothing: it is admitted once its blocks fit."""
    GATED = "gated"
    """The engine must report ``AdmissionRequested`` before it admits the request."""
    PARKED = "parked"
    """It may not run even if blocks are free, because its program is not placed on the device."""


class QueuePlace(NamedTuple):
    """Place of a request in the waiting queue."""

    key: tuple[Any, ...]
    """Sort key, lowest first. Overdue requests have lower keys than all others."""
    state: QueueState
    changes_s: float = math.inf
    """Time at which a long wait may change key and state. Earlier they change only by events."""


class KnownRequest(NamedTuple):
    """Data about a request in the engine, for the vLLM adapter."""

    program_id: ProgramId | None
    """Id of the request's program; ``None``: the request has no program."""
    rank: int
    """Arrival rank of the request's program, or of the request itself if it has no program."""
    admitted: bool
    """Whether the request was admitted. It may have been preempted since."""
    preempted: bool
    """Whether the request was preempted since its last admission."""


class ProgramScheduler:
    """Keeps the program state and leases of one engine, and applies the preset's policies: events in, actions
    out."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.preset = self.own_preset = state.preset
        """The present preset, and the one with which the engine started. They differ while the policy is
        switched off."""
        self.pool = state.pool
        self.limits = state.limits
        self.histories = state.histories
        self.recorder = state.recorder
        self.decisions = state.decisions
        self._programs = state.programs
        self._requests = state.requests
        self._leases = state.leases
        self.owners = state.owners
        self._outbox = state.actions
        self._reset_leases: list[ProgramId] = []
        """Programs whose leases ended when the latest reset of the cache started."""
        self.lease_manager = LeaseManager(state)
        self.predictor = WorkflowPredictor(state)
        self.forecaster = DemandForecaster(state)
        self._admission = AdmissionController(state, self.forecaster)
        self.tiers = TierManager(state)
        self._lifecycle = ProgramLifecycle(state, self.lease_manager, self.predictor, self.tiers)
        self._unused_hints = unused_hint_fields(state.preset)
        self._cascades = PreemptionCascades()
        self._steps = 0
        """Number of completed engine steps."""
        self._now_s = 0.0
        """Time of the last ``RequestArrived`` or ``Tick`` event."""
        self._handlers: dict[type, Callable[[Any, float], ev.Answer | None]] = {
            ev.RequestArrived: self._arrived,
            ev.RequestAdmitted: self._admitted,
            ev.FirstToken: self._lifecycle.first_token,
            ev.RequestPreempted: self._preempted,
            ev.LoadGivenUp: self._load_given_up,
            ev.TurnFinished: self._finished,
            ev.ClientEventReceived: self._lifecycle.apply_event,
            ev.Tick: self._tick,
            ev.StepCompleted: self._step_completed,
            ev.AdmissionRequested: self._admission.try_admit,
            ev.BlocksNeeded: self._blocks_needed,
            ev.VictimNeeded: self.forecaster.victim_needed,
            ev.DemandSampled: self.forecaster.demand_sampled,
            ev.OutputLengthPredicted: self.forecaster.store_prediction,
            ev.BlocksEvicted: self._evicted,
            ev.PrefetchStarted: self.predictor.prefetch_started,
            ev.CacheResetStarted: self._cache_reset_started,
            ev.CacheReset: self._cache_reset,
            ev.PolicySwitched: self._policy_switched,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Apply one event; return the actions for the engine, in order.

        If the event gets an answer (see the event's docstring), the last action is this ``Answer``.

        Raises ``TypeError`` for an unknown event, and exceptions of policies. Actions that were added before
        an exception are returned with the next event.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"{type(event).__name__} is not an event; expected one of {ev.Event}")
        answer = handler(event, now)
        actions = self._outbox.copy()
        self._outbox.clear()
        if answer is not None:
            actions.append(answer)
        return actions

    # -- requests ---------------------------------------------------------------

    def _waiting_view(self, request_state: RequestState) -> WaitingRequestView:
        """Return the request's data in the form that the queue order policy reads, as of ``_now_s``."""
        program = request_state.program
        leased = program is not None and program.id in self._leases
        return request_state.waiting_view(self._now_s, leased=leased)

    def _arrived(self, event: ev.RequestArrived, now: float) -> None:
        """Add a request, and open its program. The arrival ends the gap after the program's last turn."""
        self._now_s = now
        if event.request_id in self._requests.states:  # the engine no longer has the first one
            gone = ev.TurnFinished(event.request_id, ev.TurnFinishReason.ERROR, (), 0, 0, (), ())
            self._finished(gone, now)
        program_id, context = event.identity.program_id, event.identity.context
        # A client that sends hints names each conversation itself, so all its requests are turns.
        hashes = event.block_hashes if context is None else None
        program = named = self._lifecycle.open(program_id, now) if program_id is not None else None
        if program is not None and hashes is not None:
            sides = self._lifecycle.join_turn(program, event, now)
            if event.request_id in sides:
                self._log_side_request(program.id, event.prompt_tokens, now)
                program = None
            else:
                for side in sides:
                    self._become_side_request(self._requests.states[side], now)
        request_state = self._requests.enter(
            event.request_id, program, now, event.prompt_tokens, ranked_as=named
        )
        request_state.priority, request_state.block_hashes = event.priority, hashes
        outcome, ttl_clipped = event.identity.outcome, False
        if program is not None and context is not None:
            ttl_clipped = request_state.apply_hint(context, self.limits.max_hinted_ttl_s)
        # A hint with an invalid field counts as clipped, even if it also has fields that are not used.
        if outcome is not Outcome.CLIPPED:
            if program is not None and context is not None and has_unused_field(context, self._unused_hints):
                outcome = Outcome.UNSUPPORTED
            elif ttl_clipped:
                outcome = Outcome.CLIPPED
        if outcome is not None:
            self.recorder.count("sojourn_hints_total", outcome=outcome.value)
        if program is None:
            return
        self._lifecycle.begin_turn(program, request_state, event, now)
        self.tiers.arrived(request_state, now, event.block_hashes or ())
        if self.tiers.is_parked(request_state):
            self._programs.signal(program, ProgramSignal.GATE)

    def _become_side_request(self, request_state: RequestState, now: float) -> None:
        """Take a request out of its program's turn."""
        program = request_state.program
        assert program is not None
        self._log_side_request(program.id, request_state.prompt_tokens, now)
        program.live_requests.discard(request_state.request_id)
        self._lifecycle.awaiting_first_token.pop(request_state.request_id, None)
        self.tiers.take_out(request_state, now)
        request_state.program = request_state.record = None
        self._outbox.append(ev.QueuePlaceChanged(request_state.request_id))

    def _log_side_request(self, program_id: ProgramId, tokens: int, now: float) -> None:
        self.decisions.add(now, "side_request", program_id, "other_context", tokens=tokens)

    def _admitted(self, event: ev.RequestAdmitted, now: float) -> None:
        """Record that a request got its blocks. The first admission ends its program's lease."""
        request_state = self._requests.states.get(event.request_id)
        if request_state is None:
            return
        promoted_s = self.preset.order.promoted_s(self._waiting_view(request_state))
        first = not request_state.admitted
        request_state.run(now, promoted_s)
        self._requests.idle_since_s = None
        request_state.output_tokens_at_admission = max(0, event.tokens - request_state.prompt_tokens)
        move = self.tiers.admitted(request_state, now, event.block_hashes)
        if move is not None and request_state.program is not None:
            self._moved(request_state.program, move, now)
        self.forecaster.admitted(request_state, event.tokens, event.most_tokens, now)
        program, record = request_state.program, request_state.record
        if program is None or record is None:
            return
        self._admission.admitted(request_state)
        if not first:
            if event.resumed:
                record.recomputed_after_preemption += max(0, event.tokens - event.cached_tokens)
            return
        before = self.state.contexts.get(program.id)
        shared = common_prefix_length(before, event.block_hashes) if before is not None else None
        self.predictor.admitted(program, event.block_hashes, len(before or ()), shared)
        self._lifecycle.admitted(record, program, event, before, shared, now)
        self.lease_manager.end(program.id, DecisionReason.RETURN, now)
        self.state.release_reasons.pop(program.id, None)

    def _preempted(self, event: ev.RequestPreempted, now: float) -> ev.RecoveryChosen:
        """Record that a running request lost its blocks; choose how it recovers its KV."""
        request_id, tokens = event.request_id, event.tokens
        request_state = self._requests.states.get(request_id)
        if request_state is not None and request_state.program is not None:
            self.owners.own(event.block_ids, request_state.program.id)
        if event.link is not None:
            self.state.host_link.observe(event.link)
        recovery = self.forecaster.recovery(tokens, now, copied_tokens=event.copied_tokens)
        self.forecaster.request_left(request_id)
        if request_state is not None:
            request_state.stop(now)
            self.tiers.preempted(request_state, now)
            request_state.preempted = True
            request_state.preemptions += 1
            self._admission.drop_holder(request_id)
            if request_state.record is not None:
                request_state.record.preemptions += 1
        self.state.last_shortage_s = now
        self._observe_cascade(self._cascades.preempted(self._steps))
        cascade = {"in_cascade": self._cascades.length}
        self._log_preemption(request_state, now, recovery.value, tokens, **cascade)
        return ev.RecoveryChosen(recovery)

    def _log_preemption(
        self, request_state: RequestState | None, now: float, mode: str, tokens: int, **more: float
    ) -> None:
        """Log a preemption by which a request lost the KV of ``tokens`` tokens. An unknown request (``None``)
        is only counted."""
        self.recorder.count("sojourn_preemptions_total", mode=mode)
        if request_state is not None:
            numbers = {"tokens": tokens, "times": request_state.preemptions, **more}
            self.decisions.add(now, "preempt", request_state.program_id, mode, **numbers)

    def _observe_cascade(self, length: int) -> None:
        if length:
            self.recorder.observe("sojourn_preemption_cascade_length", length)

    def _load_given_up(self, event: ev.LoadGivenUp, now: float) -> None:
        """Record that a request lost its blocks during or after the load of its KV, before it ran any step.

        This counts as a preemption of the request, so that it is not chosen as victim every time.
        """
        request_state = self._requests.states.get(event.request_id)
        self.forecaster.request_left(event.request_id)
        self._admission.drop_holder(event.request_id)
        if request_state is not None:
            request_state.preemptions += 1
        self._log_preemption(request_state, now, "load", 0)

    def _finished(self, event: ev.TurnFinished, now: float) -> None:
        """Remove a request that has left the engine. If the request is the last of its turn, the turn ends,
        and the program may get a lease."""
        request_state = self._requests.states.pop(event.request_id, None)
        self._admission.drop_holder(event.request_id)
        self.forecaster.request_left(event.request_id)
        if request_state is None:
            return
        request_state.stop(now)
        failed = event.outcome in (ev.TurnFinishReason.ABORTED, ev.TurnFinishReason.ERROR)
        if not failed:
            self.forecaster.ended(
                request_state, event.output_tokens, cut=event.outcome is ev.TurnFinishReason.LENGTH
            )
        elif event.outcome is ev.TurnFinishReason.ABORTED:
            self.forecaster.output_aborted(request_state, event.output_tokens)
        self.tiers.finished(request_state, now, failed=failed)
        program = request_state.program
        if program is None:
            return
        self.owners.own(event.block_ids, program.id)
        # A request may outlive its program's end, and the id may stand for another program by now.
        is_current = request_state.rank == program.rank
        if is_current:
            program.attained_s = max(program.attained_s, request_state.attained_s + request_state.ran_s)
            program.waited_s += request_state.waited_s
        program.last_contact_s = now
        record, client_request_id = request_state.record, None
        if record is not None:
            self._lifecycle.close_record(record, event, now)
            client_request_id = record.client_request_id
        program.live_requests.discard(event.request_id)
        self.predictor.eviction_key_changed(program)
        if is_current and not failed:
            program.turns += client_request_id is None or client_request_id != program.client_request_id
            program.client_request_id = client_request_id
        if program.live_requests:
            if self.tiers.places and not self.tiers.any_parked(program.id):
                self._programs.signal(program, ProgramSignal.UNGATE)  # the request that left was parked
            return
        program.disconnected = event.outcome is ev.TurnFinishReason.ABORTED
        self._programs.signal(program, ProgramSignal.TURN_OVER)
        self._leases.set_waiting(program.id, False)
        if program.status in OVER_STATUSES:  # the client ended the program while this request still ran
            self.lease_manager.drop(program.id, DecisionReason.END, now)
            return
        if failed:
            program.turn_final = False  # the program went on after a turn that was announced as the last
            return
        self._lifecycle.open_gap(program, event, now)
        program.hinted_ttl_s = request_state.hinted_ttl_s
        self.state.contexts.put(program.id, event.block_hashes)
        self.owners.contexts[program.id] = event.block_ids
        cached_blocks = len(event.block_ids)
        self.tiers.turn_finished(program, cached_blocks)
        program.turn_final = request_state.final
        self.predictor.turn_finished(program, request_state, cached_blocks, now)
        if record is not None:
            record.continuation_probability = program.continuation_probability
            record.prediction_source, record.p_reuse = program.prediction_source, program.p_reuse
        if request_state.final:
            self.tiers.forget(program.id)
            self.lease_manager.log_keep(
                program, RetentionDecision(0.0, DecisionReason.FINAL_TURN), cached_blocks, now
            )
            return
        if program.id in self._leases:  # a parallel branch of the same program still holds a lease
            self.lease_manager.end(program.id, DecisionReason.SUPERSEDED, now)
        lease = self.lease_manager.grant(program, program.pending_tool, event.block_ids, now)
        if lease is not None and record is not None:
            record.lease_ttl_s = round(lease.ttl_s, 3)

    # -- shortages of blocks ----------------------------------------------------

    def _blocks_needed(self, event: ev.BlocksNeeded, now: float) -> None:
        """End leases for a request that needs blocks."""
        need = event.need
        if not need.anything_running:
            need = replace(need, idle_s=self._requests.idle_s(now, False))
        if self.lease_manager.may_reclaim(need):
            self.lease_manager.make_room(need, self._lease_views(), now)

    def _lease_views(self) -> list[LeaseView]:
        scored = self.preset.eviction.by_program
        return [lease.view(self._score(lease.program_id) if scored else ()) for lease in self._leases]

    def _evicted(self, event: ev.BlocksEvicted, now: float) -> None:
        """Log why cached blocks were evicted, and for which program."""
        state, taker_request_id = self.state, event.taker_request_id
        taker = state.requests.states.get(taker_request_id) if taker_request_id is not None else None
        evictor = taker.program_id if taker is not None else None
        entries: dict[ProgramId | None, tuple[EvictedBlock, list[Any]]] = {}
        owners = self.owners.remove_evicted([block_id for block_id, _ in event.blocks])
        for owner, (_, block_hash) in zip(owners, event.blocks, strict=True):
            if owner not in entries:
                program = state.programs.get(owner) if owner is not None else None
                if program is not None and program.status not in OVER_STATUSES:
                    state.last_shortage_s = now
                cause = self.lease_manager.release_cause(owner) or LossCause.EVICTED
                entries[owner] = EvictedBlock(cause, owner, evictor, now, event.score), []
            if block_hash is not None:
                entries[owner][1].append(block_hash)
        for entry, hashes in entries.values():
            state.eviction_log.add(hashes, entry)
            lost, blocks = {"tier": "device", "cause": entry.cause.value}, len(hashes)
            self.recorder.count("sojourn_evictions_total", blocks, **lost)
            self.recorder.count("sojourn_evicted_bytes_total", blocks * self.pool.block_bytes, **lost)

    def _score(self, program_id: ProgramId) -> tuple[float, ...]:
        return self.owner_score(self.owner_standing(program_id))

    # -- blocks, time and order ------------------------------------------------

    def _tick(self, event: ev.Tick, now: float) -> None:
        self._now_s = now
        if event.used_blocks is not None:
            self.state.used_blocks = event.used_blocks
        if now >= self._leases.next_deadline_s:
            self.lease_manager.end_expired(now)
        pressed = getattr(self.preset.retention, "pressed", None)
        if pressed is not None and len(self._leases) and self.state.used_blocks is not None:
            views, used_blocks = self._lease_views(), self.state.used_blocks
            for program_id, reason in pressed(views, used_blocks, self.pool.blocks, now):
                self.lease_manager.end(program_id, reason, now)
        for silent in self._programs.silent(now):
            self._lifecycle.end_silent(silent, now)
        # Only parts that the preset uses.
        if self.preset.workflow_prediction.is_used:
            self.predictor.observe_open_gap(now)
        if self.preset.prefetch.is_used:
            while (program := self.predictor.pop_due_prefetch(now)) is not None:
                prefetch = ev.EngineAction(ev.EngineActionKind.PREFETCH, program.id, DecisionReason.THIS_TOOL)
                self._outbox.append(prefetch)
        if not self.tiers.places:
            return
        for program, move in self.tiers.tick(now):
            self._moved(program, move, now)
        for request_state in self.tiers.take_refused(now):
            self._outbox.append(ev.RequestRefused(request_state.request_id))
            self.recorder.count("sojourn_gate_timeouts_total")
            self.decisions.add(now, "refuse", request_state.program_id, DecisionReason.PLACED.value)

    def _step_completed(self, event: ev.StepCompleted, now: float) -> None:
        self.state.reload.observe_step(event.tokens, event.seconds, event.requests, event.kv_tokens)
        if event.link is not None:
            self.state.host_link.observe(event.link)
        self.forecaster.record_step(event.seconds)
        self._steps += 1
        if self._cascades.length:
            self._observe_cascade(self._cascades.end_if_stale(self._steps))

    def _cache_reset_started(self, event: ev.CacheResetStarted, now: float) -> None:
        self._reset_leases = self.lease_manager.end_all(DecisionReason.RESET, now)
        # The engine may refuse the reset. Then the blocks of these leases stay cached.
        for program_id in self._reset_leases:
            self.state.release_reasons.pop(program_id, None)

    def _cache_reset(self, event: ev.CacheReset, now: float) -> None:
        contexts = self.state.contexts
        if event.device:
            self.lease_manager.end_all(DecisionReason.RESET, now)
            lost = [*self._reset_leases, *contexts.clear()]
            self.owners.clear()
            self.predictor.cache_reset()
        else:
            lost = [each for each in contexts.programs() if self.tiers.tier(each) is not Tier.DEVICE]
            for program_id in lost:
                contexts.drop(program_id)
        self._reset_leases = []
        for program_id in lost:
            self.lease_manager.record_release(program_id, DecisionReason.RESET)
        self.tiers.cache_reset(device=event.device)

    def _policy_switched(self, event: ev.PolicySwitched, now: float) -> None:
        """Switch to the preset that decides as stock vLLM, or back. What the scheduler learns, it learns in
        both states."""
        state, requests = self.state, self._requests.states
        if event.on == (state.preset is self.own_preset):
            return
        self.preset = state.preset = self.own_preset if event.on else switched_off(self.own_preset)
        self.decisions.add(now, "policy", None, "on" if event.on else "off")
        if event.on:
            moves = self.tiers.begin_again(requests.values(), now)
        else:
            self.lease_manager.end_all(DecisionReason.SWITCHED_OFF, now)
            moves = self.tiers.give_up()
        for program, move in moves:
            self._moved(program, move, now)
        for program in self._programs:
            self.predictor.eviction_key_changed(program)  # it has another tier
        for request_state in requests.values():
            if request_state.program is not None and self.tiers.is_parked(request_state):
                self._programs.signal(request_state.program, ProgramSignal.GATE)
            self._outbox.append(ev.QueuePlaceChanged(request_state.request_id))

    # -- queries: they change nothing -------------------------------------------

    def request(self, request_id: str) -> KnownRequest | None:
        """Return data about a request in the engine; ``None`` for an unknown id."""
        state = self._requests.states.get(request_id)
        if state is None:
            return None
        return KnownRequest(state.program_id, state.rank, state.admitted, state.preempted)

    def live_requests(self, program_id: ProgramId) -> AbstractSet[str]:
        """Ids of the program's requests in the engine."""
        program = self._programs.get(program_id)
        return program.live_requests if program is not None else frozenset()

    def context(self, program_id: ProgramId) -> Sequence[Any] | None:
        """Hashes of the blocks of the program's context after its newest turn; ``None`` if the hashes were
        dropped."""
        return self.state.contexts.get(program_id)

    def prefetch_keys(self, program_id: ProgramId) -> Sequence[Any]:
        """Hashes of the blocks with which the program's next prompt probably begins; empty if unknown."""
        program = self._programs.get(program_id)
        return self.predictor.expected_prefix(program)[0] if program is not None else ()

    def leased_programs(self) -> KeysView[ProgramId]:
        """Programs with a lease."""
        return self._leases.programs

    @property
    def leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold."""
        return self._leases.held_blocks

    def turns_of(self, program_id: ProgramId) -> Sequence[TurnRecord]:
        """Records of the program's newest turns, oldest first."""
        return self.state.ledger.of_program(program_id)

    def continuation_probability(self, program_id: ProgramId) -> float | None:
        """Probability that the program has another turn after its newest turn; ``None``: unknown."""
        program = self._programs.get(program_id)
        return program.continuation_probability if program is not None else None

    def queue_place(self, request_id: str, preempted: bool | None = None) -> QueuePlace | None:
        """Return the request's place in the waiting queue; ``None`` for an unknown request.

        ``preempted``: whether the engine preempted the request; ``None``: the last reported state applies."""
        state = self._requests.states.get(request_id)
        if state is None:
            return None
        view = self._waiting_view(state)
        if preempted is not None:
            view = view._replace(preempted=preempted)
        now, order = view.now_s, self.preset.order
        overdue = self._is_overdue(state, view.preempted, now)
        queue_state = QueueState.OPEN
        if self.tiers.is_parked(state):
            queue_state = QueueState.PARKED
        elif not overdue and self._admission.applies_to(state, preempted):
            queue_state = QueueState.GATED
        key = (0.0, not view.preempted, state.arrival) if overdue else (1.0, *order.key(view))
        # A request of a program looks again each time it has waited so long, since another may be overdue.
        patience_s = self.limits.queue_patience_s
        due_s = (order.promoted_s(view), state.since_s + patience_s, now + patience_s)
        return QueuePlace(key, queue_state, min(time_s for time_s in due_s if time_s > now))

    def may_end_any_lease(self, request_id: str, now: float) -> bool:
        """Whether a waiting request that lacks blocks may end any lease: it is overdue, or passes admission.

        Otherwise it could wait for ever: for the lease of a program whose next request waits behind it. Such
        a lease does not expire while that request waits."""
        state = self._requests.states.get(request_id)
        overdue = state is not None and self._is_overdue(state, state.preempted, now)
        return overdue or self.passes_admission(request_id, now)

    def _is_overdue(self, state: RequestState, preempted: bool, now: float) -> bool:
        """Whether a waiting request is served before those that are not overdue, by arrival.

        A request without a program is overdue after ``queue_patience_s``. While an overdue one waits,
        requests of programs that have waited for as long are overdue too, and so are preempted ones. So
        neither class starves the other."""
        due_s = now - self.limits.queue_patience_s
        if state.running or not (preempted or state.since_s <= due_s):
            return False
        return self._untracked_waits(due_s)

    def _untracked_waits(self, since_s: float = math.inf) -> bool:
        """Whether a request without a program waits, and has waited at least since ``since_s``."""
        return any(
            state.program is None and not state.running and state.since_s <= since_s
            for state in self._requests.states.values()
        )

    def blocks_later_requests(self, request_id: str, now: float) -> bool:
        """Whether this request holds back all requests behind it in the queue, because the admission policy
        has rejected it for more than ``queue_patience_s``."""
        state = self._requests.states.get(request_id)
        since_s = state.admission_blocked_since_s if state is not None else None
        return since_s is not None and now - since_s > self.limits.queue_patience_s

    def passes_admission(self, request_id: str, now: float) -> bool:
        """Whether the engine admits a request that the policy rejects, as soon as its blocks fit: if it would
        hold back a request without a program."""
        return self.blocks_later_requests(request_id, now) and self._untracked_waits()

    def awaiting_first_token(self) -> KeysView[str]:
        """Ids of requests that belong to programs, were admitted, and have no output token yet."""
        return self._lifecycle.awaiting_first_token.keys()

    # -- queries for the eviction order -------------------------------------------

    def label(self, program_id: ProgramId | None) -> BlockLabel:
        """The label of a program's blocks, which follows from the tier where the program is placed.

        Host memory and disk choose by this label which blocks to evict. The label is INACTIVE if
        ``program_id`` is ``None`` or unknown, or if its program has ended or expired."""
        program = self._programs.get(program_id) if program_id is not None else None
        if program is None or program.status in OVER_STATUSES:
            return BlockLabel.INACTIVE
        return LABEL_OF_TIER[self.tiers.tier(program.id)]

    def owner_standing(
        self, program_id: ProgramId, left: AbandonedBranch | None = None
    ) -> tuple[float, ...] | None:
        """Return the input of ``owner_score`` for a program, or for the branch ``left`` that it abandoned.
        The value is valid until ``predictor.take_changed`` returns the program. ``None``: unknown program."""
        program = self._programs.get(program_id)
        if program is None:
            return None
        view = self.predictor.owner_view(program, left)
        return self.preset.eviction.score_inputs(view._replace(tier=self.tiers.tier(program_id)))

    def owner_score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """Return the eviction key for a result of ``owner_standing``. Blocks with the lowest key are evicted
        first.

        ``branch_reuse`` is the share of abandoned blocks that was used again. The key is valid until that
        share or ``predictor.scale_changes`` changes.
        """
        if standing is None:
            return (-math.inf,)
        return self.preset.eviction.score(standing, self.predictor.scale(branch_reuse))

    # -- inside -----------------------------------------------------------------

    def _moved(self, program: ProgramState, move: TierMove, now: float) -> None:
        """Handle a program's move to another tier, as decided by the tier manager: log the move, end the
        program's lease if the program leaves the device, and add the action for the engine."""
        what = "to_" + move.to.value if move.when is MoveTiming.NOW else "leaves_after_turn"
        self.decisions.add(now, what, program.id, move.reason.value, **dict(move.terms))
        self.recorder.count(
            "sojourn_placements_total", to=move.to.value, when=move.when.value, reason=move.reason.value
        )
        if move.when is MoveTiming.AFTER_TURN:
            return
        self.predictor.eviction_key_changed(program)
        parked = move.to is not Tier.DEVICE
        if parked:
            self.lease_manager.end(program.id, DecisionReason.PLACED, now)
        if program.live_requests:
            self._programs.signal(program, ProgramSignal.GATE if parked else ProgramSignal.UNGATE)
        kind, reason = ev.EngineActionKind.PLACE, DecisionReason.PLACED
        self._outbox.append(ev.EngineAction(kind, program.id, reason, move.to))

    def close_recording(self, reason: str) -> None:
        """Do nothing. ``RecordingScheduler`` overrides this method to write the end record of a recording."""
