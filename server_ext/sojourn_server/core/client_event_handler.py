"""Client events: ``ClientEventHandler`` reads them, ``ClientEventFolder`` changes program state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from sojourn.events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn.ids import MAX_ID_BYTES, CallId, EmitterId, ProgramId
from sojourn.wire import (
    MAX_BATCH_EVENTS,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    WireError,
    decode_batch,
    decode_event,
)

from ..metrics.metrics_recorder import MetricsRecorder
from ..policies.policy_protocols import DecisionReason
from ..programs.execution_graphs import GraphError, GraphStore
from ..programs.program_state import ProgramState, RunningTool, SequenceWindow
from ..programs.program_status import ProgramSignal, ProgramStatus
from ..programs.program_table import ProgramTable
from .context_hashes import ContextHashStore
from .events_and_actions import Action, ClientEventReceived, EngineActionKind, Event, EventAnswered
from .lease_manager import LeaseManager
from .program_lifecycle import ProgramLifecycle
from .request_identity import RequestIdentity
from .scheduler_state import Histories, SchedulerLimits
from .workflow_predictor import WorkflowPredictor

EventDoor = Callable[[Event, float], list[Action]]
"""``ProgramScheduler.handle``, or the engine's wrapper of it that also collects the actions."""

MAX_TOOLS_PER_PROGRAM = 1024
MAX_EMITTERS_PER_PROGRAM = 16
EVENT_TYPES = ("program_start", "tool_start", "tool_stop", "heartbeat", "aeg", "program_end")
PROGRAM_OUTCOMES = ("ok", "error", "cancelled")


class _EventLabel(msgspec.Struct):
    """As much of a bad event as its outcome can name."""

    type: Any = None
    program_id: Any = None
    seq: Any = None


_label_decoder = msgspec.json.Decoder(_EventLabel)


class ClientEventHandler:
    """Reads client events from the wire and has the scheduler handle each. An event that cannot be read
    changes nothing but a counter, and its outcome says why."""

    def __init__(self, handle: EventDoor, recorder: MetricsRecorder) -> None:
        self._handle = handle
        self._recorder = recorder

    def batch(self, data: bytes, now: float) -> OutcomeBatch:
        """Handle a batch as posted. Raises ``WireError`` if it is not a batch."""
        batch = decode_batch(data)
        return OutcomeBatch(outcomes=self._fold(batch.emitter, batch.events, now))

    def apply_attached_events(self, identity: RequestIdentity, now: float) -> list[EventOutcome]:
        """Handle the events that came with a request. To be called before the request's own arrival."""
        context = identity.context
        ours = context.sojourn if context is not None else None
        if ours is None or not ours.events or not ours.emitter:
            return []
        if len(ours.emitter.encode("utf-8", "replace")) > MAX_ID_BYTES:
            return []
        return self._fold(ours.emitter, ours.events[:MAX_BATCH_EVENTS], now)

    def _fold(self, emitter: str, events: Iterable[msgspec.Raw], now: float) -> list[EventOutcome]:
        return [self._one(emitter, raw, now) for raw in events]

    def _one(self, emitter: str, raw: msgspec.Raw, now: float) -> EventOutcome:
        try:
            event = decode_event(raw)
        except WireError as error:
            kind, outcome = _undecodable_outcome(raw, str(error))
        else:
            kind = str(event.__struct_config__.tag)
            answer = self._handle(ClientEventReceived(emitter, event), now)[-1]
            assert isinstance(answer, EventAnswered)
            outcome = answer.outcome
        self._recorder.count("sojourn_events_total", type=kind, outcome=outcome.outcome.value)
        return outcome


class ClientEventFolder:
    """Folds client events into program state. An event that cannot be used changes nothing and says why."""

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        histories: Histories,
        table: ProgramTable,
        graphs: GraphStore,
        contexts: ContextHashStore,
        lease_manager: LeaseManager,
        workflow_predictor: WorkflowPredictor,
        program_lifecycle: ProgramLifecycle,
    ) -> None:
        self._limits = limits
        self._histories = histories
        self._table = table
        self._graphs = graphs
        self._contexts = contexts
        self._lease_manager = lease_manager
        self._leases = lease_manager.leases
        self._workflow_predictor = workflow_predictor
        self._program_lifecycle = program_lifecycle
        self._handlers = {
            ProgramStart: self._program_start,
            ToolStart: self._tool_start,
            ToolStop: self._tool_stop,
            Heartbeat: self._heartbeat,
            AegReport: self._aeg,
            ProgramEnd: self._program_end,
        }

    def fold(self, emitter: EmitterId, event: AnyEvent, now: float) -> EventOutcome:
        """Apply one event and return its outcome."""
        program_id = ProgramId(event.program_id)
        if not isinstance(event, ProgramStart) and program_id not in self._table:
            return _event_outcome(
                event, Outcome.MISSING, "unknown program; its next request or program_start opens it"
            )
        program, forgotten = self._table.open(program_id, now)
        self._program_lifecycle.forget(forgotten, now)
        if not _is_new_event(program, emitter, event.seq):
            return _event_outcome(event, Outcome.DUPLICATE, "sequence number seen before, or too far behind")
        self._leases.heard(program_id, now)
        if self._table.signal(program, ProgramSignal.CONTACT):
            self._workflow_predictor.touched(program)
        outcome, reason = self._handlers[type(event)](program, event, now)  # type: ignore[operator]
        return _event_outcome(event, outcome, reason)

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
        key = f"{event.tool}:{event.tool_class}" if event.tool_class else event.tool
        started_s = now - min(event.age_s, now)
        inferred_s = program.gap_inferred_s
        if program.live_requests and inferred_s is not None and started_s <= inferred_s:
            # Its duration is in the history already, as the time between the two requests.
            return Outcome.DEFERRED, "a request overtook this event and has ended the tool call"
        program.tools[CallId(event.call_id)] = RunningTool(
            key, started_s, event.expected_s, event.tool, event.tool_class
        )
        if program.live_requests:
            return Outcome.DEFERRED, "a request of the program is in the engine; counts for the history only"
        lease = self._leases.get(program.id)
        if lease is not None:
            if not lease.anchored:  # once a gap: the time-to-live was chosen for a run that begins now
                lease.anchored = True
                self._leases.extend(program.id, started_s + lease.ttl_s)
            if program.pending_tool != key:
                program.pending_tool = key
                self._workflow_predictor.tool_reported(program, now)
        elif program.pending_tool != key and self._contexts.get(program.id) is not None:
            # The output showed no tool call, or another one: the client knows better. But what was given up
            # or has run out in this gap is not taken back.
            program.pending_tool = key
            self._workflow_predictor.tool_reported(program, now)
            if not program.gap_leased:
                self._lease_manager.order(
                    EngineActionKind.PIN_CACHED, program.id, DecisionReason.THIS_TOOL, now
                )
        return Outcome.APPLIED, ""

    def _tool_stop(self, program: ProgramState, event: ToolStop, now: float) -> tuple[Outcome, str]:
        tool = program.tools.pop(CallId(event.call_id), None)
        if tool is None:
            return Outcome.MISSING, "no such tool call runs: its tool_start is missing or a request ended it"
        self._histories.tools.observe(tool.key, event.duration_s)
        program.gap_reported = True
        if not program.tools:
            self._leases.extend(program.id, now + self._limits.return_grace_s)
        return Outcome.APPLIED, ""

    def _heartbeat(self, program: ProgramState, event: Heartbeat, now: float) -> tuple[Outcome, str]:
        self._promised(program, now)
        return Outcome.APPLIED, ""

    def _aeg(self, program: ProgramState, event: AegReport, now: float) -> tuple[Outcome, str]:
        agent_type = event.agent_type or program.agent_type
        try:
            known = self._graphs.follow(event.graph_hash, event.graph, agent_type)
        except GraphError as error:
            return Outcome.REJECTED, str(error)
        if not known:
            return Outcome.MISSING, "no graph of this hash is known; send it with its nodes and edges"
        program.agent_type = agent_type
        program.graph_hash = event.graph_hash
        return Outcome.APPLIED, ""

    def _program_end(self, program: ProgramState, event: ProgramEnd, now: float) -> tuple[Outcome, str]:
        outcome = event.status if event.status in PROGRAM_OUTCOMES else "error"
        self._program_lifecycle.over(program, ProgramSignal.END, outcome, now)
        return Outcome.APPLIED, ""

    def _promised(self, program: ProgramState, now: float) -> None:
        self._table.promise_heartbeats(program)
        self._leases.promised(program.id, now)


def _is_new_event(program: ProgramState, emitter: EmitterId, seq: int) -> bool:
    seen = program.seen.get(emitter)
    if seen is None:
        if len(program.seen) >= MAX_EMITTERS_PER_PROGRAM:
            del program.seen[next(iter(program.seen))]
        seen = program.seen[emitter] = SequenceWindow()
    return seen.admit(seq)


def _undecodable_outcome(raw: msgspec.Raw, error: str) -> tuple[str, EventOutcome]:
    try:
        label = _label_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        label = _EventLabel()
    kind, outcome = "unknown", Outcome.REJECTED
    if isinstance(label.type, str):
        if label.type in EVENT_TYPES:
            kind = label.type
        else:
            outcome = Outcome.UNSUPPORTED
            error = f"unknown event type {label.type[:64]!r}; expected {', '.join(EVENT_TYPES)}"
    program_id = label.program_id[:MAX_ID_BYTES] if isinstance(label.program_id, str) else None
    seq = label.seq if isinstance(label.seq, int) and not isinstance(label.seq, bool) else None
    return kind, EventOutcome(outcome=outcome, reason=error, program_id=program_id, seq=seq)


def _event_outcome(event: AnyEvent, outcome: Outcome, reason: str) -> EventOutcome:
    return EventOutcome(outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq)
