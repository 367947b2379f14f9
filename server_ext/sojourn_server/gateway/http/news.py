"""What programs say of themselves: each event goes to the replica that its program is at home at.

Engines know a program by what they were told. So its beginning, its graph and the tools that run now are kept
here, and told to whichever replica its requests go to that has not heard them: another one, or another life
of the same; and what is told before its first request waits for that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import aiohttp
import msgspec
from sojourn.events import AegReport, AnyEvent, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn.wire import (
    EVENTS_PATH,
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
from .engine_names import EngineNames
from .known import Kept, Key, Known, Place
from .replicas import Replicas
from .riding import Riding
from .speaking import ANSWER_TIMEOUT_S, Speaker, post_all
from .watch import Description

logger = logging.getLogger(__name__)

REPLAY_WAIT_S = 1.0
"""A request waits so long for its replica to hear of its program."""
AGAIN_AFTER_S = 5.0
"""An engine that did not listen is not told of the same program again before."""
MOST_GRAPHS_TOLD = 1024
"""Hashes remembered of one engine."""


class ProgramNews:
    """Passes events on. Engines that do not answer cost events and nothing else."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        *,
        names: EngineNames | None = None,
        engine_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``names``: what engines call programs; ``None``: as clients do."""
        self.names = names or EngineNames(())
        self._decider = decider
        self._replicas = replicas
        self._session = session
        self._engine_key = engine_key
        self._clock = clock
        self.describes: Callable[[str], Description | None] = lambda replica_id: None
        """What the engine of a replica last told of itself; set by whoever looks after engines."""
        self.known = Known()
        self._graphs_told: dict[str, tuple[str, set[str]]] = {}
        """By address, the engine's life and hashes of the graphs that it has taken in full."""
        self._emitter = f"gateway-{secrets.token_hex(6)}"
        self._seq = 0
        self._speakers: dict[str, Speaker] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- what clients report ----------------------------------------------------------

    async def came(self, batch: EventBatch, tenant: str, authorization: str | None) -> list[EventOutcome]:
        """A batch from a client; one outcome for each event, in its order."""
        outcomes: list[EventOutcome | None] = [None] * len(batch.events)
        onwards: dict[str, _Onwards] = {}
        over: list[tuple[int, ProgramEnd]] = []
        for place, raw in enumerate(batch.events):
            try:
                event = decode_event(raw)
            except WireError as error:
                outcomes[place] = EventOutcome(outcome=Outcome.REJECTED, reason=str(error))
                continue
            key = (tenant, event.program_id)
            home = self._replicas.get(self._decider.home(*key))
            if isinstance(event, ProgramEnd):
                over.append((place, event))
                if home is None and self.known.forget(key):
                    outcomes[place] = _outcome(event, Outcome.APPLIED)
                    continue
            elif home is not None:
                self._catch_up(key, home.replica_id)
                self._note(key, event, authorization, home.replica_id)
            else:
                self._note(key, event, authorization, None)
            if home is not None:
                to = onwards.setdefault(home.url, _Onwards(self._graphs_told_to(home.url, home.replica_id)))
                to.add(place, event, self._spelt_out(tenant, event, raw, to))
            elif isinstance(event, (ProgramStart, AegReport, ToolStart, ToolStop)):
                outcomes[place] = _outcome(event, Outcome.DEFERRED, "it has no replica yet")
            else:
                outcomes[place] = _outcome(event, Outcome.MISSING, "unknown program")
        await asyncio.gather(
            *(self._pass_on(url, batch, tenant, to, outcomes, authorization) for url, to in onwards.items())
        )
        for place, event in over:
            outcome = outcomes[place]
            # Whom the engine does not know it would not have believed either.
            if outcome is None or outcome.outcome is not Outcome.REJECTED:
                self._end((tenant, event.program_id))
        return [outcome or EventOutcome(outcome=Outcome.MISSING) for outcome in outcomes]

    # -- what rides with requests ------------------------------------------------------

    def named(self, tenant: str, raw: msgspec.Raw) -> msgspec.Raw:
        """An event as engines get it."""
        return self.names.event(tenant, raw)

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        return self._decider.home(tenant, program_id)

    def rides(self, tenant: str, event: AnyEvent, authorization: str | None, *, own: bool) -> Kept | None:
        """An event goes with a request to its program's replica; what is kept of it.

        ``own``: of the request's own program, which is not over then, whatever it says.
        """
        key = (tenant, event.program_id)
        if not isinstance(event, ProgramEnd):
            return self._note(
                key, event, authorization, None if own else self._decider.home(*key), rides=True
            )
        if own:
            self.known.forget(key)
        else:
            self._end(key)
        return None

    def forward(self, batch: EventBatch, tenant: str, authorization: str | None) -> None:
        """Events that rode with a request which goes another way."""
        task = asyncio.ensure_future(self.came(batch, tenant, authorization))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what the gateway says itself ----------------------------------------------------

    async def before(self, key: Key, replica_id: str, riding: Riding | None = None) -> None:
        """A request of a program is about to go to a replica: that hears what it does not know, if it
        listens. ``riding``: what the request itself tells."""
        telling = self._catch_up(key, replica_id, riding.kept if riding is not None else ())
        if telling is not None:
            await asyncio.wait({telling}, timeout=REPLAY_WAIT_S)

    def settled(self, key: Key, replica_id: str) -> None:
        """A program has its first home: what it said before follows it."""
        self._catch_up(key, replica_id)

    def moved(self, key: Key, replica_id: str) -> None:
        """A program has another home: that hears who it is, what its graph is and which tools run."""
        self._catch_up(key, replica_id)

    def left(self, left: facts.Left, authorization: str | None = None) -> None:
        """A program's old replica need not keep anything for it. ``authorization``: its last request's."""
        event = {"type": "program_end", "program_id": left.program_id, "status": "cancelled"}
        told = self.known.get((left.tenant, left.program_id))
        if told is not None:
            authorization = told.authorization if authorization is None else authorization
            if told.place is not None and told.place[0] == left.replica_id:
                told.unheard()
        address = self._replicas.get(left.replica_id)
        if address is not None:
            self._speaker(address.url).say([self._numbered(left.tenant, event)], authorization)

    def forget(self, key: Key) -> None:
        """A program is over."""
        self.known.forget(key)

    # -- inside ----------------------------------------------------------------------

    def _end(self, key: Key) -> None:
        self.known.forget(key)
        self._decider.tell(facts.ProgramEnded(key[1], key[0]))

    def _note(
        self,
        key: Key,
        event: AnyEvent,
        authorization: str | None,
        home: str | None,
        *,
        rides: bool = False,
    ) -> Kept | None:
        """``home``: who hears of it now; ``None``: nobody, or, of what rides, not known yet."""
        is_new = self.known.get(key) is None
        shown = authorization if self._engine_key is None else None
        kept = self.known.note(key, event, shown, self._clock(), delivered=rides or home is not None)
        told = self.known.get(key)
        if is_new and told is not None and home is not None:
            told.place = self._place(home)
        return kept

    def _place(self, replica_id: str) -> Place:
        described = self.describes(replica_id)
        return (replica_id, described.instance if described is not None else "")

    def _catch_up(
        self, key: Key, replica_id: str, riding: Container[Kept] = ()
    ) -> asyncio.Future[bool] | None:
        """Tell a replica what it has not heard of a program; ``None``: there is nothing to wait for."""
        told = self.known.get(key)
        address = self._replicas.get(replica_id)
        if told is None or address is None:
            return None
        place = self._place(replica_id)
        if told.telling is not None and told.telling[0] == place and not told.telling[1].done():
            return told.telling[1]
        heard = self._graphs_told_to(address.url, replica_id)
        graph = told.graph
        lacks_graph = (
            graph is not None and graph in riding and not graph.in_full and not self._has(heard, key, graph)
        )
        if told.place == place and not lacks_graph:
            return None
        described = self.describes(replica_id)
        kept = told.to_tell(riding) if told.place != place else []
        if lacks_graph and graph is not None:
            kept.append(graph)
        if not kept or (described is not None and not described.speaks_sojourn):
            told.place = place
            told.undelivered = []
            return None
        if self._clock() < told.again_s:
            return None
        said = self._speaker(address.url).say([self._aged(key[0], one) for one in kept], told.authorization)
        told.telling = (place, said)
        missed = told.missed

        def heard_it(answer: asyncio.Future[bool]) -> None:
            if answer.cancelled() or not answer.result():
                told.again_s = self._clock() + AGAIN_AFTER_S
                return
            told.undelivered = [one for one in told.undelivered if one not in kept]
            heard.update(one.event.graph_hash for one in kept if isinstance(one.event, AegReport))
            if told.missed == missed:
                told.place = place

        said.add_done_callback(heard_it)
        return said

    def _has(self, heard: set[str], key: Key, kept: Kept) -> bool:
        """Whether an engine knows a graph, or cannot be told it."""
        event = kept.event
        return not isinstance(event, AegReport) or (
            event.graph_hash in heard or self.known.graph(key[0], event.graph_hash) is None
        )

    def _graphs_told_to(self, url: str, replica_id: str) -> set[str]:
        instance = self._place(replica_id)[1]
        life, told = self._graphs_told.get(url, ("", set()))
        if url not in self._graphs_told or life != instance or len(told) >= MOST_GRAPHS_TOLD:
            told = set()
            self._graphs_told[url] = (instance, told)
        return told

    def _spelt_out(self, tenant: str, event: AnyEvent, raw: msgspec.Raw, to: _Onwards) -> msgspec.Raw:
        """A client tells a graph in full once, and then by its hash; each engine has to be told once."""
        if not isinstance(event, AegReport):
            return raw
        if event.graph_hash in to.heard or event.graph_hash in to.spelt or event.graph is not None:
            to.spelt.add(event.graph_hash)
            return raw
        graph = self.known.graph(tenant, event.graph_hash)
        if graph is None:
            return raw
        to.spelt.add(event.graph_hash)
        return _with_graph(msgspec.to_builtins(event), graph)

    def _aged(self, tenant: str, kept: Kept) -> msgspec.Raw:
        """An event as it is said again: it is older by now, and its graph is spelt out."""
        event: dict[str, Any] = msgspec.to_builtins(kept.event)
        event["age_s"] = round(event.get("age_s", 0.0) + self._clock() - kept.at_s, 4)
        if isinstance(kept.event, AegReport):
            graph = self.known.graph(tenant, kept.event.graph_hash)
            return self._numbered(tenant, event if graph is None else {**event, "graph": graph})
        return self._numbered(tenant, event)

    def _numbered(self, tenant: str, event: dict[str, Any]) -> msgspec.Raw:
        # In the gateway's own name: a number that an engine has heard from an emitter is a double to it.
        self._seq += 1
        return self.named(tenant, msgspec.Raw(encode({**event, "seq": self._seq - 1})))

    def _speaker(self, url: str) -> Speaker:
        speaker = self._speakers.get(url)
        if speaker is None:
            self._speakers = {known: one for known, one in self._speakers.items() if not one.idle}
            speaker = self._speakers[url] = Speaker(url, self._emitter, self._post, self._clock)
        return speaker

    async def _pass_on(
        self,
        url: str,
        batch: EventBatch,
        tenant: str,
        to: _Onwards,
        outcomes: list[EventOutcome | None],
        authorization: str | None,
    ) -> None:
        speaker = self._speakers.get(url)
        if speaker is not None:
            await speaker.silence()  # what was said of these programs before is heard before
        events = [self.named(tenant, raw) for _, _, raw in to.events]
        onwards = EventBatch(v=batch.v, emitter=batch.emitter, events=events, dropped=batch.dropped)
        answered = await post_all(self._post, url, onwards, authorization)
        for (place, event, _), outcome in zip(to.events, answered, strict=True):
            if outcome is None:
                outcomes[place] = EventOutcome(outcome=Outcome.MISSING, reason="its replica did not answer")
                told = self.known.get((tenant, event.program_id))
                if told is not None and not isinstance(event, ToolStop):
                    told.unheard()
                continue
            if self.names.apart and outcome.program_id is not None:
                outcome = msgspec.structs.replace(outcome, program_id=event.program_id)
            outcomes[place] = outcome
            if isinstance(event, AegReport) and event.graph_hash in to.spelt:
                if outcome.outcome in (Outcome.APPLIED, Outcome.DUPLICATE):
                    to.heard.add(event.graph_hash)
                elif outcome.outcome is Outcome.MISSING:
                    to.heard.discard(event.graph_hash)  # it has forgotten it

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
                timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S),
            ) as answer:
                body = await answer.read()
                if answer.status in (401, 403):
                    refused = EventOutcome(outcome=Outcome.REJECTED, reason="the engine refuses this key")
                    return [refused] * len(batch.events)
                return decode_outcomes(body).outcomes if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, WireError, ValueError) as error:
            logger.debug("events for %s are lost: %s", url, error)
            return None


class _Onwards:
    """Events of one batch for one engine."""

    def __init__(self, heard: set[str]) -> None:
        self.heard = heard
        """Hashes of the graphs that it has taken in full."""
        self.spelt: set[str] = set()
        """Of those that it is told now."""
        self.events: list[tuple[int, AnyEvent, msgspec.Raw]] = []
        """Each with its place in the client's batch."""

    def add(self, place: int, event: AnyEvent, raw: msgspec.Raw) -> None:
        """One more."""
        self.events.append((place, event, raw))


def _with_graph(event: dict[str, Any], graph: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(encode({**event, "graph": graph}))


def _outcome(event: AnyEvent, outcome: Outcome, reason: str = "") -> EventOutcome:
    return EventOutcome(outcome=outcome, reason=reason, program_id=event.program_id, seq=event.seq)
