"""The state machine of one engine: it takes events, returns actions, and has read-only queries.

A *turn* lasts until the last of its program's parallel requests has left. A *gap* lasts from there until the
program's next request; its tools run in it. The tool history learns the durations that clients report.
Without a report, it learns the gap as the tool's duration.

Only ``handle`` changes the tables. This module uses no engine, no clock and no network. An adapter reports
events with ``now`` (virtual time in the simulator) and carries out the returned actions. The same events
always give the same decisions, so a recorded run can be replayed.

Queries such as ``queue_place`` change nothing. Other packages also ask the parts ``predictor``,
``forecaster``, ``tiers`` and ``leases``. The ``take_…`` methods of ``predictor`` empty the list that
they return. The tables are in ``state``. Only ``core`` and ``recording`` may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from sojourn.ids import CallId, EmitterId, ProgramId
from sojourn.wire_codec import EventOutcome, Outcome
from sojourn.wire_events import AegReport, AnyEvent, ProgramEnd, ProgramStart, ToolStart, ToolStop

from ..metrics.live_frame import PROBE_ID
from ..metrics.turn_ledger import EvictedBlock, LossCause, TurnRecord, common_prefix_length, split_tokens
from ..policies.placement.placement_views import Tier
from ..policies.policy_protocols import DecisionReason, RetentionDecision
from ..policies.policy_views import AbandonedBranch, EvictionCandidateView, LeaseView, WaitingRequestView
from ..policies.preset import switched_off
from ..programs.declared_graphs import GraphError
from ..programs.program_state import ProgramState, RunningTool, SequenceWindow
from ..programs.program_status import (
    OVER_STATUSES,
    REPORTED_OUTCOMES,
    ProgramOutcome,
    ProgramSignal,
    ProgramStatus,
)
from ..programs.statements import TTL
from ..programs.windowed_history import recent_entry
from . import events_and_actions as ev
from .demand_forecaster import DemandForecaster
from .leases import LeaseTable
from .request_hints import clipped, unused_fields
from .request_table import QueuePlace, QueueState, RequestState
from .scheduler_state import SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

MAX_TOOLS_PER_PROGRAM = 256
MAX_EMITTERS_PER_PROGRAM = 16
_Refusal = tuple[Outcome, str]
"""Outcome of a client's event that was not applied, and the reason."""
_EVICTED = frozenset({LossCause.EVICTED, LossCause.EXPIRED, LossCause.SILENT, LossCause.PRESSURE})
"""Causes of loss that count as evictions for Continuum's T̄, the mean wait after an eviction."""


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
        self.owners = state.owners
        self._outbox = state.actions
        self.leases = LeaseTable(state)
        self.predictor = WorkflowPredictor(state)
        self.forecaster = DemandForecaster(state)
        self.tiers = TierManager(state, self.leases, self.predictor)
        self.request, self.program = state.requests.states.get, state.programs.get
        """Return a request in the engine and a program, which only ``core`` changes; ``None``: unknown id."""
        self.context = state.contexts.get
        """Returns the block hashes of a program's newest context; ``None``: they were dropped."""
        self.turns_of = state.ledger.of_program
        """Returns the records of a program's newest turns, oldest first."""
        self._unused_fields = unused_fields(state.preset)
        self.awaiting_first_token: dict[str, TurnRecord] = {}
        """Records of admitted requests of programs without an output token, by request id."""
        self._now_s = 0.0
        """Time of the last ``RequestArrived`` or ``Tick`` event."""
        self._handlers: dict[type, Callable[[Any, float], ev.Answer | None]] = {
            ev.RequestArrived: self._arrived,
            ev.RequestAdmitted: self._admitted,
            ev.FirstToken: self._first_token,
            ev.RequestPreempted: self._preempted,
            ev.TurnFinished: self._finished,
            ev.ClientEventReceived: self._client_event,
            ev.Tick: self._tick,
            ev.StepCompleted: self._step_completed,
            ev.AdmissionRequested: self.forecaster.try_admit,
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
        if (link := getattr(event, "link", None)) is not None:
            self.state.host_link.observe(link)
        answer = self._handlers[type(event)](event, now)
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
            leased=program is not None and program.id in self.leases,
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
        program = None
        if program_id is None:
            rank = self._programs.next_rank()
            self._requests.untracked_arrivals += PROBE_ID not in event.request_id
        else:
            program = self._contacted(program_id, now)
            is_over = program.status is ProgramStatus.ENDED
            if is_over or not program.ranked:
                # The first request determines the rank, a program_start does not.
                program.rank, program.ranked = self._programs.next_rank(), True
            if is_over:
                # Requests that outlive their program are not those of the next one with this id.
                for request_id in sorted(program.live_requests):
                    self._become_side_request(program, self._requests.states[request_id], now)
                program.reset_for_reuse(now)
            rank = program.rank
            sides = self._side_requests(program, event, now) if hashes is not None else []
            if event.request_id in sides:
                tokens = event.prompt_tokens
                self.decisions.add(now, "side_request", program_id, "other_context", tokens=tokens)
                program = None
            else:
                for side in map(self._requests.states.__getitem__, sides):
                    self._become_side_request(program, side, now)
        self._requests.arrivals += 1
        request_state = self._requests.states[event.request_id] = RequestState(
            event.request_id,
            rank,
            self._requests.arrivals,
            program,
            arrived_s=now,
            since_s=now,
            attained_s=program.attained_s if program is not None else 0.0,
            prompt_tokens=event.prompt_tokens,
            block_hashes=hashes,
            prompt=event.block_hashes or (),
        )
        outcome = event.identity.outcome
        if program is not None and context is not None:
            applied = request_state.apply_hint(context, self.limits.max_hinted_ttl_s, self._unused_fields)
            # A hint with an invalid field counts as clipped, even if it also has fields that are not used.
            if outcome is not Outcome.CLIPPED:
                outcome = applied
        if outcome is not None:
            self.recorder.count("sojourn_hints_total", outcome=outcome.value)
        if program is not None:
            self._begin_turn(program, request_state, event, now)
            self.tiers.arrived(request_state, now)

    def _contacted(self, program_id: ProgramId, now: float) -> ProgramState:
        """Find or create a program whose client was heard from, and forget those that were removed from a
        full table for it."""
        program, forgotten = self._programs.open(program_id, now)
        for each in forgotten:
            self.tiers.forget(each.id, now)
            self.leases.drop(each.id, DecisionReason.SUPERSEDED, now)
            # A preset that leaves the KV of ended programs in the cache keeps their contexts, too.
            self.state.contexts.pop(each.id, None)
            self.owners.contexts.pop(each.id, None)
            self.state.release_reasons.pop(each.id, None)
        program.disconnected = False
        return program

    def _side_requests(self, program: ProgramState, event: ev.RequestArrived, now: float) -> list[str]:
        """Return the ids of the requests that are *side requests* from now on: that of ``event`` if it is no
        turn of its program, or else those that it takes out of the running turn.

        A side request, such as one for a title, a count of tokens or a sub-agent without an id, has its
        program's place in the queue. Else it is served like a request without a program.

        The program's *main context* is the longest prompt of its running turn, or else the context that its
        last turn left. The main context *waits* while the program is in a tool and has a lease or reported
        the tool (at most ``max_held_s``). A request is a turn in four cases:

        1. There is no main context: the program is new or over, or the hashes were dropped.
        2. It continues the main context: it begins with the last prompt, since clients rewrite outputs, or
           with at least half of it, if no turn runs (a rewind, an edited history).
        3. A turn runs, and the request is longer. The turn's requests become side requests.
        4. No turn runs, the main context does not wait, and the request is at least half as long, or it
           continues the *branch*, the newest side request since the last turn. The conversation has moved
           on, for example after a compaction.

        A turn's context replaces the main context when the turn ends, and drops the branch.
        """
        hashes, before = event.block_hashes, None
        found = (self.state.requests.states[request_id] for request_id in program.live_requests)
        live = sorted(found, key=lambda one: one.arrival)  # the order of a set differs by process
        if live:
            longest = max(live, key=lambda request: request.prompt_tokens)
            before, prompt_tokens = longest.block_hashes, longest.prompt_tokens
        elif program.turns and program.status not in OVER_STATUSES:
            before, prompt_tokens = self.context(program.id), program.prompt_tokens
        if hashes is None or before is None or any(request.block_hashes is None for request in live):
            return []
        prompt_blocks = min(len(before), prompt_tokens // self.state.pool.block_size)
        shared = common_prefix_length(before, hashes)
        # The last block of a prompt may hold tokens that only begin an answer.
        if shared >= prompt_blocks - 1 or (not live and 2 * shared >= prompt_blocks):
            return []
        if live:
            is_longer = event.prompt_tokens > prompt_tokens
            return [request.request_id for request in live] if is_longer else [event.request_id]
        waits = program.gap_started_s is not None and program.tool_now() is not None
        if waits and program.id not in self.leases:
            in_gap_s = now - (program.gap_started_s or 0.0)
            waits = bool(program.tools) and in_gap_s < self.state.limits.max_held_s
        if not waits:
            blocks, last_hash = program.branch or (0, None)
            is_branch = 0 < blocks < len(hashes) and last_hash == hashes[blocks - 1]
            if is_branch or 2 * event.prompt_tokens >= program.context_tokens:
                return []
        program.branch = (len(hashes), hashes[-1]) if hashes else None
        return [event.request_id]

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
            tool_s = program.gap_tool_s()
            if tool is not None:
                source = "reported" if program.gap_reported else "inferred"
                self.recorder.count("sojourn_tool_gap_source_total", source=source)
                self.recorder.observe("sojourn_tool_gap_seconds", gap_s, tool=tool)
                if not program.gap_reported:
                    self.histories.tools.observe(tool, gap_s)
                    program.gap_inferred_s = now
            if program.turn_hint.ttl_s and gap_s > 0:
                self.histories.tool_estimates.learn(f"{TTL}/{tool}", program.turn_hint.ttl_s, gap_s)
            program.gap_started_s = None
            self.predictor.came_back(program, tool, gap_s, event.prompt_tokens)
        program.tools.clear()
        program.tools_ended_s = now
        self.predictor.eviction_key_changed(program)
        program.went_on_after_final |= program.turn_hint.final
        self.predictor.arrived(program, request_state)
        request_state.tool, program.pending_tool = tool, None
        program.priority = event.priority
        program.live_requests.add(event.request_id)
        self._programs.signal(program, ProgramSignal.REQUEST_ARRIVED)
        request_state.record = TurnRecord(
            program.id,
            program.turns + (not is_repeated),
            client_request_id,
            now,
            tool_before=tool_before,
            gap_s=gap_s,
            tool_s=tool_s,
            leased=program.id in self.leases,
        )

    def _become_side_request(self, program: ProgramState, request_state: RequestState, now: float) -> None:
        """Take a request out of its program's turn."""
        tokens = request_state.prompt_tokens
        self.decisions.add(now, "side_request", program.id, "other_context", tokens=tokens)
        program.live_requests.discard(request_state.request_id)
        self.awaiting_first_token.pop(request_state.request_id, None)
        self.tiers.finished(request_state, now)
        request_state.program = request_state.record = None
        self._outbox.append(ev.QueuePlaceChanged(request_state.request_id))

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
        self.tiers.admitted(request_state, now, event.block_hashes)
        self.forecaster.admitted(request_state, event.tokens, event.most_tokens, now)
        program, record = request_state.program, request_state.record
        if program is None or record is None:
            return
        if not first:
            if event.resumed:
                record.recomputed_after_preemption_tokens += max(0, event.tokens - event.cached_tokens)
            return
        record.admitted_s = now
        self.awaiting_first_token[event.request_id] = record
        self._record_reuse(program, record, event, now)
        self.leases.end(program.id, DecisionReason.RETURN, now)
        self.state.release_reasons.pop(program.id, None)

    def _record_reuse(
        self, program: ProgramState, record: TurnRecord, event: ev.RequestAdmitted, now: float
    ) -> None:
        """Record where the KV of an admitted request's prompt came from."""
        before = self.context(program.id)
        shared = common_prefix_length(before, event.block_hashes) if before is not None else None
        self.predictor.admitted(program, event.block_hashes, len(before or ()), shared)
        cause, evicted_block = LossCause.UNREAD, None
        if event.reads_cache:
            cause, evicted_block = self.leases.loss_cause(program, before, event)
        if evicted_block is not None:
            record.evictor, record.evicted_score = evicted_block.evictor, evicted_block.score
        split = split_tokens(
            prompt=event.tokens,
            device=event.cached_tokens,
            block_size=self.pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before or ()),
            shared_blocks=shared,
            cause=cause,
            dropped_hit_blocks=self.pool.dropped_hit_blocks,
        )
        record.tokens = replace(split, device=split.device - event.host_tokens, host=event.host_tokens)
        reused = split.device  # on the device and in host memory
        program.reused_tokens += reused
        program.lost_tokens += sum(split.lost.values()) - split.lost.get(LossCause.UNREAD, 0)
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
        if request_state is not None:
            # A loading request counts too, so that it is not chosen as victim every time.
            request_state.preemptions += 1
            numbers["times"] = request_state.preemptions
        if not event.loading:
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
        self.recorder.count("sojourn_preemptions_total", mode=mode)
        if request_state is not None:
            self.decisions.add(now, "preempt", request_state.program_id, mode, **numbers)
        return answer

    def _finished(self, event: ev.TurnFinished, now: float) -> None:
        """Remove a request that has left the engine. If the request is the last of its turn, the turn ends,
        and the program may get a lease."""
        request_state = self._requests.states.pop(event.request_id, None)
        self.forecaster.request_left(event.request_id)
        if request_state is None:
            return
        request_state.stop(now)
        failed = event.outcome in (ev.TurnFinishReason.ABORTED, ev.TurnFinishReason.ERROR)
        if not failed:  # an aborted output shows no length
            self.forecaster.ended(request_state, event)
        self.tiers.finished(request_state, now, failed=failed)
        program = request_state.program
        if program is None:
            return
        self.owners.own(event.block_ids, program.id)
        program.attained_s = max(program.attained_s, request_state.attained_s + request_state.ran_s)
        program.waited_s += request_state.waited_s
        program.last_contact_s = now
        record, client_request_id = request_state.record, None
        if record is not None:
            self._close_record(record, event, now)
            client_request_id = record.request_id
        program.live_requests.discard(event.request_id)
        self.predictor.eviction_key_changed(program)
        if not failed:
            program.turns += client_request_id is None or client_request_id != program.client_request_id
            program.client_request_id = client_request_id
        if program.live_requests:
            return
        program.disconnected = event.outcome is ev.TurnFinishReason.ABORTED
        self._programs.signal(program, ProgramSignal.TURN_OVER)
        if program.status in OVER_STATUSES:  # the client ended the program while this request still ran
            self.leases.drop(program.id, DecisionReason.END, now)
            return
        if failed:
            # The program went on after a turn that was announced as the last.
            program.turn_hint = program.turn_hint._replace(final=False)
            return
        self._open_gap(program, event, now)
        program.turn_hint = request_state.hint
        self.state.contexts.put(program.id, event.block_hashes)
        program.branch = None
        self.owners.contexts[program.id] = event.block_ids
        cached_blocks = len(event.block_ids)
        self.tiers.turn_finished(program, cached_blocks)
        self.predictor.turn_finished(program, event, now)
        if record is not None:
            record.goes_on = program.continuation_probability
            record.tier, record.p_reuse = program.prediction_source, program.p_reuse
        if program.turn_hint.final and self.predictor.believes_final(program):
            self.tiers.forget(program.id, now)
            self.leases.log_keep(
                program, RetentionDecision(0.0, DecisionReason.FINAL_TURN), cached_blocks, now
            )
            return
        if program.id in self.leases:  # a parallel branch of the same program still holds a lease
            self.leases.end(program.id, DecisionReason.SUPERSEDED, now)
        lease = self.leases.grant(program, program.pending_tool, event.block_ids, now)
        if lease is not None and record is not None:
            record.lease_ttl_s = round(lease.ttl_s, 3)

    def _close_record(self, record: TurnRecord, event: ev.TurnFinished, now: float) -> None:
        """Complete the record of a request that has left the engine, and add it to the ledger and to the
        metrics."""
        if event.output_tokens and event.request_id in self.awaiting_first_token:  # all in one step
            self._first_token(ev.FirstToken(event.request_id), now)
        self.awaiting_first_token.pop(event.request_id, None)
        record.finished_s = now
        record.output_tokens = event.output_tokens
        record.outcome = event.outcome.value
        self.state.ledger.close(record)
        count = self.recorder.count
        count("sojourn_program_turns_total", outcome=record.outcome)
        if lost := record.recomputed_after_preemption_tokens:
            count("sojourn_lost_tokens_total", lost, cause=LossCause.PREEMPTED.value)
        split = record.tokens
        if split is None:
            return
        for result in ("device", "host", "new", "tail"):
            count("sojourn_prompt_tokens_total", getattr(split, result), result=result)
        for cause, tokens in split.lost.items():
            if cause is LossCause.UNREAD:
                count("sojourn_prompt_tokens_total", tokens, result="unread")
                continue
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
        program.gap_started_s = now
        program.gap_calls.clear()
        program.gap_reported = program.gap_leased = False
        # Calls whose start was reported late, and their end lost, do not run in this gap.
        program.tools = {
            call: tool for call, tool in program.tools.items() if tool.started_s >= program.tools_ended_s
        }
        # The gap lasts until the slowest of the calls has ended.
        program.pending_tool = self.histories.tools.slowest([call.key for call in event.tool_calls])

    # -- events of clients ----------------------------------------------------------

    def _client_event(self, received: ev.ClientEventReceived, now: float) -> EventOutcome:
        """Apply one client event to its program and return the outcome for the client. Any event of a known
        program counts as contact, even if it is then rejected."""
        event, prefix = received.event, f"{received.event.__struct_config__.tag}."
        unused: tuple[str, ...] = ()
        outcome, reason = self._apply(EmitterId(received.emitter), event, now) or (Outcome.APPLIED, "")
        if outcome in (Outcome.APPLIED, Outcome.DEFERRED):
            fields = (name.removeprefix(prefix) for name in self._unused_fields if name.startswith(prefix))
            unused = tuple(field for field in fields if getattr(event, field) is not None)
        return EventOutcome(
            outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq, unsupported=unused
        )

    def _apply(self, emitter: EmitterId, event: AnyEvent, now: float) -> _Refusal | None:
        program_id = ProgramId(event.program_id)
        if not isinstance(event, ProgramStart) and program_id not in self._programs:
            return Outcome.MISSING, "unknown program; its next request or program_start opens it"
        program = self._contacted(program_id, now)
        if not recent_entry(program.seen, emitter, SequenceWindow, MAX_EMITTERS_PER_PROGRAM).admit(event.seq):
            return Outcome.DUPLICATE, "sequence number seen before, or too far behind"
        if self._programs.signal(program, ProgramSignal.CONTACT):
            self.predictor.eviction_key_changed(program)
        refusal: _Refusal | None = getattr(self, f"_{event.__struct_config__.tag}")(program, event, now)
        return refusal

    def _program_start(self, program: ProgramState, event: ProgramStart, now: float) -> None:
        program.name = event.name or program.name
        program.agent_type = event.agent_type or program.agent_type
        if event.parent_program_id:
            program.parent_id = ProgramId(event.parent_program_id)
        program.tenant = event.tenant or program.tenant
        program.heartbeats |= event.heartbeat

    def _heartbeat(self, program: ProgramState, event: AnyEvent, now: float) -> None:
        program.heartbeats = True

    def _tool_start(self, program: ProgramState, event: ToolStart, now: float) -> _Refusal | None:
        if program.status is ProgramStatus.ENDED:
            return Outcome.MISSING, "the program has ended; its next request opens it again"
        if len(program.tools) >= MAX_TOOLS_PER_PROGRAM:
            return Outcome.REJECTED, f"{MAX_TOOLS_PER_PROGRAM} tool calls of the program already run"
        key = f"{event.tool}:{event.tool_class}" if event.tool_class else event.tool
        started_s = now - min(event.age_s, now)
        learned = program.gap_inferred_s is not None and started_s <= program.gap_inferred_s
        if learned or (not program.live_requests and started_s < program.tools_ended_s):
            # A history already has the tool's duration, the gap between the two requests, or the gap is over.
            return Outcome.DEFERRED, "a request overtook this event and has ended the tool call"
        program.tools[CallId(event.call_id)] = RunningTool(
            key, started_s, event.expected_s, event.expected_p95_s
        )
        if program.live_requests:
            return Outcome.DEFERRED, "a request of the program is in the engine; counts for the history only"
        self.tiers.tool_known(program, now)
        lease = self.leases.get(program.id)
        if lease is not None and not lease.anchored:
            lease.anchored = True  # only once per gap, since the TTL was chosen for a tool that starts now
            lease.extend(started_s + lease.ttl_s)
        is_new = program.pending_tool != key
        if is_new and (lease is not None or self.context(program.id) is not None):
            program.pending_tool = key
            if program.gap_started_s is not None:
                self.predictor.plan_gap(program, now)
            # Without a lease, the output showed no call of this tool. A gap gets at most one lease.
            if lease is None and not program.gap_leased and program.status not in OVER_STATUSES:
                # Several KV cache groups list their blocks one after the other. A hit needs blocks of each.
                is_single = not self.pool.fixed_blocks and self.pool.tokens_per_block == self.pool.block_size
                if block_ids := self.owners.cached_context(program.id, whole=not is_single):
                    self.leases.grant(program, program.tool_now(), block_ids, now, "late_keep")
        return None

    def _tool_stop(self, program: ProgramState, event: ToolStop, now: float) -> _Refusal | None:
        tool = program.tools.pop(CallId(event.call_id), None)
        if tool is None:
            return Outcome.MISSING, "no such tool call runs: its tool_start is missing or a request ended it"
        duration_s = event.duration_s
        if duration_s is None:
            duration_s = max(0.0, now - event.age_s - tool.started_s)
        histories = self.state.histories
        histories.tools.observe(tool.key, duration_s)
        if tool.expected_s is not None and 0 < tool.expected_s < math.inf and duration_s > 0:
            histories.tool_estimates.learn(tool.key, tool.expected_s, duration_s)
        program.gap_reported = True
        program.tool_ended(tool, duration_s, now)
        self.tiers.tool_known(program, now)
        if not program.tools and (lease := self.leases.get(program.id)) is not None:
            lease.extend(now + self.state.limits.return_grace_s)
        return None

    def _aeg(self, program: ProgramState, event: AegReport, now: float) -> _Refusal | None:
        try:
            if not self.state.graphs.follow(event.graph_hash, event.graph):
                return Outcome.MISSING, "no graph of this hash is known; send it with its nodes and edges"
        except GraphError as error:
            return Outcome.REJECTED, str(error)
        program.agent_type = event.agent_type or program.agent_type
        program.graph_hash = event.graph_hash
        return None

    def _program_end(self, program: ProgramState, event: ProgramEnd, now: float) -> None:
        outcome = ProgramOutcome(event.status) if event.status in REPORTED_OUTCOMES else ProgramOutcome.ERROR
        self._end_program(program, ProgramSignal.END, outcome, now)

    def _end_program(
        self, program: ProgramState, signal: ProgramSignal, outcome: ProgramOutcome, now: float
    ) -> None:
        """End a program because it is done (``END``) or was silent for too long (``SILENCE``). The histories
        learn its turns and workflow steps. ``END`` drops the program's KV; ``SILENCE`` only ends its
        lease."""
        state, predictor = self.state, self.predictor
        if not self._programs.signal(program, signal):
            return
        program.outcome = outcome
        if signal is ProgramSignal.END:  # after silence a tool may still run, and its end may be reported
            program.tools.clear()
        self.tiers.forget(program.id, now)
        if program.turns != program.turns_at_last_end:
            program.turns_at_last_end = program.turns
            state.histories.turns.observe(program.turns)
            # An expired program counts as ended. A cancelled program does not, since it could have gone on.
            has_ended = outcome is not ProgramOutcome.CANCELLED
            # A program without a turn had no service. Clients could flood the history with such programs.
            if program.turns and has_ended:
                state.histories.service.observe(program.agent_type or "", program.attained_s)
            predictor.learn_ended_program(program, ended=has_ended)
            state.recorder.count("sojourn_programs_finished_total", outcome=outcome.value)
            state.recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)
        predictor.eviction_key_changed(program)
        if signal is ProgramSignal.END:
            self.leases.drop(program.id, DecisionReason.END, now)
        else:
            self.leases.end(program.id, DecisionReason.SILENT, now)

    # -- memory and time --------------------------------------------------------------

    def _blocks_needed(self, event: ev.BlocksNeeded, now: float) -> None:
        """End leases for a request that needs blocks."""
        idle_s = self._requests.idle_s(now, event.need.anything_running)
        self.leases.make_room(replace(event.need, idle_s=idle_s), self._lease_views(), now)

    def _lease_views(self) -> list[LeaseView]:
        by_program, standing, score = self.preset.eviction.by_program, self.owner_standing, self.owner_score
        return [each.view(score(standing(name)) if by_program else ()) for name, each in self.leases.items()]

    def _evicted(self, event: ev.BlocksEvicted, now: float) -> None:
        """Log why cached blocks were evicted, and for which program."""
        state, taker_request_id = self.state, event.taker_request_id
        taker = state.requests.states.get(taker_request_id) if taker_request_id is not None else None
        evictor = taker.program_id if taker is not None else None
        evicted: dict[ProgramId | None, list[Any]] = {}
        owners = self.owners.remove_evicted([block_id for block_id, _ in event.blocks])
        for owner, (_, block_hash) in zip(owners, event.blocks, strict=True):
            if block_hash is not None:
                evicted.setdefault(owner, []).append(block_hash)
        for owner, hashes in evicted.items():
            program = state.programs.get(owner) if owner is not None else None
            if program is not None and program.status not in OVER_STATUSES:
                state.last_shortage_s = now
            known = state.release_reasons.get(owner) if owner is not None else None
            cause = known or LossCause.EVICTED
            state.eviction_log.add(hashes, EvictedBlock(cause, evictor, event.score))
            lost, blocks = {"tier": "device", "cause": cause.value}, len(hashes)
            self.recorder.count("sojourn_evictions_total", blocks, **lost)
            self.recorder.count("sojourn_evicted_bytes_total", blocks * self.pool.block_bytes, **lost)

    def _tick(self, event: ev.Tick, now: float) -> None:
        self._now_s = now
        if event.used_blocks is not None:
            self.state.used_blocks = event.used_blocks
        self.leases.end_expired(now)
        pressed = getattr(self.preset.retention, "pressed", None)
        if pressed is not None and len(self.leases) and self.state.used_blocks is not None:
            views, used_blocks = self._lease_views(), self.state.used_blocks
            for program_id, reason in pressed(views, used_blocks, self.pool.blocks, now):
                self.leases.end(program_id, reason, now)
        for silent in self._programs.silent(now):
            self._end_program(silent, ProgramSignal.SILENCE, silent.silent_outcome(), now)
        if self.preset.prefetch.is_used:
            for program in self.predictor.pop_due_prefetches(now):
                prefetch = ev.EngineAction(ev.EngineActionKind.PREFETCH, program.id, DecisionReason.THIS_TOOL)
                self._outbox.append(prefetch)
        if self.tiers.places:
            self.tiers.tick(now)

    def _step_completed(self, event: ev.StepCompleted, now: float) -> None:
        self.state.reload.observe_step(event.tokens, event.seconds, event.requests, event.kv_tokens)
        self.forecaster.record_step(event.seconds)

    def _cache_reset_started(self, event: ev.CacheResetStarted, now: float) -> None:
        for program_id in self.leases.end_all(DecisionReason.RESET, now):
            # The engine may refuse the reset. Then the blocks of these leases stay cached.
            self.state.release_reasons.pop(program_id, None)

    def _cache_reset(self, event: ev.CacheReset, now: float) -> None:
        contexts = self.state.contexts
        if event.device:
            self.leases.end_all(DecisionReason.RESET, now)
            lost = list(contexts)
            contexts.clear()
            self.owners.clear()
            self.predictor.prefixes.clear()
        else:
            lost = [each for each in contexts if self.tiers.tier(each) is not Tier.DEVICE]
            for program_id in lost:
                del contexts[program_id]
        for program_id in lost:
            self.state.release_reasons[program_id] = LossCause.DROPPED
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
            self.tiers.begin_again(requests.values(), now)
        else:
            self.leases.end_all(DecisionReason.SWITCHED_OFF, now)
            self.tiers.give_up(now)
        for program in self._programs:
            self.predictor.eviction_key_changed(program)  # it has another tier
        self._outbox.extend(map(ev.QueuePlaceChanged, requests))

    # -- queries: they change nothing -------------------------------------------

    def status(self, program: ProgramState) -> ProgramStatus:
        """The program's status; GATED in place of REASONING if the policy rejects a request of the program,
        or if its place parks one."""
        if program.status is not ProgramStatus.REASONING:
            return program.status
        for request in filter(None, map(self.request, program.live_requests)):
            blocked = request.admission_blocked_since_s is not None
            accepted = request.request_id in self.forecaster.holding
            if (blocked and not accepted) or self.tiers.is_parked(request):
                return ProgramStatus.GATED
        return program.status

    def live_requests(self, program_id: ProgramId) -> AbstractSet[str]:
        """Ids of the program's requests in the engine."""
        program = self._programs.get(program_id)
        return program.live_requests if program is not None else frozenset()

    def prefetch_keys(self, program_id: ProgramId) -> Sequence[Any]:
        """Hashes of the blocks with which the program's next prompt probably begins; empty if unknown."""
        program = self._programs.get(program_id)
        return self.predictor.expected_prefix(program)[0] if program is not None else ()

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
        patience_s = self.limits.queue_patience_s
        overdue = self._requests.is_overdue(state, view.preempted, now - patience_s)
        queue_state = QueueState.OPEN
        if self.tiers.places and self.tiers.is_parked(state):
            queue_state = QueueState.PARKED
        elif not overdue and self.forecaster.decides_admission(state, preempted):
            queue_state = QueueState.GATED
        key = (0.0, not view.preempted, state.arrival) if overdue else (1.0, *order.key(view))
        # A request of a program looks again each time it has waited so long, since another may be overdue.
        due_s = [each for each in (order.promoted_s(view), state.since_s + patience_s) if each > now]
        return QueuePlace(key, queue_state, min((now + patience_s, *due_s)))

    def may_end_any_lease(self, request_id: str, now: float) -> bool:
        """Whether a waiting request that lacks blocks may end any lease: it is overdue, or passes admission.

        Otherwise it could wait for ever: for the lease of a program whose next request waits behind it. Such
        a lease does not expire while that request waits."""
        state, due_s = self._requests.states.get(request_id), now - self.limits.queue_patience_s
        overdue = state is not None and self._requests.is_overdue(state, state.preempted, due_s)
        return overdue or self.passes_admission(request_id, now)

    def blocks_later_requests(self, request_id: str, now: float) -> bool:
        """Whether this request holds back all requests behind it in the queue, because the admission policy
        has rejected it for more than ``queue_patience_s``."""
        state = self._requests.states.get(request_id)
        since_s = state.admission_blocked_since_s if state is not None else None
        return since_s is not None and now - since_s > self.limits.queue_patience_s

    def passes_admission(self, request_id: str, now: float) -> bool:
        """Whether the engine admits a request that the policy rejects, as soon as its blocks fit: if it would
        hold back a request without a program."""
        return self.blocks_later_requests(request_id, now) and self._requests.untracked_waits()

    # -- queries for the eviction order -------------------------------------------

    def label(self, program_id: ProgramId | None) -> Tier:
        """The label of a program's blocks: the tier where the program is placed.

        Host memory and disk choose by this label which blocks to evict. The label is WAITING if
        ``program_id`` is ``None`` or unknown, or if its program has ended or expired."""
        program = self._programs.get(program_id) if program_id is not None else None
        if program is None or program.status in OVER_STATUSES:
            return Tier.WAITING
        return self.tiers.tier(program.id)

    def owner_standing(
        self, program_id: ProgramId, left: AbandonedBranch | None = None
    ) -> tuple[float, ...] | None:
        """Return the input of ``owner_score`` for a program, or for the branch ``left`` that it abandoned.
        The value is valid until ``predictor.take_changed`` returns the program. ``None``: unknown program."""
        program = self._programs.get(program_id)
        if program is None:
            return None
        view = EvictionCandidateView(
            program.rank,
            program.status in OVER_STATUSES,
            program.last_active_s if left is None else left.used_s,
            blocks=program.cached_blocks if left is None else left.blocks,
            has_request=bool(program.live_requests),
            p_reuse=program.p_reuse,
            in_abandoned_branch=left is not None,
            tier=self.tiers.tier(program_id),
        )
        return self.preset.eviction.score_inputs(view)

    def owner_score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """Return the eviction key for an ``owner_standing``; the lowest is evicted first. It is valid until
        ``predictor.scale_changes`` or ``branch_reuse``, the reused share of abandoned blocks, changes."""
        if standing is None:
            return (-math.inf,)
        return self.preset.eviction.score(standing, self.predictor.scale(branch_reuse))

    def close_recording(self, reason: str) -> None:
        """Do nothing. ``RecordingScheduler`` overrides this method to write the end record of a recording."""
