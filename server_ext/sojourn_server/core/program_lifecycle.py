"""The life of a program: a request opens it, its client reports events, and it ends or falls silent.

``ProgramScheduler`` handles the turns between.
A *turn* lasts until the last of its program's parallel requests has left. A *gap* lasts from there until the
program's next request; its tools run in it. The tool history learns the durations that clients report.
Without a report, it learns the gap as the tool's duration. Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import math

from sojourn.ids import CallId, EmitterId, ProgramId
from sojourn.wire_codec import EventOutcome, Outcome
from sojourn.wire_events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

from ..metrics.turn_ledger import common_prefix_length
from ..policies.policy_protocols import DecisionReason
from ..programs.declared_graphs import GraphError
from ..programs.program_state import ProgramState, RunningTool, SequenceWindow
from ..programs.program_status import (
    OVER_STATUSES,
    REPORTED_OUTCOMES,
    ProgramOutcome,
    ProgramSignal,
    ProgramStatus,
)
from .events_and_actions import (
    ClientEventReceived,
    EventAnswered,
    RequestArrived,
)
from .lease_manager import LeaseManager
from .request_hints import unused_fields
from .scheduler_state import ANY_TYPE, SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

MAX_TOOLS_PER_PROGRAM = 256
MAX_EMITTERS_PER_PROGRAM = 16
CALLS_BEFORE_WARNING = 8
"""Number of tool calls of a program without any request after which a warning is given, once per program."""
_Refusal = tuple[Outcome, str]
"""Outcome of a client's event that was not applied, and the reason."""


class ProgramLifecycle:
    """Opens and ends the programs of one engine, and applies client events to them."""

    def __init__(
        self,
        state: SchedulerState,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        tier_manager: TierManager,
    ) -> None:
        self._state, self._programs, self._leases = state, state.programs, state.leases
        self._lease_manager, self._tier_manager = lease_manager, tier_manager
        self._workflow_predictor = workflow_predictor
        self._unused_fields = unused_fields(state.preset)
        self._handlers = {
            ProgramStart: self._program_start,
            ToolStart: self._tool_start,
            ToolStop: self._tool_stop,
            Heartbeat: self._heartbeat,
            AegReport: self._aeg,
            ProgramEnd: self._program_end,
        }

    def open(self, program_id: ProgramId, now: float) -> ProgramState:
        """Return the program of a request that has arrived. An unknown id or the id of an ended program
        begins a new program with a new rank."""
        program = self._contacted(program_id, now)
        self._leases.heard(program.id, now)
        program.disconnected = False
        if not program.ranked or program.status is ProgramStatus.ENDED:
            # The first request determines the rank, a program_start does not. An id that is used again after
            # its program ended is a new program.
            program.rank, program.ranked = self._programs.next_rank(), True
            if program.status is ProgramStatus.ENDED:
                program.reset_for_reuse(now)
        return program

    def _contacted(self, program_id: ProgramId, now: float) -> ProgramState:
        """Find or create a program, and forget those that were removed from a full table for it."""
        program, forgotten = self._programs.open(program_id, now)
        for each in forgotten:
            self._tier_manager.forget(each.id)
            self._lease_manager.drop(each.id, DecisionReason.SUPERSEDED, now)
            # A preset that leaves the KV of ended programs in the cache keeps their contexts, too.
            self._state.contexts.drop(each.id)
            self._state.owners.contexts.pop(each.id, None)
            self._state.release_reasons.pop(each.id, None)
        return program

    def join_turn(self, program: ProgramState, event: RequestArrived, now: float) -> list[str]:
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
        hashes, before, contexts = event.block_hashes, None, self._state.contexts
        found = (self._state.requests.states[request_id] for request_id in program.live_requests)
        # Not those of an earlier program of this id. Sorted, since the order of a set differs by process.
        live = sorted((one for one in found if one.rank == program.rank), key=lambda one: one.arrival)
        if live:
            longest = max(live, key=lambda request: request.prompt_tokens)
            before, prompt_tokens = longest.block_hashes, longest.prompt_tokens
        elif program.turns and program.status not in OVER_STATUSES:
            before, prompt_tokens = contexts.get(program.id), program.prompt_tokens
        if hashes is None or before is None or any(request.block_hashes is None for request in live):
            return []
        prompt_blocks = min(len(before), prompt_tokens // self._state.pool.block_size)
        shared = common_prefix_length(before, hashes)
        # The last block of a prompt may hold tokens that only begin an answer.
        if shared >= prompt_blocks - 1 or (not live and 2 * shared >= prompt_blocks):
            return []
        if live:
            is_longer = event.prompt_tokens > prompt_tokens
            return [request.request_id for request in live] if is_longer else [event.request_id]
        waits = program.gap_started_s is not None and program.tool_now() is not None
        if waits and program.id not in self._leases:
            in_gap_s = now - (program.gap_started_s or 0.0)
            waits = bool(program.tools) and in_gap_s < self._state.limits.max_held_s
        if not waits:
            branch = contexts.branch(program.id)
            is_branch = 0 < len(branch) < len(hashes) and branch[-1] == hashes[len(branch) - 1]
            if is_branch or 2 * event.prompt_tokens >= program.context_tokens:
                return []
        contexts.put_branch(program.id, list(hashes))
        return [event.request_id]

    def apply_event(self, received: ClientEventReceived, now: float) -> EventAnswered:
        """Apply one client event to its program and return the outcome for the client. Any new event of a
        known program counts as contact, even if it is then rejected."""
        event = received.event
        outcome, reason = self._apply(EmitterId(received.emitter), event, now) or (Outcome.APPLIED, "")
        unused: tuple[str, ...] = ()
        if outcome in (Outcome.APPLIED, Outcome.DEFERRED):
            prefix = f"{event.__struct_config__.tag}."
            fields = (name.removeprefix(prefix) for name in self._unused_fields if name.startswith(prefix))
            unused = tuple(field for field in fields if getattr(event, field) is not None)
        program_id, seq = event.program_id, event.seq
        return EventAnswered(
            EventOutcome(outcome=outcome, reason=reason, program_id=program_id, seq=seq, unsupported=unused)
        )

    def _apply(self, emitter: EmitterId, event: AnyEvent, now: float) -> _Refusal | None:
        program_id = ProgramId(event.program_id)
        if not isinstance(event, ProgramStart) and program_id not in self._programs:
            return Outcome.MISSING, "unknown program; its next request or program_start opens it"
        program = self._contacted(program_id, now)
        seen = program.seen.get(emitter)
        if seen is None:
            if len(program.seen) >= MAX_EMITTERS_PER_PROGRAM:
                del program.seen[next(iter(program.seen))]
            seen = program.seen[emitter] = SequenceWindow()
        if not seen.admit(event.seq):
            return Outcome.DUPLICATE, "sequence number seen before, or too far behind"
        self._leases.heard(program_id, now)
        program.disconnected = False
        if self._programs.signal(program, ProgramSignal.CONTACT):
            self._workflow_predictor.eviction_key_changed(program)
        refusal: _Refusal | None = self._handlers[type(event)](program, event, now)  # type: ignore[operator]
        return refusal

    def _program_start(self, program: ProgramState, event: ProgramStart, now: float) -> None:
        program.name = event.name or program.name
        program.agent_type = event.agent_type or program.agent_type
        if event.parent_program_id:
            program.parent_id = ProgramId(event.parent_program_id)
        if event.root_program_id:
            program.root_id = ProgramId(event.root_program_id)
        program.tenant = event.tenant or program.tenant
        if event.heartbeat:
            self._heartbeat(program, event, now)

    def _heartbeat(self, program: ProgramState, event: AnyEvent, now: float) -> None:
        program.heartbeats = True
        self._leases.heard(program.id, now, promised=True)

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
            key, started_s, event.expected_s, event.expected_p95_s, event.tool, event.tool_class
        )
        if program.live_requests:
            return Outcome.DEFERRED, "a request of the program is in the engine; counts for the history only"
        self._tier_manager.tool_known(program, now)
        lease = self._leases.get(program.id)
        is_new = program.pending_tool != key
        if lease is not None and not lease.anchored:
            lease.anchored = True  # only once per gap, since the TTL was chosen for a tool that starts now
            self._leases.extend(program.id, started_s + lease.ttl_s)
        if is_new and (lease is not None or self._state.contexts.get(program.id) is not None):
            program.pending_tool = key
            self._workflow_predictor.tool_reported(program, now)
            # Without a lease, the output showed no call of this tool. A gap gets at most one lease.
            if lease is None and not program.gap_leased and program.status not in OVER_STATUSES:
                block_ids = self._state.cached_context(program.id)
                if block_ids:
                    self._lease_manager.grant(program, program.tool_now(), block_ids, now, "late_keep")
        return None

    def _tool_stop(self, program: ProgramState, event: ToolStop, now: float) -> _Refusal | None:
        tool = program.tools.pop(CallId(event.call_id), None)
        if tool is None:
            return Outcome.MISSING, "no such tool call runs: its tool_start is missing or a request ended it"
        duration_s = event.duration_s
        if duration_s is None:
            duration_s = max(0.0, now - event.age_s - tool.started_s)
        histories = self._state.histories
        histories.tools.observe(tool.key, duration_s)
        if tool.expected_s is not None and 0 < tool.expected_s < math.inf and duration_s > 0:
            histories.tool_estimates.learn(tool.key, tool.expected_s, duration_s)
        program.gap_reported = True
        program.add_tool_time(tool, duration_s, now)
        self._tier_manager.tool_known(program, now)
        if not program.tools:
            self._leases.extend(program.id, now + self._state.limits.return_grace_s)
        program.calls_before_request += not program.ranked
        if not program.ranked and program.calls_before_request == CALLS_BEFORE_WARNING:
            # Not in the outcome: with data parallelism every rank gets the events, and one the requests.
            warning = (
                "tool calls are reported, but no request with this program id has reached this engine: "
                "send the client's requests to this server, with the id"
            )
            self._state.decisions.add(now, "unseen_requests", program.id, warning, calls=CALLS_BEFORE_WARNING)
        return None

    def _aeg(self, program: ProgramState, event: AegReport, now: float) -> _Refusal | None:
        agent_type = event.agent_type or program.agent_type
        try:
            known = self._state.graphs.follow(event.graph_hash, event.graph, agent_type)
        except GraphError as error:
            return Outcome.REJECTED, str(error)
        if not known:
            return Outcome.MISSING, "no graph of this hash is known; send it with its nodes and edges"
        program.agent_type = agent_type
        program.graph_hash = event.graph_hash
        return None

    def _program_end(self, program: ProgramState, event: ProgramEnd, now: float) -> None:
        outcome = ProgramOutcome(event.status) if event.status in REPORTED_OUTCOMES else ProgramOutcome.ERROR
        self.end(program, ProgramSignal.END, outcome, now)

    def end(self, program: ProgramState, signal: ProgramSignal, outcome: ProgramOutcome, now: float) -> None:
        """End a program because it is done (``END``) or was silent for too long (``SILENCE``). The histories
        learn its turns and workflow steps. ``END`` drops the program's KV; ``SILENCE`` only ends its
        lease."""
        state, predictor = self._state, self._workflow_predictor
        if not self._programs.signal(program, signal):
            return
        program.outcome = outcome
        if signal is ProgramSignal.END:  # after silence a tool may still run, and its end may be reported
            program.tools.clear()
        self._tier_manager.forget(program.id)
        if program.turns != program.turns_at_last_end:
            program.turns_at_last_end = program.turns
            state.histories.turns.observe(program.turns)
            # An expired program counts as ended. A cancelled program does not, since it could have gone on.
            has_ended = outcome is not ProgramOutcome.CANCELLED
            # A program without a turn had no service. Clients could flood the history with such programs.
            if program.turns and has_ended:
                state.histories.service.observe(program.agent_type or ANY_TYPE, program.attained_s)
            predictor.learn_ended_program(program, ended=has_ended)
            state.recorder.count("sojourn_programs_finished_total", outcome=outcome.value)
            state.recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)
        predictor.eviction_key_changed(program)
        if signal is ProgramSignal.END:
            self._lease_manager.drop(program.id, DecisionReason.END, now)
        else:
            self._lease_manager.end(program.id, DecisionReason.SILENT, now)
