"""Applies decoded client events to the state of their programs, and returns their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn.ids import CallId, EmitterId, ProgramId
from sojourn.wire_codec import EventOutcome, Outcome
from sojourn.wire_events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

from ..programs.declared_graphs import GraphError
from ..programs.program_state import ProgramState, RunningTool, SequenceWindow
from ..programs.program_status import (
    OVER_STATUSES,
    REPORTED_OUTCOMES,
    ProgramOutcome,
    ProgramSignal,
    ProgramStatus,
)
from .lease_manager import LeaseManager
from .program_lifecycle import OWN_TOOLS_PER_PROGRAM, ProgramLifecycle
from .request_hints import unused_event_fields
from .scheduler_state import SchedulerState
from .tier_manager import TierManager
from .workflow_predictor import WorkflowPredictor

MAX_TOOLS_PER_PROGRAM = 1024
MAX_RUNNING_TOOLS = 100_000
"""Maximum number of running tool calls of all programs together, about 160 MiB with the longest names. When
the maximum is reached, each program may still have ``OWN_TOOLS_PER_PROGRAM``."""
MAX_EMITTERS_PER_PROGRAM = 16
CALLS_BEFORE_WARNING = 8
"""Number of tool calls of a program without any request after which a warning is given, once per program."""


class ClientEventHandler:
    """Passes each client event to the handler of the event's type. If a client reports the end of its
    program, ``ProgramLifecycle`` ends the program. Times are seconds on the engine's monotonic clock."""

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: ProgramLifecycle,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        tier_manager: TierManager,
    ) -> None:
        self._state = state
        self._programs = state.programs
        self._leases = state.leases
        self._lifecycle = lifecycle
        self._lease_manager = lease_manager
        self._workflow_predictor = workflow_predictor
        self._tier_manager = tier_manager
        self._unused_fields = unused_event_fields(state.preset)
        self._handlers = {
            ProgramStart: self._program_start,
            ToolStart: self._tool_start,
            ToolStop: self._tool_stop,
            Heartbeat: self._heartbeat,
            AegReport: self._aeg,
            ProgramEnd: self._program_end,
        }

    def apply_event(self, emitter: EmitterId, event: AnyEvent, now: float) -> EventOutcome:
        """Apply one client event to its program and return the outcome for the client. Any new event of a
        known program counts as contact, even if it is then rejected."""
        program_id = ProgramId(event.program_id)
        if not isinstance(event, ProgramStart) and program_id not in self._programs:
            return _event_outcome(
                event, Outcome.MISSING, "unknown program; its next request or program_start opens it"
            )
        program, forgotten = self._programs.open(program_id, now)
        self._lifecycle.forget(forgotten, now)
        if not _is_new_event(program, emitter, event.seq):
            return _event_outcome(event, Outcome.DUPLICATE, "sequence number seen before, or too far behind")
        self._leases.heard(program_id, now)
        program.disconnected = False
        if self._programs.signal(program, ProgramSignal.CONTACT):
            self._workflow_predictor.eviction_key_changed(program)
        outcome, reason = self._handlers[type(event)](program, event, now)  # type: ignore[operator]
        return _event_outcome(event, outcome, reason, self._unused_fields.get(type(event), ()))

    def _program_start(self, program: ProgramState, event: ProgramStart, now: float) -> tuple[Outcome, str]:
        program.name = event.name or program.name
        program.agent_type = event.agent_type or program.agent_type
        if event.parent_program_id:
            program.parent_id = ProgramId(event.parent_program_id)
        if event.root_program_id:
            program.root_id = ProgramId(event.root_program_id)
        program.tenant = event.tenant or program.tenant
        if event.heartbeat:
            self._promised(program, now)
        return Outcome.APPLIED, ""

    def _tool_start(self, program: ProgramState, event: ToolStart, now: float) -> tuple[Outcome, str]:
        if program.status is ProgramStatus.ENDED:
            return Outcome.MISSING, "the program has ended; its next request opens it again"
        if len(program.tools) >= MAX_TOOLS_PER_PROGRAM:
            return Outcome.REJECTED, f"{MAX_TOOLS_PER_PROGRAM} tool calls of the program already run"
        if (
            len(program.tools) >= OWN_TOOLS_PER_PROGRAM
            and self._programs.running_tools() >= MAX_RUNNING_TOOLS
        ):
            return Outcome.REJECTED, f"{MAX_RUNNING_TOOLS} tool calls of all programs already run"
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
        if lease is not None:
            if not lease.anchored:  # only once per gap, since the TTL was chosen for a tool that starts now
                lease.anchored = True
                self._leases.extend(program.id, started_s + lease.ttl_s)
            if program.pending_tool != key:
                program.pending_tool = key
                self._workflow_predictor.tool_reported(program, now)
        elif program.pending_tool != key and self._state.contexts.get(program.id) is not None:
            # The output showed no call of this tool. A gap gets at most one lease.
            program.pending_tool = key
            self._workflow_predictor.tool_reported(program, now)
            block_ids = self._state.cached_context(program.id)
            if not program.gap_leased and block_ids and program.status not in OVER_STATUSES:
                used_blocks = self._state.used_blocks
                self._lease_manager.grant(
                    program, program.tool_now(), block_ids, used_blocks, now, "late_keep"
                )
        return Outcome.APPLIED, ""

    def _tool_stop(self, program: ProgramState, event: ToolStop, now: float) -> tuple[Outcome, str]:
        tool = program.tools.pop(CallId(event.call_id), None)
        if tool is None:
            return Outcome.MISSING, "no such tool call runs: its tool_start is missing or a request ended it"
        duration_s = event.duration_s
        if duration_s is None:
            duration_s = max(0.0, now - event.age_s - tool.started_s)
        self._state.histories.tools.observe(tool.key, duration_s)
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
        return Outcome.APPLIED, ""

    def _heartbeat(self, program: ProgramState, event: Heartbeat, now: float) -> tuple[Outcome, str]:
        self._promised(program, now)
        return Outcome.APPLIED, ""

    def _aeg(self, program: ProgramState, event: AegReport, now: float) -> tuple[Outcome, str]:
        agent_type = event.agent_type or program.agent_type
        try:
            known = self._state.graphs.follow(event.graph_hash, event.graph, agent_type)
        except GraphError as error:
            return Outcome.REJECTED, str(error)
        if not known:
            return Outcome.MISSING, "no graph of this hash is known; send it with its nodes and edges"
        program.agent_type = agent_type
        program.graph_hash = event.graph_hash
        return Outcome.APPLIED, ""

    def _program_end(self, program: ProgramState, event: ProgramEnd, now: float) -> tuple[Outcome, str]:
        outcome = ProgramOutcome(event.status) if event.status in REPORTED_OUTCOMES else ProgramOutcome.ERROR
        self._lifecycle.end_program(program, ProgramSignal.END, outcome, now)
        return Outcome.APPLIED, ""

    def _promised(self, program: ProgramState, now: float) -> None:
        program.heartbeats = True
        self._leases.promised(program.id, now)


def _is_new_event(program: ProgramState, emitter: EmitterId, seq: int) -> bool:
    seen = program.seen.get(emitter)
    if seen is None:
        if len(program.seen) >= MAX_EMITTERS_PER_PROGRAM:
            del program.seen[next(iter(program.seen))]
        seen = program.seen[emitter] = SequenceWindow()
    return seen.admit(seq)


def _event_outcome(
    event: AnyEvent, outcome: Outcome, reason: str, unused: Sequence[str] = ()
) -> EventOutcome:
    """Return the answer to an event. For an applied or deferred event, the answer lists the fields in
    ``unused`` that the event sets."""
    has: tuple[str, ...] = ()
    if unused and outcome in (Outcome.APPLIED, Outcome.DEFERRED):
        has = tuple(field for field in unused if getattr(event, field) is not None)
    return EventOutcome(
        outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq, unsupported=has
    )
