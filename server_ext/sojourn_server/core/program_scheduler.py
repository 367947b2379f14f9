"""The state machine of one engine: it takes events, returns actions, and has read-only queries.

Only ``handle`` changes the tables. This module uses no engine, no clock and no network. An adapter reports
events with ``now`` (virtual time in the simulator) and carries out the returned actions. The same events
always give the same decisions, so a recorded run can be replayed.

Queries such as ``queue_place`` change nothing. Other packages also ask the parts ``predictor``,
``forecaster``, ``tiers`` and ``lease_manager``. The ``take_…`` methods of ``predictor`` empty the list that
they return. The tables are in ``state``. Only ``core`` and ``recording`` may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from sojourn.ids import ProgramId
from sojourn.wire_codec import Outcome

from ..metrics.preemption_cascades import PreemptionCascades
from ..metrics.turn_ledger import EvictedBlock, LossCause, TurnRecord, common_prefix_length, split_tokens
from ..policies.eviction_policies import LABEL_OF_TIER, BlockLabel
from ..policies.placement.placement_policy import MoveTiming, TierMove
from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason, RetentionDecision
from ..policies.policy_views import AbandonedBranch, LeaseView, WaitingRequestView
from ..policies.preset import switched_off
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES, ProgramSignal
from ..programs.statements import TTL
from . import events_and_actions as ev
from .demand_forecaster import AdmissionController, DemandForecaster
from .lease_manager import LeaseManager
from .program_lifecycle import ProgramLifecycle
from .request_hints import clipped, has_unused_field, unused_fields
from .request_table import RequestState
from .scheduler_state import SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

_EVICTED = frozenset({LossCause.EVICTED, LossCause.EXPIRED, LossCause.SILENT, LossCause.PRESSURE})
"""Causes of loss that count as evictions for Continuum's T̄, the mean wait after an eviction."""


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
        # Queries that need no rule of their own.
        self.request: Callable[[str], RequestState | None] = state.requests.states.get
        """Returns the state of a request in the engine, which only ``core`` changes; ``None``: unknown id."""
        self.program: Callable[[ProgramId], ProgramState | None] = state.programs.get
        """Returns a program, which only ``core`` changes; ``None``: unknown id."""
        self.context: Callable[[ProgramId], Sequence[Any] | None] = state.contexts.get
        """Returns the hashes of the blocks of a program's context after its newest turn; ``None``: the hashes
        were dropped."""
        self.turns_of: Callable[[str], Sequence[TurnRecord]] = state.ledger.of_program
        """Returns the records of a program's newest turns, oldest first."""
        self.leased_programs = state.leases.programs
        """Programs with a lease."""
        self._lifecycle = ProgramLifecycle(state, self.lease_manager, self.predictor, self.tiers)
        self._unused_hints = unused_fields(state.preset)
        self.awaiting_first_token: dict[str, TurnRecord] = {}
        """Records of admitted requests of programs without an output token, by request id."""
        self._cascades = PreemptionCascades()
        self._steps = 0
        """Number of completed engine steps."""
        self._now_s = 0.0
        """Time of the last ``RequestArrived`` or ``Tick`` event."""
        self._handlers: dict[type, Callable[[Any, float], ev.Answer | None]] = {
            ev.RequestArrived: self._arrived,
            ev.RequestAdmitted: self._admitted,
            ev.FirstToken: self._first_token,
            ev.RequestPreempted: self._preempted,
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
        """Apply one event; return the actions for the engine, in order. If the event gets an answer (see the
        event's docstring), the last action is this ``Answer``. Raises exceptions of policies; actions that
        were added before an exception are returned with the next event."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"{type(event).__name__} is not an event; expected one of {ev.Event}")
        answer = handler(event, now)
        actions = self._outbox.copy()
        self._outbox.clear()
        if answer is not None:
            actions.append(answer)
        return actions

    def _waiting_view(self, request_state: RequestState) -> WaitingRequestView:
        """Return the request's data in the form that the queue order policy reads, as of ``_now_s``."""
        program = request_state.program
        return WaitingRequestView(
            preempted=request_state.preempted,
            leased=program is not None and program.id in self.leased_programs,
            program_rank=request_state.rank,
            arrival=request_state.arrival,
            attained_s=request_state.attained_s,
            ran_s=request_state.ran_s,
            waited_s=request_state.waited_s + (program.waited_s if program is not None else 0.0),
            arrived_s=request_state.arrived_s,
            since_s=request_state.since_s,
            now_s=self._now_s,
        )

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
        outcome = event.identity.outcome
        if program is not None and context is not None:
            ttl_clipped = request_state.apply_hint(context, self.limits.max_hinted_ttl_s)
            # A hint with an invalid field counts as clipped, even if it also has fields that are not used.
            if outcome is not Outcome.CLIPPED and has_unused_field(context, self._unused_hints):
                outcome = Outcome.UNSUPPORTED
            elif ttl_clipped:
                outcome = Outcome.CLIPPED
        if outcome is not None:
            self.recorder.count("sojourn_hints_total", outcome=outcome.value)
        if program is None:
            return
        self._begin_turn(program, request_state, event, now)
        if self.tiers.places:
            self.tiers.arrived(request_state, now, event.block_hashes or ())
            if self.tiers.is_parked(request_state):
                self._programs.signal(program, ProgramSignal.GATE)

    def _begin_turn(
        self, program: ProgramState, request_state: RequestState, event: ev.RequestArrived, now: float
    ) -> None:
        """Add a request to its program's turn. The first request of a turn ends the gap before it."""
        context, tool = event.identity.context, program.pending_tool
        client_request_id = clipped(context.request_id) if context is not None else None
        # A repeated request is no second turn. The first answer was lost, so no tool of it ran.
        is_repeated = client_request_id is not None and client_request_id == program.client_request_id
        if is_repeated:
            program.gap_started_s = program.pending_tool = tool = None
        gap_s, tool_s, tool_before = None, None, tool
        if program.gap_started_s is not None and not program.live_requests:
            gap_s, tool_before = max(0.0, now - program.gap_started_s), program.tool_of_gap()
            if program.gap_tool_time is not None and not program.tools:
                tool_s = program.gap_tool_time.seconds
            if tool is not None:
                source = "reported" if program.gap_reported else "inferred"
                self.recorder.count("sojourn_tool_gap_source_total", source=source)
                self.recorder.observe("sojourn_tool_gap_seconds", gap_s, tool=tool)
                if not program.gap_reported:
                    self.histories.tools.observe(tool, gap_s)
                    program.gap_inferred_s = now
            if program.hinted_ttl_s and gap_s > 0:
                self.histories.tool_estimates.learn(f"{TTL}/{tool}", program.hinted_ttl_s, gap_s)
            program.gap_started_s = program.gap_tool_time = None
            self.predictor.came_back(program, tool, gap_s, event.prompt_tokens)
        program.tools.clear()
        program.tools_ended_s = now
        self.predictor.eviction_key_changed(program)
        program.went_on_after_final |= program.turn_final
        self.predictor.arrived(program, request_state)
        request_state.tool, program.pending_tool = tool, None
        program.priority = event.priority
        program.live_requests.add(event.request_id)
        self._programs.signal(program, ProgramSignal.REQUEST_ARRIVED)
        request_state.record = TurnRecord(
            program.id,
            program.turns + (not is_repeated),
            event.request_id,
            now,
            tool_before=tool_before,
            gap_s=gap_s,
            tool_s=tool_s,
            leased=self._leases.set_waiting(program.id, True),
            client_request_id=client_request_id,
        )

    def _become_side_request(self, request_state: RequestState, now: float) -> None:
        """Take a request out of its program's turn."""
        program = request_state.program
        assert program is not None
        self._log_side_request(program.id, request_state.prompt_tokens, now)
        program.live_requests.discard(request_state.request_id)
        self.awaiting_first_token.pop(request_state.request_id, None)
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
        record.admitted_s = now
        self.awaiting_first_token[event.request_id] = record
        self._record_reuse(record, program, event, before, shared, now)
        self.lease_manager.end(program.id, DecisionReason.RETURN, now)
        self.state.release_reasons.pop(program.id, None)

    def _record_reuse(
        self,
        record: TurnRecord,
        program: ProgramState,
        event: ev.RequestAdmitted,
        before: Sequence[Any] | None,
        shared: int | None,
        now: float,
    ) -> None:
        """Record where the KV of an admitted request's prompt came from.

        ``before``: block hashes of the program's context after its last turn. ``shared``: how many of these
        blocks the prompt begins with. Both are ``None`` if the hashes are unknown.
        """
        cause, evicted_block = self.lease_manager.loss_cause(program, before, event)
        if evicted_block is not None:
            record.evictor, record.evicted_score = evicted_block.evictor, evicted_block.score
        split = split_tokens(
            prompt=event.tokens,
            device=event.cached_tokens,
            block_size=self.pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before) if before is not None else 0,
            shared_blocks=shared,
            cause=cause,
            dropped_hit_blocks=self.pool.dropped_hit_blocks,
        )
        record.tokens = replace(split, device=split.device - event.host_tokens, host=event.host_tokens)
        reused = split.device  # on the device and in host memory
        program.reused_tokens += reused
        program.lost_tokens += sum(split.lost.values())
        program.saved_s += self.state.reload.seconds(reused)
        if program.turns and not _EVICTED.isdisjoint(record.tokens.lost):
            self.histories.evicted_waits.observe(now - record.arrived_s)

    def _first_token(self, event: ev.FirstToken, now: float) -> None:
        record = self.awaiting_first_token.pop(event.request_id, None)
        if record is not None:
            record.first_token_s = now
            program = self._programs.get(ProgramId(record.program_id))
            if program is not None:
                program.ttft_s = now - record.arrived_s

    def _preempted(self, event: ev.RequestPreempted, now: float) -> ev.RecoveryChosen | None:
        """Record that a request lost its blocks; choose how a running one recovers its KV."""
        request_state = self._requests.states.get(event.request_id)
        answer, mode, numbers = None, "load", {"tokens": event.tokens}
        self.forecaster.request_left(event.request_id)
        self._admission.holding.pop(event.request_id, None)
        if request_state is not None:
            # A loading request counts too, so that it is not chosen as victim every time.
            request_state.preemptions += 1
            numbers["times"] = request_state.preemptions
        if not event.loading:
            if event.link is not None:
                self.state.host_link.observe(event.link)
            recovery = self.forecaster.recovery(event.tokens, now, copied_tokens=event.copied_tokens)
            answer, mode = ev.RecoveryChosen(recovery), recovery.value
            if request_state is not None:
                if request_state.program is not None:
                    self.owners.own(event.block_ids, request_state.program.id)
                request_state.stop(now)
                self.tiers.preempted(request_state, now)
                request_state.preempted = True
                if request_state.record is not None:
                    request_state.record.preemptions += 1
            self.state.last_shortage_s = now
            if length := self._cascades.preempted(self._steps):
                self.recorder.observe("sojourn_preemption_cascade_length", length)
            numbers["in_cascade"] = self._cascades.length
        self.recorder.count("sojourn_preemptions_total", mode=mode)
        if request_state is not None:
            self.decisions.add(now, "preempt", request_state.program_id, mode, **numbers)
        return answer

    def _finished(self, event: ev.TurnFinished, now: float) -> None:
        """Remove a request that has left the engine. If the request is the last of its turn, the turn ends,
        and the program may get a lease."""
        request_state = self._requests.states.pop(event.request_id, None)
        self._admission.holding.pop(event.request_id, None)
        self.forecaster.request_left(event.request_id)
        if request_state is None:
            return
        request_state.stop(now)
        failed = event.outcome in (ev.TurnFinishReason.ABORTED, ev.TurnFinishReason.ERROR)
        self.forecaster.ended(request_state, event)
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
            self._close_record(record, event, now)
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
        self._open_gap(program, event, now)
        program.hinted_ttl_s = request_state.hinted_ttl_s
        self.state.contexts.put(program.id, event.block_hashes)
        self.owners.contexts[program.id] = event.block_ids
        cached_blocks = len(event.block_ids)
        self.tiers.turn_finished(program, cached_blocks)
        program.turn_final = request_state.final
        self.predictor.turn_finished(program, request_state, cached_blocks, now, event.plan_items)
        if record is not None:
            record.continuation_probability = program.continuation_probability
            record.prediction_source, record.p_reuse = program.prediction_source, program.p_reuse
        if request_state.final and self.predictor.believes_final(program):
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

    def _close_record(self, record: TurnRecord, event: ev.TurnFinished, now: float) -> None:
        """Complete the record of a request that has left the engine, and add it to the ledger and to the
        metrics."""
        self.awaiting_first_token.pop(event.request_id, None)
        record.finished_s = now
        record.output_tokens = event.output_tokens
        record.outcome = event.outcome.value
        self.state.ledger.close(record)
        count = self.recorder.count
        count("sojourn_program_turns_total", outcome=record.outcome)
        if lost := record.recomputed_after_preemption:
            count("sojourn_lost_tokens_total", lost, cause=LossCause.PREEMPTED.value)
        split = record.tokens
        if split is None:
            return
        for result in ("device", "host", "new", "tail"):
            count("sojourn_prompt_tokens_total", getattr(split, result), result=result)
        for cause, tokens in split.lost.items():
            count("sojourn_prompt_tokens_total", tokens, result="lost")
            count("sojourn_lost_tokens_total", tokens, cause=cause.value)
            if cause is not LossCause.CHANGED:
                regretted = int(tokens // self.pool.tokens_per_block)
                count("sojourn_evictions_regretted_total", regretted, tier="device")

    def _open_gap(self, program: ProgramState, event: ev.TurnFinished, now: float) -> None:
        """Start the gap after a program's turn: store the context length and the tool that now runs."""
        context_tokens = event.prompt_tokens + event.output_tokens
        program.prompt_tokens = event.prompt_tokens
        # The first turn may have had several requests, and each of them counts in ``turns``.
        if program.peak_tokens:
            self.histories.growth_tokens.observe(max(0, context_tokens - program.peak_tokens))
        else:
            program.first_prompt_tokens = event.prompt_tokens
        program.context_tokens = context_tokens
        program.peak_tokens = max(program.peak_tokens, context_tokens)
        program.gap_started_s, program.gap_tool_time = now, None
        program.gap_reported = program.gap_leased = False
        # Calls whose start was reported late, and their end lost, do not run in this gap.
        program.tools = {
            call: tool for call, tool in program.tools.items() if tool.started_s >= program.tools_ended_s
        }
        # The gap lasts until the slowest of the calls has ended.
        program.pending_tool = self.histories.tools.slowest([call.key for call in event.tool_calls])

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
            self._lifecycle.end(silent, ProgramSignal.SILENCE, silent.silent_outcome(), now)
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
        for request_state in self.tiers.take_refused(now) if self.tiers.policy.refuses else ():
            self._outbox.append(ev.RequestRefused(request_state.request_id))
            self.recorder.count("sojourn_gate_timeouts_total")
            self.decisions.add(now, "refuse", request_state.program_id, DecisionReason.PLACED.value)

    def _step_completed(self, event: ev.StepCompleted, now: float) -> None:
        self.state.reload.observe_step(event.tokens, event.seconds, event.requests, event.kv_tokens)
        if event.link is not None:
            self.state.host_link.observe(event.link)
        self.forecaster.record_step(event.seconds)
        self._steps += 1
        if self._cascades.length and (length := self._cascades.end_if_stale(self._steps)):
            self.recorder.observe("sojourn_preemption_cascade_length", length)

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

    def live_requests(self, program_id: ProgramId) -> AbstractSet[str]:
        """Ids of the program's requests in the engine."""
        program = self._programs.get(program_id)
        return program.live_requests if program is not None else frozenset()

    def prefetch_keys(self, program_id: ProgramId) -> Sequence[Any]:
        """Hashes of the blocks with which the program's next prompt probably begins; empty if unknown."""
        program = self._programs.get(program_id)
        return self.predictor.expected_prefix(program)[0] if program is not None else ()

    @property
    def leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold."""
        return self._leases.held_blocks

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
        if self.tiers.places and self.tiers.is_parked(state):
            queue_state = QueueState.PARKED
        elif not overdue and self._admission.applies_to(state, preempted):
            queue_state = QueueState.GATED
        key = (0.0, not view.preempted, state.arrival) if overdue else (1.0, *order.key(view))
        # A request of a program looks again each time it has waited so long, since another may be overdue.
        patience_s = self.limits.queue_patience_s
        changes_s = now + patience_s
        for due_s in (order.promoted_s(view), state.since_s + patience_s):
            if now < due_s < changes_s:
                changes_s = due_s
        return QueuePlace(key, queue_state, changes_s)

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
