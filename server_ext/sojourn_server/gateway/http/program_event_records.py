"""Records programs' events, in bounded memory. The gateway may have to send them to another engine later."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from sojourn.wire_codec import MAX_EVENT_NAME_BYTES, MAX_GRAPH_BYTES, EventOutcome, Outcome, encode
from sojourn.wire_events import AegReport, AnyEvent, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

from ...routing.bounded_program_table import Key
from ...routing.routing_limits import SILENT_PROGRAM_S

MAX_RECORDED_PROGRAMS = 50_000
"""Default maximum number of programs whose events are recorded."""
MAX_TOTAL_GRAPH_BYTES = 32 << 20
"""Maximum total bytes of all graphs as JSON."""
MAX_UNDELIVERED_EVENTS = 64
"""Maximum number of tool events in a program's ``ProgramEventRecord.undelivered``. Older ones are dropped."""
MAX_RUNNING_TOOLS = 64
"""Maximum number of running tools in a program's record. Further ones are not recorded."""
EVENTS_PER_PROGRAM = 4
"""Number of recorded tool events that use as much of ``MAX_RECORDED_PROGRAMS`` as one further program."""

ReplicaInstance = tuple[str, str]
"""(replica id, ``EngineDescription.instance`` of the replica's engine)."""

Value = TypeVar("Value")


class TenantBoundedCache(Generic[Value]):
    """Cache of values by (tenant, name). Each value has a weight. If the total weight exceeds ``most``, the
    tenant with the largest weight loses its oldest values."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, OrderedDict[str, tuple[Value, int]]] = {}
        """(value, weight) by tenant and name. Each tenant's oldest value is first."""
        self._weights: dict[str, int] = {}
        """Total weight of each tenant's values."""
        self._weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def get(self, key: Key) -> Value | None:
        """Return the value under ``key``; ``None``: not in the cache. Leaves the order of eviction
        unchanged."""
        of_tenant = self._values.get(key[0])
        held = of_tenant.get(key[1]) if of_tenant is not None else None
        return held[0] if held is not None else None

    def put(self, key: Key, value: Value, weight: int) -> None:
        """Insert or replace a value. It becomes the tenant's newest one. May drop other values."""
        self.pop(key)
        self._values.setdefault(key[0], OrderedDict())[key[1]] = (value, weight)
        self._add(key[0], weight)
        while self._weight > self._most:
            tenant = max(self._weights, key=lambda one: (self._weights[one], one))
            self.pop((tenant, next(iter(self._values[tenant]))))

    def oldest(self, tenant: str) -> tuple[str, Value] | None:
        """Return (name, value) of the tenant's oldest value; ``None``: the tenant has no values."""
        of_tenant = self._values.get(tenant)
        if not of_tenant:
            return None
        name, (value, _) = next(iter(of_tenant.items()))
        return name, value

    def pop(self, key: Key) -> Value | None:
        """Remove and return a value; ``None``: not in the cache."""
        of_tenant = self._values.get(key[0])
        held = of_tenant.pop(key[1], None) if of_tenant is not None else None
        if held is None:
            return None
        self._add(key[0], -held[1])
        if not of_tenant:
            del self._values[key[0]], self._weights[key[0]]
        return held[0]

    def _add(self, tenant: str, weight: int) -> None:
        self._weights[tenant] = self._weights.get(tenant, 0) + weight
        self._weight += weight


@dataclass(frozen=True, slots=True, eq=False)
class RecordedEvent:
    """An event without its graph, and its time of arrival. ``ProgramEventRecords`` stores graphs apart, as
    JSON."""

    event: AnyEvent
    at_s: float
    """Time of arrival, on the gateway's clock."""
    in_full: bool = True
    """Whether the event came complete. False if it came with only the hash of its graph."""


@dataclass(slots=True, eq=False)
class ProgramEventRecord:
    """The events of one program, and which replica has them. Times are on the gateway's clock."""

    authorization: str | None
    """``Authorization`` header that came with the last event."""
    start: RecordedEvent | None = None
    graph: RecordedEvent | None = None
    tools: dict[str, RecordedEvent] = field(default_factory=dict)
    """Start events of the running tools, by call id."""
    undelivered: list[RecordedEvent] = field(default_factory=list)
    """Tool events that no engine has received, in order of arrival. The program had no home, or its engine
    did not answer."""
    place: ReplicaInstance | None = None
    """The replica that has all events of the program; ``None``: no replica has them all."""
    missed: int = 0
    """Number of times that ``mark_unsent`` has cleared ``place``. If it grows while the events are sent to a
    replica, the replica lacks a newer event."""
    sending: tuple[ReplicaInstance, asyncio.Future[list[EventOutcome]]] | None = None
    """The replica to which the events were last sent, and a future of their outcomes. The outcomes are empty
    if the replica did not accept the events."""
    heard_s: float = 0.0
    """Time of the program's last event, heartbeats included."""
    again_s: float = 0.0
    """Time before which the events are not sent again, after an engine did not accept them."""

    def mark_unsent(self) -> None:
        """Record that no replica has all events of the program. Before the program's next request goes to a
        replica, the events are sent there."""
        self.place = None
        self.missed += 1

    def events_to_send(self, carried: Container[RecordedEvent] = ()) -> list[RecordedEvent]:
        """Return the events to send to an engine that has received no events of the program: start, graph,
        running tools and undelivered tool events. ``carried``: events to leave out, because a request carries
        them."""
        later = set(self.undelivered)
        tools = [one for one in self.tools.values() if one not in later]
        every = (self.start, self.graph, *tools, *self.undelivered)
        return [one for one in every if one is not None and one not in carried]


def update_known_graphs(known_graphs: set[str], event: AnyEvent, outcome: Outcome) -> None:
    """Update ``known_graphs`` after an engine's answer to ``event``. ``known_graphs``: hashes of the graphs
    that the engine received in full. ``outcome``: the engine's answer."""
    if not isinstance(event, AegReport):
        return
    if outcome in (Outcome.APPLIED, Outcome.DUPLICATE):
        known_graphs.add(event.graph_hash)
    elif outcome is Outcome.MISSING:
        known_graphs.discard(event.graph_hash)  # the engine knows the program or the graph no more


class ProgramEventRecords:
    """The records of all programs, by ``key``: (tenant, program id). Also stores the programs' graphs.

    If the records take too much space, the tenant that uses the most loses its oldest ones. The same holds
    for graphs.
    """

    def __init__(
        self,
        *,
        most_programs: int = MAX_RECORDED_PROGRAMS,
        most_graphs_bytes: int = MAX_TOTAL_GRAPH_BYTES,
        silent_s: float = SILENT_PROGRAM_S,
    ) -> None:
        """``silent_s``: seconds without an event after which a program's record is dropped."""
        self._silent_s = silent_s
        self._programs: TenantBoundedCache[ProgramEventRecord] = TenantBoundedCache(most_programs)
        self._graphs: TenantBoundedCache[bytes] = TenantBoundedCache(most_graphs_bytes)
        """Graphs as JSON, by (tenant, hash). Programs with the same graph share one entry."""

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: Key) -> ProgramEventRecord | None:
        """Return the program's record; ``None``: there were no events, or the record was dropped."""
        return self._programs.get(key)

    def forget(self, key: Key) -> bool:
        """Drop the record of a program that ended. Return whether there was one."""
        return self._programs.pop(key) is not None

    def graph(self, tenant: str, graph_hash: str) -> msgspec.Raw | None:
        """Return a graph as JSON; ``None``: the graph was never received in full, or was dropped."""
        text = self._graphs.get((tenant, graph_hash))
        return msgspec.Raw(text) if text is not None else None

    def record_event(
        self, key: Key, event: AnyEvent, authorization: str | None, now_s: float, *, delivered: bool
    ) -> RecordedEvent | None:
        """Record an event. Return the record; ``None`` for heartbeats and program ends, which are not
        recorded.

        ``delivered``: whether an engine receives the event now. ``now_s``: time of arrival.
        """
        record = self._programs.get(key)
        if isinstance(event, (Heartbeat, ProgramEnd)):
            if record is not None:
                self._put(key, record, now_s)
            return None
        if record is None:
            record = ProgramEventRecord(authorization)
        record.authorization = authorization
        kept = RecordedEvent(
            self._bounded(key[0], event), now_s, not isinstance(event, AegReport) or bool(event.graph)
        )
        if isinstance(event, ProgramStart):
            record.start = kept
        elif isinstance(event, AegReport):
            record.graph = kept
        else:
            self._record_tool_event(record, event, kept, delivered)
        if not delivered:
            record.mark_unsent()
        self._put(key, record, now_s)
        return kept

    def record_lost(self, key: Key, kept: RecordedEvent | None, *, is_sent: bool) -> None:
        """Record that an event got no answer, although it was recorded as delivered. It is sent again if the
        program's later events have not replaced it. The start of a tool that has stopped is sent again only
        if it was not sent before and the tool's stop is sent again.

        For a batch, call this for the last event first, so that a tool's stop comes before its start.

        ``kept``: the event's record; ``None``: a heartbeat or program end, which is not sent again.
        ``is_sent``: whether the event was sent. If so, the engine may have handled it.
        """
        record = self._programs.get(key)
        if record is None or (kept is None and not is_sent):
            return
        record.mark_unsent()
        if kept is None or not isinstance(kept.event, (ToolStart, ToolStop)):
            return  # the record has the newest start and graph
        call = kept.event.call_id
        later = [type(one.event) for one in record.undelivered if one.event.call_id == call]  # type: ignore[union-attr]
        if isinstance(kept.event, ToolStop):
            is_lacking = call not in record.tools and not later
        else:  # if an engine may have handled the start, it would count the tool twice
            is_lacking = not is_sent and (record.tools.get(call) is kept or later == [ToolStop])
        if is_lacking:
            in_order = sorted([kept, *record.undelivered], key=lambda one: one.at_s)
            record.undelivered = in_order[-MAX_UNDELIVERED_EVENTS:]
            self._put(key, record, record.heard_s)

    def _put(self, key: Key, record: ProgramEventRecord, now_s: float) -> None:
        """Store a program's record as its tenant's newest, after an event. Drop records of silent
        programs."""
        record.heard_s = now_s
        weight = 1 + (len(record.tools) + len(record.undelivered)) // EVENTS_PER_PROGRAM
        self._programs.put(key, record, weight)
        self._drop_silent(key[0], now_s)

    def _drop_silent(self, tenant: str, now_s: float) -> None:
        """Drop up to two of the tenant's records without an event for ``silent_s``. Two are enough, because
        each call follows an event, and an event adds at most one record."""
        for _ in range(2):
            oldest = self._programs.oldest(tenant)
            if oldest is None or now_s - oldest[1].heard_s <= self._silent_s:
                return
            self._programs.pop((tenant, oldest[0]))

    def _record_tool_event(
        self, record: ProgramEventRecord, event: ToolStart | ToolStop, kept: RecordedEvent, delivered: bool
    ) -> None:
        """Record the start or end of a tool. ``kept``: the record of ``event``. ``delivered``: whether an
        engine receives the event now."""
        call, starts = event.call_id, isinstance(event, ToolStart)
        if not starts:
            record.tools.pop(call, None)
        elif call in record.tools or len(record.tools) < MAX_RUNNING_TOOLS:
            record.tools[call] = kept
        # Drop repeated events. Also drop a start whose stop an engine receives now, because if that start
        # were sent later, the tool would never end.
        record.undelivered = [
            one
            for one in record.undelivered
            if one.event.call_id != call  # type: ignore[union-attr]
            or (not delivered and isinstance(one.event, ToolStart) and not starts)
        ]
        if not delivered:
            record.undelivered = [*record.undelivered[-MAX_UNDELIVERED_EVENTS + 1 :], kept]

    def _bounded(self, tenant: str, event: AnyEvent) -> AnyEvent:
        """Return the event as it is recorded, with bounded size. A graph is moved to ``_graphs``. A long
        status becomes ``error``."""
        if isinstance(event, AegReport) and event.graph is not None:
            text = encode(event.graph)
            if len(text) <= MAX_GRAPH_BYTES:  # engines reject longer ones
                self._graphs.put((tenant, event.graph_hash), text, len(text))
            return msgspec.structs.replace(event, graph=None)
        if isinstance(event, AegReport):
            text = self._graphs.get((tenant, event.graph_hash)) or b""
            if text:
                self._graphs.put((tenant, event.graph_hash), text, len(text))  # keep it recent
        if isinstance(event, ToolStop) and len(event.status) > MAX_EVENT_NAME_BYTES:
            return msgspec.structs.replace(event, status="error")
        return event
