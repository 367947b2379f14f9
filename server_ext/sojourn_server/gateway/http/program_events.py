"""Keeps the last state of each program, and has its events and KV follow it to the engine that serves it.

An engine knows a program only from its events. So the gateway keeps of each program its start, its graph, its
running tools, and the events that no engine has answered. They reach the program's home, the replica that
serves its turns, in one of three ways:

- Posted events are posted on at once, with all that the home lacks of these programs. Without a home they
  wait for the program's first request.
- Events in a request's hint travel with it if they concern its own program or programs at home at the same
  replica. If not, they are taken out of it and handled like posted ones.
- Before a request goes to a replica that lacks events, they are posted there: after a move, a restart of the
  engine, or a POST without an answer. The request waits for that at most ``REPLAY_WAIT_S``.

There is one POST at a time for each engine and tenant, with all events that have arrived meanwhile. So events
stay in order, a flood costs few requests, and no tenant waits for another's. An event keeps the number of its
emitter until an engine has answered it, so that it is applied once. State that is sent again to another
engine has numbers of the gateway.

If a program moves and both engines use one shared disk, the former one writes its KV there before the next
request is sent. Then it gets the program's end, so that it drops the KV. No request ever fails for events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec
from sojourn.hints import AgenticContext
from sojourn.ids import id_problem
from sojourn.wire_codec import (
    EVENTS_PATH,
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_EVENT_NAME_BYTES,
    MAX_GRAPH_BYTES,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    WireError,
    decode_event,
    decode_outcomes,
    encode,
)
from sojourn.wire_events import (
    AegGraph,
    AegReport,
    AnyEvent,
    Heartbeat,
    ProgramEnd,
    ProgramStart,
    ToolStart,
    ToolStop,
)

from ...core.engine_answers import PersistProgress
from ...core.event_limits import MAX_ATTACHED_EVENTS, undecodable_outcome
from ...routing.routing_events import ProgramEnded, SendRequest
from .engine_client import ask_engine, bearer
from .gateway_metrics import GatewayMetrics
from .multi_engine_queries import EngineQueries
from .program_id_mapper import Key
from .replica_addresses import ReplicaAddress
from .routing_backend import RoutingBackend

T = TypeVar("T")

ANSWER_TIMEOUT_S = 5.0
"""Maximum seconds that a batch of events waits for the engine's answer."""
FORWARD_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S
"""Maximum seconds that a client waits for the outcomes of its events."""
REPLAY_WAIT_S = 1.0
"""Maximum seconds that a request waits until its replica has received the program's events."""
REPLAY_RETRY_S = 5.0
"""Seconds before a program's events are sent again to an engine that did not accept them."""
END_ATTEMPTS = 3
"""Number of POSTs of a program's end to an engine that does not answer."""
MAX_PROGRAMS = 10_000
"""Maximum number of programs whose state is kept, those of the newest events."""
MAX_RUNNING_TOOLS = 64
"""Maximum number that is kept of a program."""
MAX_UNSENT_OF_PROGRAM = 2 * MAX_BATCH_EVENTS
"""Maximum number of events of a program that no engine has answered, the newest."""
MAX_UNSENT = 100_000
"""Maximum number of such events of all programs, those of the newest programs."""
MAX_TOTAL_GRAPH_BYTES = 32 << 20
"""Maximum total bytes of all graphs as JSON."""
LEAST_KV_WAIT_S, MOST_KV_WAIT_S = 0.5, 5.0
"""Bounds of the wait for KV to be on the shared disk. The lower one is a few steps of the former engine."""
STORE_POLL_S = 0.02
RELEASE_DELAY_S = 30.0
"""Seconds after which a former replica may drop a program's KV, even without a request to the new home."""
MAX_RELEASE_ATTEMPTS = 4
"""Number of these delays after which the KV of a program without a home is released too."""
_BATCH_BYTES = MAX_BATCH_BYTES - 2048
"""Bytes of a batch that its events may take; an emitter's name takes the rest."""

EngineInstance = tuple[str, str]
"""(URL, ``EngineDescription.instance``) of an engine, whose ranks all get the same events."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An event, without its graph."""

    event: AnyEvent
    emitter: str
    at_s: float
    """Time of arrival."""
    outcome: EventOutcome | None = None
    """The engine's answer."""


@dataclass(slots=True, eq=False)
class _Program:
    """What the gateway keeps of one program."""

    state: dict[str, _Entry] = field(default_factory=dict)
    """The newest start and graph, and the running tools."""
    unsent: dict[_Entry, None] = field(default_factory=dict)
    """Events that no engine has answered, in order of arrival."""
    place: EngineInstance | None = None
    """The engine that has all events but ``unsent``; ``None``: no engine has."""
    heard_s: float = 0.0
    """Time of the last event."""
    authorization: str | None = None
    """``Authorization`` header of the last event or request."""
    again_s: float = 0.0
    """Time before which no request waits for the events, after an engine did not accept them."""

    def lacking(self, place: EngineInstance) -> list[_Entry]:
        if self.place == place:
            return list(self.unsent)
        return [*(one for one in self.state.values() if one not in self.unsent), *self.unsent]


@dataclass(slots=True, weakref_slot=True)
class _Turn:
    """The order of the POSTs of one tenant's events to one engine."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0
    """POSTs without an answer."""


class AttachedEvents:
    """The events in the hint of one request."""

    def __init__(self, program_id: str | None, context: AgenticContext, authorization: str | None) -> None:
        """``program_id``: of the request; ``None``: it counts as having none, even if its hint names one."""
        own = context.sojourn
        self.program_id = program_id
        self.authorization = authorization
        self.implicit_id = context.program_id if program_id is None else None
        emitter = (own.emitter if own is not None else None) or ""
        # Engines reject events without a valid emitter.
        raw = own.events[:MAX_BATCH_EVENTS] if own is not None and id_problem(emitter) is None else ()
        self.batch = EventBatch(v=WIRE_VERSION, emitter=emitter, events=list(raw))
        self.events: list[AnyEvent] = []
        """The events that can be read."""
        for one in raw:
            with contextlib.suppress(WireError):  # the engine reports the error
                self.events.append(decode_event(one))


class ProgramEvents:
    """The events of all programs of a gateway. ``key`` is (tenant, program id) everywhere."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        queries: EngineQueries,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = queries.names
        self._routing_backend = routing_backend
        self._replicas = queries.replicas
        self._session = queries.session
        self._engine_key = queries.engine_key
        self._clock = clock
        self._description_of = queries.monitor.description_of
        self._metrics = metrics
        self.programs: OrderedDict[Key, _Program] = OrderedDict()
        """The programs whose last event is the oldest come first."""
        self._graphs: OrderedDict[Key, tuple[AegGraph, int]] = OrderedDict()
        """(graph, its bytes as JSON) by tenant and hash."""
        self._graph_bytes = 0
        self._most_unsent = 0
        """Number of unanswered events at the last count, and of all events since."""
        self._emitter = f"gateway-{secrets.token_hex(6)}"
        self._seq = 0
        self._turns: WeakValueDictionary[tuple[str, str], _Turn] = WeakValueDictionary()
        """By URL of the engine and tenant, as long as a POST waits or runs."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.leaving: dict[Key, dict[str, asyncio.Task[None]]] = {}
        """The releases to come, by program and former replica, oldest first."""

    # -- events from clients -----------------------------------------------------------

    async def forward_batch(
        self, batch: EventBatch, tenant: str, authorization: str | None
    ) -> list[EventOutcome]:
        """Record the events of a batch, and forward each to its program's home. Return their outcomes in
        order. Without a home, a program's end goes to the engine that served it last. Of a pair, the decode
        engine gets it too."""
        core = self._routing_backend.core
        outcomes: list[EventOutcome | None] = [None] * len(batch.events)
        sent: list[tuple[int, Key, _Entry]] = []
        homes: dict[str, tuple[ReplicaAddress, dict[Key, None]]] = {}
        for number, raw in enumerate(batch.events):
            try:
                event = decode_event(raw)
            except WireError as error:
                outcomes[number] = undecodable_outcome(raw, str(error))[1]
                continue
            key = (tenant, event.program_id)
            home = self._replicas.get(core.home(*key))
            if isinstance(event, ProgramEnd):
                home, decoder = map(self._replicas.get, core.last_engines(*key))
                if decoder is not None:
                    self._start(self._send_end(decoder, key, event.status, authorization))
            if home is not None:
                sent.append((number, key, self._record(key, event, batch.emitter, authorization)))
                homes.setdefault(home.url, (home, {}))[1][key] = None
            elif isinstance(event, ProgramEnd) and self.end(key, event.status):
                outcomes[number] = _outcome(event, Outcome.APPLIED)
            elif isinstance(event, (Heartbeat, ProgramEnd)):
                outcomes[number] = _outcome(event, Outcome.MISSING, "unknown program")
            else:
                self._record(key, event, batch.emitter, authorization)
                outcomes[number] = _outcome(event, Outcome.DEFERRED, "it has no replica yet")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FORWARD_TIMEOUT_S):
                await asyncio.gather(*(self._deliver(tenant, home, keys) for home, keys in homes.values()))
        for number, key, entry in sent:
            event, outcome = entry.event, entry.outcome
            if isinstance(event, ProgramEnd) and (outcome is None or outcome.outcome is not Outcome.REJECTED):
                if outcome is None:
                    address = self._replicas.get(core.last_engines(*key)[0])
                    if address is not None:
                        self._start(self._send_end(address, key, event.status, authorization))
                    outcome = _outcome(event, Outcome.DEFERRED, "its replica receives it later")
                self.end(key, event.status)
            outcomes[number] = outcome or _outcome(event, Outcome.MISSING, "its replica did not answer")
        return [outcome or EventOutcome(outcome=Outcome.MISSING) for outcome in outcomes]

    # -- events in requests ------------------------------------------------------------

    def may_attach(self, attached: AttachedEvents, tenant: str, replica_id: str) -> bool:
        """Whether a request may carry its events to a replica."""
        if len(attached.batch.events) > MAX_ATTACHED_EVENTS:
            return False  # the engine would reject the rest
        for event in attached.events:
            program_id = event.program_id
            home_id = self._routing_backend.core.home(tenant, program_id)
            # Events of a program without a home wait for a home. The program of an implicit hint gets none.
            is_here = (
                program_id == attached.program_id
                or home_id == replica_id
                or (home_id is None and program_id == attached.implicit_id)
            )
            # The gateway may have to add the graph.
            if not is_here or (isinstance(event, AegReport) and event.graph is None):
                return False
        return True

    def record_attached(self, attached: AttachedEvents, tenant: str, replica_id: str) -> None:
        """Record the events that an answered request carried to a replica."""
        for event in attached.events:
            key = (tenant, event.program_id)
            if event.program_id == attached.implicit_id:
                continue
            if not isinstance(event, ProgramEnd):
                is_new = key not in self.programs
                entry = self._record(key, event, attached.batch.emitter, attached.authorization)
                record = self.programs[key]
                call_id = event.call_id if isinstance(event, ToolStop) else None
                for one in list(record.unsent):
                    # A start that came after its stop would never end.
                    if one is entry or (call_id and getattr(one.event, "call_id", None) == call_id):
                        record.unsent.pop(one, None)
                address = self._replicas.get(replica_id)
                if is_new and address is not None:
                    record.place = self._instance(address)
            elif event.program_id != attached.program_id:
                self.end(key, event.status)
            elif self.programs.pop(key, None) is not None:  # the request itself has yet to run
                self._metrics.ended(event.status)

    # -- before a request, and after a move --------------------------------------------

    async def prepare(self, key: Key, decision: SendRequest, authorization: str | None) -> None:
        """Prepare a replica for a program's next request, and wait until the request may be sent."""
        replica_id = decision.home_id
        self._cancel_release(key, replica_id)  # the program may have returned
        if key in self.programs:
            self.programs[key].authorization = authorization
        # After two moves without a request in between, the program's KV is still at the first home.
        moved_from = next(iter(self.leaving.get(key, ())), decision.moved_from)
        try:
            sending = self.replay_before_request(key, replica_id)
            if moved_from is None or moved_from == replica_id:
                await sending
            else:
                await asyncio.gather(sending, self._move_kv(key, moved_from, decision, authorization))
        finally:
            for former in list(self.leaving.get(key, ())):
                self.release(key, former, authorization)

    async def replay_before_request(self, key: Key, replica_id: str) -> None:
        """Send a replica the events that it lacks. Wait up to ``REPLAY_WAIT_S`` for the answer."""
        record, address = self.programs.get(key), self._replicas.get(replica_id)
        if record is None or address is None or self._clock() < record.again_s:
            return
        place, described = self._instance(address), self._description_of(replica_id)
        if record.lacking(place) and (described is None or described.speaks_sojourn):
            await self.wait_for(self._deliver(key[0], address, [key]))
            if record.lacking(place):
                record.again_s = self._clock() + REPLAY_RETRY_S

    async def _move_kv(
        self, key: Key, moved_from: str, decision: SendRequest, authorization: str | None
    ) -> None:
        """Have KV written to the shared disk, if both engines use one, and record the move. The store of
        pairs has the KV already."""
        began_s, stored = time.monotonic(), bool(decision.prefill_id)
        if not stored:
            engines = [self._description_of(one) for one in (moved_from, decision.replica_id)]
            has_disk = all(one is not None and one.shares_disk for one in engines)
            stored = has_disk and await self._persist_kv(key, moved_from, authorization)
        kv = "shared" if stored else "recomputed"
        self._metrics.moved(key, moved_from, decision, kv, time.monotonic() - began_s)

    async def _persist_kv(self, key: Key, moved_from: str, authorization: str | None) -> bool:
        """Have a replica write a program's KV to the shared disk, and wait at most the time in which the new
        one would compute it. Return whether none is pending and half of the context is on the disk."""
        address, began_s = self._replicas.get(moved_from), time.monotonic()
        while address is not None:
            reply = await ask_engine(
                self._session(),
                f"{address.url}/sojourn/v1/programs/{quote(self.names.engine_name(*key), safe='')}/persist",
                method="POST",
                authorization=authorization,
                timeout_s=MOST_KV_WAIT_S,
            )
            try:
                stored = msgspec.convert(reply.document if reply is not None else None, PersistProgress)
            except msgspec.ValidationError:
                return False
            if not stored.context_tokens or not stored.pending_tokens:
                return 0 < stored.context_tokens <= stored.stored_tokens * 2
            worth_s = min(MOST_KV_WAIT_S, max(LEAST_KV_WAIT_S, stored.compute_s or 0.0))
            if time.monotonic() - began_s >= worth_s:
                return False
            await asyncio.sleep(STORE_POLL_S)
        return False

    def leave(self, key: Key, former: str) -> None:
        """Release a program's KV later. Until then it can be written to the shared disk."""
        self._cancel_release(key, former)
        self.leaving.setdefault(key, {})[former] = self._start(self._release_later(key, former))

    async def _release_later(self, key: Key, former: str) -> None:
        for delays in itertools.count(1):
            await asyncio.sleep(RELEASE_DELAY_S)
            # A program that lost its home with a replica may return to the replica that has its KV.
            is_homeless = self._routing_backend.core.home(*key) is None and delays < MAX_RELEASE_ATTEMPTS
            if not is_homeless and not self._routing_backend.is_waiting(*key):
                return self.release(key, former)

    def release(self, key: Key, former: str, authorization: str | None = None) -> None:
        """Have a former replica drop a program's KV, by a ``ProgramEnd``, unless the program is at home at
        its engine. ``authorization``: of the last request; ``None``: that of the last recorded event."""
        self._cancel_release(key, former)
        old, home = self._replicas.get(former), self._replicas.get(self._routing_backend.core.home(*key))
        if old is None or (home is not None and home.url == old.url):
            return
        record = self.programs.get(key)
        if record is not None:
            record.place = None if record.place == self._instance(old) else record.place
            authorization = record.authorization if authorization is None else authorization
        self._start(self._send_end(old, key, "cancelled", authorization))

    def _cancel_release(self, key: Key, former: str) -> None:
        timers = self.leaving.get(key, {})
        if former in timers:
            if (task := timers.pop(former)) is not asyncio.current_task():
                task.cancel()
            if not timers:
                del self.leaving[key]

    # -- what is kept ------------------------------------------------------------------

    def _record(self, key: Key, event: AnyEvent, emitter: str, authorization: str | None) -> _Entry:
        """Record an event as one that no engine has answered."""
        if isinstance(event, AegReport):
            event = self._without_graph(key[0], event)
        elif isinstance(event, ToolStop) and len(event.status) > MAX_EVENT_NAME_BYTES:
            event = msgspec.structs.replace(event, status="error")
        now = self._clock()
        entry = _Entry(event, emitter, now)
        record = self.programs.setdefault(key, _Program())
        self.programs.move_to_end(key)
        record.heard_s, record.authorization = now, authorization
        if isinstance(event, ToolStop):
            record.state.pop(event.call_id, None)
        elif not isinstance(event, (Heartbeat, ProgramEnd)):
            name = event.call_id if isinstance(event, ToolStart) else _STATE_NAMES[type(event)]
            if name in record.state or len(record.state) < MAX_RUNNING_TOOLS + len(_STATE_NAMES):
                record.state[name] = entry
        record.unsent[entry] = None
        if len(record.unsent) > MAX_UNSENT_OF_PROGRAM:
            del record.unsent[next(iter(record.unsent))]
        self._most_unsent += 1
        if self._most_unsent > MAX_UNSENT:
            self._most_unsent = sum(len(each.unsent) for each in self.programs.values())
            for each in self.programs.values():
                if self._most_unsent <= 0.9 * MAX_UNSENT:  # so that programs are rarely counted
                    break
                self._most_unsent -= len(each.unsent)
                each.unsent.clear()
                each.place = None
        silent_s = now - self._routing_backend.core.limits.silent_program_s
        while len(self.programs) > MAX_PROGRAMS or next(iter(self.programs.values())).heard_s < silent_s:
            self.programs.popitem(last=False)
        return entry

    def end(self, key: Key, status: str) -> bool:
        """Forget a program, and report its end to the routing core. Return whether it was known."""
        is_known = self.programs.pop(key, None) is not None
        is_known = is_known or any(self._routing_backend.core.last_engines(*key))
        if is_known:
            self._metrics.ended(status)  # not for a repeated event
        self._routing_backend.tell(ProgramEnded(key[1], key[0]))
        return is_known

    def _without_graph(self, tenant: str, event: AegReport) -> AegReport:
        """Store the graph of an event apart, where programs share it. Return the event without it."""
        key = (tenant, event.graph_hash)
        graph, size = self._graphs.pop(key, (None, 0))
        self._graph_bytes -= size
        if event.graph is not None:
            graph, size = event.graph, len(encode(event.graph))
        if graph is not None and size <= MAX_GRAPH_BYTES:  # engines reject longer ones
            self._graphs[key] = (graph, size)
            self._graph_bytes += size
            while self._graph_bytes > MAX_TOTAL_GRAPH_BYTES:
                self._graph_bytes -= self._graphs.popitem(last=False)[1][1]
        return msgspec.structs.replace(event, graph=None)

    def _instance(self, address: ReplicaAddress) -> EngineInstance:
        described = self._description_of(address.replica_id)
        return (address.url, described.registered.instance if described is not None else "")

    # -- to engines ----------------------------------------------------------------------

    async def _deliver(self, tenant: str, address: ReplicaAddress, keys: Collection[Key]) -> None:
        """Post to an engine all that it lacks of these programs. Drop what it rejects."""
        turn = self._turns.setdefault((address.url, tenant), _Turn())
        failures = turn.failures
        async with turn.lock:
            if turn.failures > failures:
                return  # the engine has not answered the POST before this one
            place = self._instance(address)
            records = [record for key in keys if (record := self.programs.get(key)) is not None]
            before = [record.place for record in records]
            lacking = [(record, one) for record in records for one in record.lacking(place)]
            for batch, authorization, told in self._batches(tenant, lacking):
                outcomes = await self._post(address.url, batch, authorization)
                for number, (record, entry) in enumerate(told):
                    event = entry.event
                    if outcomes is not None:
                        outcome = outcomes[number]
                        entry.outcome = msgspec.structs.replace(
                            outcome, program_id=event.program_id, seq=event.seq
                        )
                        if outcome.outcome is Outcome.REJECTED:
                            record.state = {k: one for k, one in record.state.items() if one is not entry}
                    if outcomes is not None or isinstance(event, (Heartbeat, ProgramEnd)):
                        record.unsent.pop(entry, None)
                if outcomes is None:
                    turn.failures += 1
                    return
            for record, earlier in zip(records, before, strict=True):
                if record.place == earlier:  # else the program has moved meanwhile
                    record.place = place

    def _batches(
        self, tenant: str, lacking: list[tuple[_Program, _Entry]]
    ) -> Iterator[tuple[EventBatch, str | None, list[tuple[_Program, _Entry]]]]:
        """Divide events into batches that an engine accepts. Yield (batch, authorization, its events). An
        event that is too long for any batch gets a batch of its own."""
        batch, authorization, size = EventBatch(v=WIRE_VERSION, emitter="", events=[]), None, 0
        told: list[tuple[_Program, _Entry]] = []
        for record, entry in lacking:
            # State that is sent again has numbers of the gateway.
            emitter = entry.emitter if entry in record.unsent else self._emitter
            shown = record.authorization
            raw = encode(self._current(tenant, entry, emitter))
            is_full = size + len(raw) >= _BATCH_BYTES or len(told) >= MAX_BATCH_EVENTS
            if is_full or (emitter, shown) != (batch.emitter, authorization):
                if told:
                    yield batch, authorization, told
                batch, told = EventBatch(v=WIRE_VERSION, emitter=emitter, events=[]), []
                authorization, size = shown, 0
            batch.events.append(msgspec.Raw(raw))
            told.append((record, entry))
            size += len(raw) + 1
        if told:
            yield batch, authorization, told

    def _current(self, tenant: str, entry: _Entry, emitter: str) -> AnyEvent:
        """Return an event with its present ``age_s``, its graph, the engines' names of programs, and, if the
        gateway is the emitter, the gateway's next number."""
        event = self.names.named(tenant, entry.event)
        event = msgspec.structs.replace(event, age_s=round(event.age_s + self._clock() - entry.at_s, 4))
        if emitter == self._emitter:
            event = msgspec.structs.replace(event, seq=self._seq)
            self._seq += 1
        if isinstance(event, AegReport):
            graph, _ = self._graphs.get((tenant, event.graph_hash), (None, 0))
            event = msgspec.structs.replace(event, graph=graph)
        return event

    async def _send_end(
        self, address: ReplicaAddress, key: Key, status: str, authorization: str | None
    ) -> None:
        end = ProgramEnd(program_id=key[1], seq=0, status=status[:MAX_EVENT_NAME_BYTES])
        told = [(_Program(authorization=authorization), _Entry(end, self._emitter, self._clock()))]
        for _ in range(END_ATTEMPTS):
            home = self._replicas.get(self._routing_backend.core.home(*key))
            if home is not None and home.url == address.url:
                return  # the program has come back
            turn = self._turns.setdefault((address.url, key[0]), _Turn())
            async with turn.lock:
                [(batch, *_)] = self._batches(key[0], told)
                if await self._post(address.url, batch, authorization) is not None:
                    return
            await asyncio.sleep(ANSWER_TIMEOUT_S)

    async def wait_for(self, doing: Coroutine[Any, Any, Any]) -> None:
        """Start ``doing``, and wait for its end at most ``REPLAY_WAIT_S``."""
        await asyncio.wait({self._start(doing)}, timeout=REPLAY_WAIT_S)

    def _start(self, doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(
        self, url: str, batch: EventBatch, authorization: str | None
    ) -> Sequence[EventOutcome] | None:
        """Return an engine's outcomes of the events; ``None``: there is no usable answer."""
        answer = await ask_engine(
            self._session(),
            url + EVENTS_PATH,
            method="POST",
            body=encode(batch),
            authorization=bearer(self._engine_key, authorization),
            headers={"Content-Type": "application/json"},
            timeout_s=ANSWER_TIMEOUT_S,
        )
        if answer is None or answer.status in _ANSWERS:
            return [_ANSWERS[answer.status]] * len(batch.events) if answer is not None else None
        with contextlib.suppress(WireError):
            outcomes = decode_outcomes(answer.body).outcomes if answer.status == 200 else []
            return outcomes if len(outcomes) == len(batch.events) else None
        return None


_STATE_NAMES: dict[type, str] = {ProgramStart: "start of the program", AegReport: "its graph"}
"""Names in ``_Program.state`` besides call ids, which have no spaces."""

_KEY_REFUSED = EventOutcome(outcome=Outcome.REJECTED, reason="the engine refuses this key")
_REJECTED = EventOutcome(outcome=Outcome.REJECTED, reason="the engine does not take the event")
_STOCK = EventOutcome(outcome=Outcome.MISSING, reason="its replica runs without sojourn")
_ANSWERS = {400: _REJECTED, 401: _KEY_REFUSED, 403: _KEY_REFUSED, 404: _STOCK, 413: _REJECTED}
"""The outcome of all events of a batch, by the status of the engine's answer."""


def _outcome(event: AnyEvent, outcome: Outcome, reason: str = "") -> EventOutcome:
    return EventOutcome(outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq)
