"""NVIDIA Dynamo (github.com/ai-dynamo/dynamo): program ids in headers, hints in ``nvext.agent_hints``, and
tool events over ZeroMQ if the user names an endpoint.

Dynamo answers 400 to an unknown body field and to a number out of range, both inside and outside of ``nvext``
(tried with ai-dynamo 1.6.1).

Tool events are records of Dynamo's request trace. Each record is one ZeroMQ message: ``[topic, sequence
number (u64, big-endian), msgpack record]``. The schema is ``dynamo.request.trace.v1``
(``lib/llm/src/request_trace``). Dynamo records the events for tracing and replay; they do not influence its
cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sojourn.errors import ConfigError, install_command
from sojourn.event_queue import PendingEvent
from sojourn.hints import AgenticContext
from sojourn.wire_events import Event, ProgramEnd, ProgramStart, ToolStart, ToolStop

from .event_transport import DeliveryResult, EventTransport, PendingBatch, TransportContext
from .server_dialects import I32_MAX, U32_MAX, Fields, VllmDialect, clip, header_text

SESSION_HEADER = "X-Dynamo-Session-ID"
PARENT_HEADER = "X-Dynamo-Parent-Session-ID"
FINAL_HEADER = "X-Dynamo-Session-Final"
SCHEMA = "dynamo.request.trace.v1"
TOPIC = b"agent-tool-events"
"""Default topic of Dynamo 1.6; older releases accept any topic."""
HIGH_WATER_EVENTS = 1000
"""Maximum number of events that ZeroMQ buffers while no peer reads; further events are dropped and
counted."""
LINGER_S = 0.2
"""Longest time that ``close`` waits for ZeroMQ to send its buffer."""
MAX_REMEMBERED = 4096
"""Maximum number of running tool calls whose class is remembered, and of programs whose parent is remembered.
Beyond it the oldest are forgotten."""
UNKNOWN_CLASS = "unknown"

_STATUS = {
    "ok": ("tool_end", "succeeded", None),
    "error": ("tool_error", "error", "error"),
    "nonzero": ("tool_error", "error", "nonzero"),
    "timeout": ("tool_error", "cancelled", "timeout"),
    "cancelled": ("tool_end", "cancelled", None),
}
"""Our status → Dynamo's event type, status and error type."""


class DynamoDialect(VllmDialect):
    """Dynamo's dialect. A *higher* priority is more important, as in sojourn; Dynamo converts it for its
    engines."""

    name = "dynamo"

    def fields(self, context: AgenticContext) -> Fields:
        ours = context.sojourn
        headers: dict[str, str] = {}
        # An implicit program is a whole process. Session affinity would pin all its requests to one worker.
        if ours is None or not ours.implicit:
            headers[SESSION_HEADER] = header_text(context.program_id)
            if context.parent_program_id:
                headers[PARENT_HEADER] = header_text(context.parent_program_id)
            if ours is not None and ours.final:
                headers[FINAL_HEADER] = "true"
        # ``strict_priority`` is never sent, since only the operator may put a request above all others.
        hints: dict[str, Any] = {}
        if context.priority is not None:
            hints["priority"] = clip(context.priority, I32_MAX)
        if context.expected_output_length is not None:
            hints["osl"] = max(0, clip(context.expected_output_length, U32_MAX))
        if context.expected_resume:
            # When this turn ends, Dynamo then prefills the prefix that it expects in the next turn.
            hints["speculative_prefill"] = True
        return {"nvext": {"agent_hints": hints}} if hints else {}, headers

    def event_transport(self, transport_context: TransportContext) -> EventTransport | None:
        if transport_context.tool_events is None:
            return None
        return ToolEventTransport(transport_context, transport_context.tool_events)


def load_zmq() -> Any:
    """Return the ZeroMQ library. If it is missing, raises ``ConfigError`` with the name of the extra to
    install."""
    try:
        import zmq
    except ImportError as error:
        raise ConfigError(
            f"Dynamo's tool events need ZeroMQ ({error}): {install_command('dynamo')}, or name no endpoint"
        ) from error
    return zmq


class TraceRecordEncoder:
    """Translates events into trace records. Remembers the class of each running tool call and the parent of
    each program, since later events do not repeat them."""

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self._unix_s = unix_s
        self._classes: dict[tuple[str, str], str] = {}
        self._parents: dict[str, str] = {}

    def record(self, pending: PendingEvent, now: float) -> dict[str, Any] | None:
        """Return the record of one event, or ``None`` if Dynamo has no such record. ``now``: monotonic
        seconds."""
        fields = pending.fields
        if pending.kind is ProgramStart:
            if fields.get("parent_program_id"):
                _remember(self._parents, pending.program_id, fields["parent_program_id"])
            return None
        if pending.kind is ProgramEnd:
            self._parents.pop(pending.program_id, None)
            return None
        if pending.kind not in (ToolStart, ToolStop):
            return None
        # The only use of the time of day, since Dynamo's records have no other clock.
        happened_ms = round((self._unix_s() - max(0.0, now - pending.at_s)) * 1000)
        call = (pending.program_id, fields["call_id"])
        if pending.kind is ToolStart:
            tool_class = fields.get("tool_class") or fields["tool"]
            _remember(self._classes, call, tool_class)
            tool = {
                "tool_call_id": fields["call_id"],
                "tool_class": tool_class,
                "status": "running",
                "started_at_unix_ms": happened_ms,
            }
            return self._around("tool_start", pending.program_id, happened_ms, tool)
        kind, status, error_type = _STATUS.get(fields.get("status", "ok"), _STATUS["ok"])
        duration_ms = fields["duration_s"] * 1000
        tool = {
            "tool_call_id": fields["call_id"],
            "tool_class": self._classes.pop(call, UNKNOWN_CLASS),
            "status": status,
            "started_at_unix_ms": max(0, happened_ms - round(duration_ms)),
            "ended_at_unix_ms": happened_ms,
            "duration_ms": float(duration_ms),
        }
        if error_type is not None:
            tool["error_type"] = error_type
        return self._around(kind, pending.program_id, happened_ms, tool)

    def forget(self) -> None:
        """Forget all calls and programs."""
        self._classes, self._parents = {}, {}

    def _around(self, kind: str, program_id: str, at_ms: int, tool: dict[str, Any]) -> dict[str, Any]:
        # The same text as in the requests' headers, so that records and requests can be joined.
        ids = {"session_id": header_text(program_id)}
        if program_id in self._parents:
            ids["parent_session_id"] = header_text(self._parents[program_id])
        return {
            "schema": SCHEMA,
            "event_type": kind,
            "event_time_unix_ms": at_ms,
            # Some releases read the session from ``agent_context``, others from the top level.
            "event_source": "harness",
            "agent_context": ids,
            **ids,
            "tool": tool,
        }


class ToolEventTransport:
    """Pushes trace records over ZeroMQ. ``events_sent`` counts the records that ZeroMQ has accepted, since
    ZeroMQ does not report delivery."""

    kinds: frozenset[type[Event]] = frozenset({ProgramStart, ToolStart, ToolStop, ProgramEnd})
    takes_implicit = True

    def __init__(
        self, transport_context: TransportContext, endpoint: str, records: TraceRecordEncoder | None = None
    ) -> None:
        self._zmq = load_zmq()
        self._counters = transport_context.counters
        self._endpoint = endpoint
        self._records = TraceRecordEncoder() if records is None else records
        self._seq = itertools.count()
        self._context: Any = None
        self._socket: Any = None
        self._inherited: list[Any] = []

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        for done, pending in enumerate(batch.events):
            try:
                record = self._records.record(pending, batch.now)
                data = None if record is None else msgspec.msgpack.encode(record)
            except Exception:
                self._counters.add("encode_error")
                continue
            if data is None:
                self._counters.add("dropped_unsupported")
                continue
            try:
                self._push(data)
            except Exception as error:  # zmq.Again: the high-water mark is reached
                self._counters.add(f"net_{type(error).__name__}")
                self._counters.add("dropped_send", len(batch.events) - done)
                return DeliveryResult.FAILED
            self._counters.add("events_sent")
        return DeliveryResult.ACCEPTED

    def after_fork(self) -> None:
        # Kept, not closed, since the sockets' threads exist in the parent only.
        self._inherited += [thing for thing in (self._socket, self._context) if thing is not None]
        self._context = self._socket = None
        self._seq = itertools.count()
        self._records.forget()

    def close(self) -> None:
        context, self._context = self._context, None
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
        if context is not None:
            context.term()

    def _push(self, data: bytes) -> None:
        # Opened here, on the thread that uses it, since a socket must not change threads.
        if self._socket is None:
            self._context = self._zmq.Context()
            socket = self._context.socket(self._zmq.PUSH)
            socket.setsockopt(self._zmq.SNDHWM, HIGH_WATER_EVENTS)
            socket.setsockopt(self._zmq.LINGER, int(LINGER_S * 1000))
            socket.connect(self._endpoint)
            self._socket = socket
        frames = [TOPIC, next(self._seq).to_bytes(8, "big"), data]
        self._socket.send_multipart(frames, flags=self._zmq.NOBLOCK)


def _remember(known: dict[Any, str], key: Any, value: str) -> None:
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
