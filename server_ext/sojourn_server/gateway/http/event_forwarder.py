"""Forwards clients' events to their program's home, the replica that serves the program's turns.

An engine knows a program only from the events that it has received. So the gateway keeps each program's
start, workflow graph and running tools. A replica may lack these events, for example a new home or a
restarted replica. Then the gateway sends them before the program's next request. Events that arrive before a
program's first request are kept until that request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from sojourn.wire_codec import (
    EVENTS_PATH,
    MAX_EVENT_NAME_BYTES,
    EventBatch,
    EventOutcome,
    Outcome,
    WireError,
    decode_event,
    decode_outcomes,
    encode,
)
from sojourn.wire_events import AegReport, AnyEvent, ProgramEnd, ProgramStart, ToolStart, ToolStop

from ...programs.program_status import ProgramOutcome
from ...routing import routing_events
from ...routing.bounded_program_table import Key
from ...routing.routing_limits import SILENT_PROGRAM_S
from .engine_client import ask_engine, bearer
from .engine_descriptions import EngineDescription
from .ordered_sender import ANSWER_TIMEOUT_S, OrderedSender, post_all
from .program_event_records import ProgramEventRecords, RecordedEvent, ReplicaInstance, update_known_graphs
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddresses
from .routing_backend import RoutingBackend
from .tenant_event_queue import EngineSilentError, EventsRefusedError, TenantEventQueue

logger = logging.getLogger(__name__)

REPLAY_WAIT_S = 1.0
"""Maximum seconds that a request waits until its replica has received the program's events."""
REPLAY_RETRY_S = 5.0
"""Seconds before a program's events are sent again to an engine that did not accept them."""
MAX_GRAPHS_SENT = 1024
"""Maximum number of graphs that the gateway remembers as sent, for each engine."""

_EngineTenant = tuple[str, str]
"""(URL of an engine, tenant)."""


class EventForwarder:
    """Forwards clients' events to engines. If an engine does not answer, events may be lost, but no request
    fails.

    In all methods, ``key`` is (tenant, program id), and ``authorization`` is the client's ``Authorization``
    header.
    """

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        *,
        names: ProgramIdMapper | None = None,
        engine_key: str | None = None,
        silent_program_s: float = SILENT_PROGRAM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``names``: maps clients' program ids to the names that engines use for programs; ``None``: engines
        use the clients' ids. ``engine_key``: key sent to engines instead of the client's; ``None``: the
        client's key is sent. ``silent_program_s``: seconds without an event after which a program's events
        are dropped."""
        self.names = names or ProgramIdMapper(())
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._session = session
        self._engine_key = engine_key
        self._clock = clock
        self.description_of: Callable[[str], EngineDescription | None] = lambda replica_id: None
        """Function that returns the last description of a replica's engine. ``ProgramMigrator`` sets it."""
        self.known = ProgramEventRecords(silent_s=silent_program_s)
        self._graphs_sent: dict[str, tuple[str, set[str]]] = {}
        """By engine URL: (instance of the engine, hashes of the graphs that this instance received in
        full)."""
        self.on_end: Callable[[str], None] = lambda status: None
        """Function that is called with the status of each program whose end a client reports."""
        self._emitter = f"gateway-{secrets.token_hex(6)}"
        self._seq = 0
        self._senders: dict[_EngineTenant, OrderedSender] = {}
        self._queues: dict[_EngineTenant, TenantEventQueue] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- events from clients -----------------------------------------------------------

    async def forward_batch(
        self, batch: EventBatch, tenant: str, authorization: str | None
    ) -> list[EventOutcome]:
        """Record the events of a client's batch, and forward each to its program's home. Return one outcome
        per event, in order.

        If a program has no home, its ``ProgramEnd`` goes to the engine that gave its last answer. Its other
        events are not sent yet.
        """
        outcomes: list[EventOutcome | None] = [None] * len(batch.events)
        onwards: dict[str, _EngineBatch] = {}
        over: list[tuple[int, ProgramEnd]] = []
        for place, sent in enumerate(batch.events):
            try:
                event = decode_event(sent)
                raw = msgspec.Raw(encode(event))  # only parsed fields go to an engine
            except WireError as error:
                outcomes[place] = EventOutcome(outcome=Outcome.REJECTED, reason=str(error))
                continue
            key = (tenant, event.program_id)
            home = self._replicas.get(self._routing_backend.home(*key))
            kept = None
            if isinstance(event, ProgramEnd):
                over.append((place, event))
                if home is None:  # prefill and decode engines are no homes, and no request carries the end
                    home = self._replicas.get(self._routing_backend.answered_by(*key))
                if home is None and self.known.forget(key):
                    self.on_end(event.status)
                    outcomes[place] = _outcome(event, Outcome.APPLIED)
                    continue
            elif home is not None:
                self.catch_up(key, home.replica_id)
                kept = self._record_event(key, event, authorization, home.replica_id)
            else:
                self._record_event(key, event, authorization, None)
            if home is not None:
                to = onwards.setdefault(
                    home.url, _EngineBatch(self._graphs_sent_to(home.url, home.replica_id))
                )
                to.events.append((place, event, self._with_full_graph(tenant, event, raw, to), kept))
            elif isinstance(event, (ProgramStart, AegReport, ToolStart, ToolStop)):
                outcomes[place] = _outcome(event, Outcome.DEFERRED, "it has no replica yet")
            else:
                outcomes[place] = _outcome(event, Outcome.MISSING, "unknown program")
        await asyncio.gather(
            *(self._pass_on(url, batch, tenant, to, outcomes, authorization) for url, to in onwards.items())
        )
        for place, event in over:
            outcome = outcomes[place]
            # If the engine rejected the end, the program goes on here too.
            if outcome is None or outcome.outcome is not Outcome.REJECTED:
                self._end((tenant, event.program_id), event.status)
        return [outcome or EventOutcome(outcome=Outcome.MISSING) for outcome in outcomes]

    # -- events in requests ------------------------------------------------------------

    def home(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the replica that is a program's home; ``None``: the program has no home."""
        return self._routing_backend.home(tenant, program_id)

    def piggyback(
        self, tenant: str, event: AnyEvent, authorization: str | None, *, own: bool
    ) -> RecordedEvent | None:
        """Record an event that a request carries to its replica. Return the record; ``None`` for heartbeats
        and program ends, which are not recorded.

        ``own``: whether the event is about the request's own program. A ``ProgramEnd`` of another program
        also ends that program at the routing core. A ``ProgramEnd`` of the own program only drops the
        program's record, because the request has yet to run.
        """
        key = (tenant, event.program_id)
        if not isinstance(event, ProgramEnd):
            return self._record_event(
                key, event, authorization, None if own else self._routing_backend.home(*key), piggyback=True
            )
        if own:
            if self.known.forget(key):
                self.on_end(event.status)
        else:
            self._end(key, event.status)
        return None

    def forward(self, batch: EventBatch, tenant: str, authorization: str | None) -> None:
        """Start to forward events that were removed from a request. For example, their programs have another
        home than the request's replica. Does not wait for the outcomes."""
        task = asyncio.ensure_future(self.forward_batch(batch, tenant, authorization))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- events of the gateway ---------------------------------------------------------

    async def replay_before_request(
        self, key: Key, replica_id: str, carried: Container[RecordedEvent] = ()
    ) -> None:
        """Send a replica the events of a program that it has not received yet. Wait up to ``REPLAY_WAIT_S``
        for the answer. Call this before a request of the program goes to the replica.

        ``carried``: events that the request itself carries. They are not sent separately.
        """
        sending = self.catch_up(key, replica_id, carried)
        if sending is not None:
            await asyncio.wait({sending}, timeout=REPLAY_WAIT_S)

    def catch_up(
        self, key: Key, replica_id: str, carried: Container[RecordedEvent] = ()
    ) -> asyncio.Future[list[EventOutcome]] | None:
        """Start to send a replica the events of a program that it lacks: start, graph and tool events.

        Return a future of their outcomes. The outcomes are empty if the replica did not accept the events.
        Return ``None`` if no events are being sent.

        ``carried``: events that a request carries to the replica. They are not sent separately.
        """
        record = self.known.get(key)
        address = self._replicas.get(replica_id)
        if record is None or address is None:
            return None
        place = self._replica_instance(replica_id)
        if record.sending is not None and record.sending[0] == place and not record.sending[1].done():
            return record.sending[1]
        known_graphs = self._graphs_sent_to(address.url, replica_id)
        graph = record.graph
        lacks_graph = (
            graph is not None
            and graph in carried
            and not graph.in_full
            and self._needs_full_graph(known_graphs, key, graph)
        )
        if record.place == place and not lacks_graph:
            return None
        described = self.description_of(replica_id)
        kept = record.events_to_send(carried) if record.place != place else []
        if lacks_graph and graph is not None:
            kept.append(graph)
        if not kept or (described is not None and not described.speaks_sojourn):
            record.place = place
            record.undelivered = []
            return None
        if self._clock() < record.again_s:
            return None
        answered = self._sender_for(address.url, key[0]).send(
            [self._aged(key[0], one) for one in kept], record.authorization
        )
        record.sending = (place, answered)
        missed = record.missed

        def on_answer(answer: asyncio.Future[list[EventOutcome]]) -> None:
            if answer.cancelled() or not answer.result():
                record.again_s = self._clock() + REPLAY_RETRY_S
                return
            record.undelivered = [one for one in record.undelivered if one not in kept]
            for one, outcome in zip(kept, answer.result(), strict=True):
                update_known_graphs(known_graphs, one.event, outcome.outcome)
            if record.missed == missed:
                record.place = place

        answered.add_done_callback(on_answer)
        return answered

    def release(self, left: routing_events.ReleaseProgramKv, authorization: str | None = None) -> None:
        """Send a program's former replica a ``ProgramEnd``, so that the replica releases the program's KV.

        ``authorization``: header of the program's last request; ``None``: use the header of its last recorded
        event.
        """
        record = self.known.get((left.tenant, left.program_id))
        if record is not None:
            authorization = record.authorization if authorization is None else authorization
            if record.place is not None and record.place[0] == left.replica_id:
                record.mark_unsent()
        address = self._replicas.get(left.replica_id)
        if address is not None:
            self._send_end(address.url, left.tenant, left.program_id, "cancelled", authorization)

    def forget(self, key: Key) -> None:
        """Drop the record of a program whose final request was answered. Report the end to ``on_end``."""
        self.known.forget(key)
        self.on_end(ProgramOutcome.FINAL.value)

    # -- internals -----------------------------------------------------------------------

    def _send_end(
        self, url: str, tenant: str, program_id: str, status: str, authorization: str | None
    ) -> None:
        """Queue a ``ProgramEnd`` for an engine. A status that is too long becomes ``error``."""
        status = status if len(status) <= MAX_EVENT_NAME_BYTES else "error"
        event = {"type": "program_end", "program_id": program_id, "status": status}
        self._sender_for(url, tenant).send([self._numbered(tenant, event)], authorization)

    def _end(self, key: Key, status: str) -> None:
        """Drop a program's record, and report the program's end to the routing core."""
        backend = self._routing_backend
        if self.known.forget(key) or backend.home(*key) is not None or backend.answered_by(*key) is not None:
            self.on_end(status)  # not for a repeated event
        self._routing_backend.tell(routing_events.ProgramEnded(key[1], key[0]))

    def _record_event(
        self,
        key: Key,
        event: AnyEvent,
        authorization: str | None,
        home: str | None,
        *,
        piggyback: bool = False,
    ) -> RecordedEvent | None:
        """Record an event. Return the record; ``None`` for heartbeats and program ends, which are not
        recorded.

        ``piggyback``: a request carries the event. ``home``: id of the replica that receives the event now;
        ``None``: no replica does yet.
        """
        is_new = self.known.get(key) is None
        shown = authorization if self._engine_key is None else None
        kept = self.known.record_event(
            key, event, shown, self._clock(), delivered=piggyback or home is not None
        )
        record = self.known.get(key)
        if is_new and record is not None and home is not None:
            record.place = self._replica_instance(home)
        return kept

    def _replica_instance(self, replica_id: str) -> ReplicaInstance:
        """Return (replica id, instance). The instance is empty if unknown."""
        described = self.description_of(replica_id)
        return (replica_id, described.instance if described is not None else "")

    def _needs_full_graph(self, known_graphs: set[str], key: Key, kept: RecordedEvent) -> bool:
        """Whether the recorded event ``kept`` names a graph that the gateway has and an engine lacks. Then
        the event must be sent with the full graph. ``known_graphs``: hashes of the graphs that the engine
        received in full."""
        event = kept.event
        return (
            isinstance(event, AegReport)
            and event.graph_hash not in known_graphs
            and self.known.graph(key[0], event.graph_hash) is not None
        )

    def _graphs_sent_to(self, url: str, replica_id: str) -> set[str]:
        """Return the hashes of the graphs that an engine received in full. The caller may add to this set.

        The set starts empty again after a restart of the engine, and after ``MAX_GRAPHS_SENT`` graphs.
        """
        instance = self._replica_instance(replica_id)[1]
        life, hashes = self._graphs_sent.get(url, ("", set()))
        if url not in self._graphs_sent or life != instance or len(hashes) >= MAX_GRAPHS_SENT:
            hashes = set()
            self._graphs_sent[url] = (instance, hashes)
        return hashes

    def _with_full_graph(
        self, tenant: str, event: AnyEvent, raw: msgspec.Raw, to: _EngineBatch
    ) -> msgspec.Raw:
        """Return the encoded event to send to the engine of ``to``. Clients send a full graph once, and then
        only its hash. So this adds the full graph if the gateway has it and the engine lacks it. ``raw``: the
        encoded ``event``."""
        if not isinstance(event, AegReport):
            return raw
        if (
            event.graph_hash in to.known_graphs
            or event.graph_hash in to.full_graphs
            or event.graph is not None
        ):
            to.full_graphs.add(event.graph_hash)
            return raw
        graph = self.known.graph(tenant, event.graph_hash)
        if graph is None:
            return raw
        to.full_graphs.add(event.graph_hash)
        return msgspec.Raw(encode({**msgspec.to_builtins(event), "graph": graph}))

    def _aged(self, tenant: str, kept: RecordedEvent) -> msgspec.Raw:
        """Encode a recorded event, to send it again. It gets its present ``age_s``, and its full graph if
        known."""
        event: dict[str, Any] = msgspec.to_builtins(kept.event)
        event["age_s"] = round(event.get("age_s", 0.0) + self._clock() - kept.at_s, 4)
        if isinstance(kept.event, AegReport):
            graph = self.known.graph(tenant, kept.event.graph_hash)
            return self._numbered(tenant, event if graph is None else {**event, "graph": graph})
        return self._numbered(tenant, event)

    def _numbered(self, tenant: str, event: dict[str, Any]) -> msgspec.Raw:
        """Encode an event with the gateway's next ``seq``. Its program ids become the engines' names."""
        # The gateway is the emitter. Engines drop an event whose number they have seen from the same emitter.
        self._seq += 1
        return self._renamed(tenant, msgspec.Raw(encode({**event, "seq": self._seq - 1})))

    def _renamed(self, tenant: str, raw: msgspec.Raw) -> msgspec.Raw:
        """Return an encoded event with its program ids replaced by the engines' names. ``raw``: a valid
        encoded event."""
        named = self.names.event(tenant, raw)
        assert named is not None, "it was read before"
        return named

    def _sender_for(self, url: str, tenant: str) -> OrderedSender:
        """Find or create the sender for an engine and a tenant. Creating one drops all idle senders."""
        sender = self._senders.get((url, tenant))
        if sender is None:
            self._senders = {known: one for known, one in self._senders.items() if not one.idle}
            sender = OrderedSender(url, self._emitter, self._post, self._clock)
            self._senders[(url, tenant)] = sender
        return sender

    def _queue_for(self, url: str, tenant: str) -> TenantEventQueue | None:
        """Find or create the queue of a tenant's batches for an engine. Creating one drops all idle queues.
        ``None``: the gateway has only one tenant, so batches do not wait."""
        if self.names.only_tenant is not None:
            return None
        queue = self._queues.get((url, tenant))
        if queue is None:
            self._queues = {known: one for known, one in self._queues.items() if not one.idle}
            queue = self._queues[(url, tenant)] = TenantEventQueue()
        return queue

    async def _pass_on(
        self,
        url: str,
        batch: EventBatch,
        tenant: str,
        to: _EngineBatch,
        outcomes: list[EventOutcome | None],
        authorization: str | None,
    ) -> None:
        """Post the part ``to`` of a client's batch to one engine. Store the outcomes of its events in
        ``outcomes``.

        The part waits for the gateway's own earlier events of this tenant for this engine, and then for the
        tenant's turn. If the client disconnects meanwhile, its events keep their place, and are still
        recorded and sent once.
        """
        unanswered, is_sent = (Outcome.MISSING, "its replica did not answer"), True
        answered: list[EventOutcome | None] = [None] * len(to.events)
        events = [self._renamed(tenant, raw) for _, _, raw, _ in to.events]
        onwards = EventBatch(v=batch.v, emitter=batch.emitter, events=events, dropped=batch.dropped)
        sender = self._senders.get((url, tenant))
        if sender is not None:
            await sender.wait_until_sent()  # earlier events of these programs arrive first
        queue = self._queue_for(url, tenant)
        post = post_all if queue is None else queue.post_all
        try:
            answered = await post(self._post, url, onwards, authorization)
        except EngineSilentError:
            is_sent = False
        except EventsRefusedError as refused:
            unanswered, is_sent = (Outcome.REJECTED, str(refused)), False
        lost: list[tuple[Key, RecordedEvent | None]] = []
        for (place, event, _, kept), outcome in zip(to.events, answered, strict=True):
            if outcome is None:
                outcomes[place] = _outcome(event, *unanswered)
                lost.append(((tenant, event.program_id), kept))
                if isinstance(event, ProgramEnd) and not is_sent:
                    self._send_end(url, tenant, event.program_id, event.status, authorization)
                    outcomes[place] = _outcome(event, Outcome.DEFERRED, "its replica receives it later")
                continue
            if outcome.program_id != event.program_id:  # the engine's name for the program, or none
                outcome = msgspec.structs.replace(outcome, program_id=event.program_id, seq=event.seq)
            outcomes[place] = outcome
            if isinstance(event, AegReport) and event.graph_hash in to.full_graphs:
                update_known_graphs(to.known_graphs, event, outcome.outcome)
        for key, kept in reversed(lost):
            self.known.record_lost(key, kept, is_sent=is_sent)

    async def _post(
        self, url: str, batch: EventBatch, authorization: str | None
    ) -> Sequence[EventOutcome] | None:
        """Post a batch to an engine. Return one outcome per event; ``None``: there is no usable answer."""
        answer = await ask_engine(
            self._session(),
            url + EVENTS_PATH,
            method="POST",
            body=encode(batch),
            authorization=bearer(self._engine_key, authorization),
            headers={"Content-Type": "application/json"},
            timeout_s=ANSWER_TIMEOUT_S,
        )
        if answer is not None and answer.status in (401, 403):
            refused = EventOutcome(outcome=Outcome.REJECTED, reason="the engine refuses this key")
            return [refused] * len(batch.events)
        if answer is None or answer.status != 200:
            return None
        try:
            return decode_outcomes(answer.body).outcomes
        except (WireError, ValueError) as error:
            logger.debug("events for %s are lost: %s", url, error)
            return None


@dataclass(slots=True)
class _EngineBatch:
    """The events of one client batch that go to one engine."""

    known_graphs: set[str]
    """Hashes of the graphs that the engine received in full."""
    full_graphs: set[str] = field(default_factory=set)
    """Hashes of the graphs that this batch contains in full."""
    events: list[tuple[int, AnyEvent, msgspec.Raw, RecordedEvent | None]] = field(default_factory=list)
    """For each event: (position in the client's batch, event, encoded event, record of the event or
    ``None``)."""


def _outcome(event: AnyEvent, outcome: Outcome, reason: str = "") -> EventOutcome:
    return EventOutcome(outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq)
