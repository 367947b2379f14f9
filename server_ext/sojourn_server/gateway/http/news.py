"""What programs say of themselves: each event goes to the replica that its program is at home at.

Engines know a program by what they were told. So its beginning, its graph and the tools that run now are kept
here, and told again where it moves to; and what is told before its first request waits for that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from sojourn.events import (
    AegGraph,
    AegReport,
    AnyEvent,
    Heartbeat,
    ProgramEnd,
    ProgramStart,
    ToolStart,
    ToolStop,
)
from sojourn.wire import (
    EVENTS_PATH,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    WireError,
    decode_event,
    decode_outcomes,
    encode,
)

from ..core import facts
from .decider import Decider
from .replicas import Replicas

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 5.0
MOST_PROGRAMS = 50_000
MOST_KEPT = 64
"""Events kept of a program that has no home yet."""
MOST_TOOLS = 64
MOST_GRAPHS = 256

Key = tuple[str, str]
"""Tenant and program id."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An event and when it came."""

    event: AnyEvent
    at_s: float


@dataclass(slots=True)
class _Told:
    """What is known of one program."""

    authorization: str | None
    start: _Kept | None = None
    graph: _Kept | None = None
    tools: dict[str, _Kept] = field(default_factory=dict)
    """Those that run."""
    undelivered: list[_Kept] = field(default_factory=list)
    """Events that came before its first request."""


class ProgramNews:
    """Passes events on. Engines that do not answer cost events and nothing else."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decider = decider
        self._replicas = replicas
        self._session = session
        self._engine_key = engine_key
        self._clock = clock
        self._programs: OrderedDict[Key, _Told] = OrderedDict()
        self._graphs: OrderedDict[Key, AegGraph] = OrderedDict()
        """By tenant and hash."""
        self._graphs_told: dict[str, set[str]] = {}
        """Hashes of the graphs that each engine has heard of in full, or was told of here."""
        self._emitter = f"gateway-{secrets.token_hex(6)}"
        self._seq = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def came(self, batch: EventBatch, tenant: str, authorization: str | None) -> list[EventOutcome]:
        """A batch from a client; one outcome for each event, in its order."""
        outcomes: list[EventOutcome | None] = [None] * len(batch.events)
        onwards: dict[str, list[tuple[int, msgspec.Raw]]] = {}
        over: list[ProgramEnd] = []
        for place, raw in enumerate(batch.events):
            try:
                event = decode_event(raw)
            except WireError as error:
                outcomes[place] = EventOutcome(outcome=Outcome.REJECTED, reason=str(error))
                continue
            key = (tenant, event.program_id)
            if self._decider.is_anothers(*key):
                outcomes[place] = _outcome(event, Outcome.MISSING, "unknown program")
                continue
            home = self._replicas.get(self._decider.home(*key))
            if isinstance(event, ProgramEnd):
                over.append(event)
                if home is None and self._programs.pop(key, None) is not None:
                    outcomes[place] = _outcome(event, Outcome.APPLIED)
                    continue
            else:
                self._note(key, event, authorization, delivered=home is not None)
            if home is not None:
                onwards.setdefault(home.url, []).append(
                    (place, self._spelt_out(tenant, event, raw, home.url))
                )
            elif isinstance(event, (ProgramStart, AegReport, ToolStart, ToolStop)):
                outcomes[place] = _outcome(event, Outcome.DEFERRED, "it has no replica yet")
            else:
                outcomes[place] = _outcome(event, Outcome.MISSING, "unknown program")
        await asyncio.gather(
            *(self._pass_on(url, batch, of, outcomes, authorization) for url, of in onwards.items())
        )
        for event in over:
            self._programs.pop((tenant, event.program_id), None)
            self._decider.tell(facts.ProgramEnded(event.program_id, tenant))
        return [outcome or EventOutcome(outcome=Outcome.MISSING) for outcome in outcomes]

    def rode(self, key: Key, events: Iterable[msgspec.Raw], authorization: str | None) -> None:
        """Events that go with a request to its replica."""
        for raw in events:
            try:
                event = decode_event(raw)
            except WireError:
                continue  # the engine says so
            if isinstance(event, ProgramEnd):
                self._programs.pop(key, None)
            elif event.program_id == key[1]:
                self._note(key, event, authorization, delivered=True)

    def settled(self, key: Key, replica_id: str) -> None:
        """A program has its first home, or a request of it goes there: what it said before follows it."""
        told = self._programs.get(key)
        if told is not None and told.undelivered:
            kept, told.undelivered = told.undelivered, []
            self._say_soon(replica_id, told.authorization, [self._aged(key[0], one) for one in kept])

    def moved(self, key: Key, replica_id: str) -> None:
        """A program has another home: that hears who it is, what its graph is and which tools run."""
        told = self._programs.get(key)
        if told is None:
            return
        kept = [one for one in (told.start, told.graph, *told.tools.values()) if one is not None]
        told.undelivered = []
        if kept:
            self._say_soon(replica_id, told.authorization, [self._aged(key[0], one) for one in kept])

    def left(self, left: facts.Left) -> None:
        """A program's old replica need not keep anything for it."""
        event = {"type": "program_end", "program_id": left.program_id, "status": "cancelled"}
        told = self._programs.get((left.tenant, left.program_id))
        self._say_soon(left.replica_id, told.authorization if told is not None else None, [event])

    def forget(self, key: Key) -> None:
        """A program is over."""
        self._programs.pop(key, None)

    def _note(self, key: Key, event: AnyEvent, authorization: str | None, *, delivered: bool) -> None:
        told = self._programs.get(key)
        if told is None:
            if isinstance(event, Heartbeat):
                return
            told = self._programs[key] = _Told(authorization)
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
            told.authorization = authorization
        kept = _Kept(event, self._clock())
        if isinstance(event, ProgramStart):
            told.start = kept
        elif isinstance(event, AegReport):
            told.graph = kept
            if event.graph is not None:
                self._graphs[(key[0], event.graph_hash)] = event.graph
                if len(self._graphs) > MOST_GRAPHS:
                    self._graphs.popitem(last=False)
        elif isinstance(event, ToolStart) and len(told.tools) < MOST_TOOLS:
            told.tools[event.call_id] = kept
        elif isinstance(event, ToolStop):
            told.tools.pop(event.call_id, None)
        if not delivered and not isinstance(event, Heartbeat):
            told.undelivered = [*told.undelivered[-MOST_KEPT + 1 :], kept]

    def _spelt_out(self, tenant: str, event: AnyEvent, raw: msgspec.Raw, url: str) -> msgspec.Raw:
        """A client tells a graph in full once, and then by its hash; each engine has to be told once."""
        if not isinstance(event, AegReport):
            return raw
        told = self._graphs_told.setdefault(url, set())
        graph = self._graphs.get((tenant, event.graph_hash))
        if event.graph_hash in told or graph is None:
            return raw
        if len(told) >= MOST_GRAPHS:
            told.clear()
        told.add(event.graph_hash)
        return (
            raw
            if event.graph is not None
            else msgspec.Raw(encode(msgspec.structs.replace(event, graph=graph)))
        )

    def _aged(self, tenant: str, kept: _Kept) -> dict[str, Any]:
        """An event as it is said again: it is older by now, and its graph is spelt out."""
        said = kept.event
        if isinstance(said, AegReport) and said.graph is None:
            said = msgspec.structs.replace(said, graph=self._graphs.get((tenant, said.graph_hash)))
        event: dict[str, Any] = msgspec.to_builtins(said)
        event["age_s"] = round(event.get("age_s", 0.0) + self._clock() - kept.at_s, 4)
        return event

    def _say_soon(self, replica_id: str, authorization: str | None, events: Iterable[dict[str, Any]]) -> None:
        numbered = []
        for event in events:
            # In the gateway's own name: a number that an engine has heard from an emitter is a double to it.
            numbered.append(msgspec.Raw(encode({**event, "seq": self._seq})))
            self._seq += 1
        address = self._replicas.get(replica_id)
        if address is None:
            return
        batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=numbered)
        task = asyncio.ensure_future(self._post(address.url, batch, authorization))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        url: str,
        batch: EventBatch,
        events: Sequence[tuple[int, msgspec.Raw]],
        outcomes: list[EventOutcome | None],
        authorization: str | None,
    ) -> None:
        part = EventBatch(
            v=batch.v, emitter=batch.emitter, events=[raw for _, raw in events], dropped=batch.dropped
        )
        answered = await self._post(url, part, authorization)
        if answered is None or len(answered) != len(events):
            missing = EventOutcome(outcome=Outcome.MISSING, reason="its replica did not answer")
            answered = [missing] * len(events)
        for (place, _), outcome in zip(events, answered, strict=True):
            outcomes[place] = outcome

    async def _post(
        self, url: str, batch: EventBatch, authorization: str | None
    ) -> Sequence[EventOutcome] | None:
        headers = {"Content-Type": "application/json"}
        shown = f"Bearer {self._engine_key}" if self._engine_key is not None else authorization
        if shown is not None:
            headers["Authorization"] = shown
        try:
            async with self._session().post(
                url + EVENTS_PATH,
                data=encode(batch),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=ENGINE_TIMEOUT_S),
            ) as answer:
                body = await answer.read()
                return decode_outcomes(body).outcomes if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, WireError) as error:
            logger.debug("events for %s are lost: %s", url, error)
            return None


def _outcome(event: AnyEvent, outcome: Outcome, reason: str = "") -> EventOutcome:
    return EventOutcome(outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq)
