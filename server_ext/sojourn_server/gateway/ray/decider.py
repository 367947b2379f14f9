"""Decides with a coordinator elsewhere: turns whose home is known go there at once, of others it is asked.

While the coordinator is away nothing breaks: known homes go on; new programs wait a moment for it, and then
go to the replica that this gateway has sent the least to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..core import facts
from ..core.journal import Home
from ..core.programs import Key
from ..http.decider import ProgramPlace, ReplicaState, Told
from ..http.replicas import Address, Replicas
from ..http.ticket import Ticket
from ..http.watch import Description
from .calls import CoordinatorAway, CoordinatorCalls
from .homes import HomesCopy
from .messages import Answer, Join, Listen, Place, ProbeAnswer, Status, Tell

logger = logging.getLogger(__name__)

BATCH_S = 0.015
"""What nobody waits for is told together, so often."""
FALLBACK_S = 3.0
"""A request that the coordinator says nothing of, and it is away for so long, is decided here."""
MOST_WAIT_AWAY_S = 60.0
"""And refused where no replica is known for so long."""
MOST_FAILURES = 3
INHERIT_S = 10.0
"""A replica that an earlier coordinator knew stays known for so long, until the later one has heard of it."""
MOST_KEPT = 10_000
"""Facts that are no request's, kept for a coordinator that is away."""
CALL_TIMEOUT_S = 10.0
LISTEN_TIMEOUT_S = 20.0
RETRY_S = 0.2
SWEEP_S = 0.25

_OF_NO_REQUEST = (facts.ProgramEnded, facts.KvDropped, facts.ReplicaDrains, facts.ReplicaStays)
_URGENT = (facts.Asked, facts.Failed, facts.ReplicaDrains, facts.ReplicaStays)


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

    asked: facts.Asked
    ticket: Ticket
    since_s: float
    sent_to: str | None = None
    began: bool = False
    placed_here: bool = False
    """While the coordinator was away: what it says of where to is about what it did not know."""
    refused: bool = False
    """Here: nothing more is to be decided."""
    failed_at: list[str] = field(default_factory=list)


class RayDecider:
    """One gateway's. Used in one event loop; ``run`` has to run in it."""

    def __init__(
        self,
        calls: CoordinatorCalls,
        replicas: Replicas,
        *,
        clock: Callable[[], float] = time.monotonic,
        fallback_s: float = FALLBACK_S,
    ) -> None:
        """``replicas`` is filled with what the coordinator knows."""
        self.gateway_id = secrets.token_hex(8)
        self.on_told: Callable[[Told], None] = lambda told: None
        self.on_decided: Callable[[facts.AnyAction], None] = lambda action: None
        self.on_home: Callable[[Key, Home | None, Home], None] = lambda key, before, home: None
        """A program that this gateway has not sent anywhere itself has a new home."""
        self.epoch = 0
        """The latest coordinator that was heard of."""
        self.joined = False
        self.homes = HomesCopy()
        self._calls = calls
        self._replicas = replicas
        self._clock = clock
        self._fallback_s = fallback_s
        self._places: dict[str, Place] = {}
        self._places_version = -1
        self._inherited: dict[str, Place] = {}
        self._joined_s = clock()
        self._open: dict[str, _Open] = {}
        self._of_program: dict[str, dict[str, int]] = {}
        """Open requests by program id and tenant."""
        self._outbox: list[facts.AnyFact] = []
        self._probes: list[ProbeAnswer] = []
        self._heard_mail = 0
        self._number = 0
        self._joins = 0
        """Answers to what was said before the latest are of no more use."""
        self._away_since_s: float | None = clock()
        self._flush_later: asyncio.TimerHandle | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[None] | None = None
        self._uses: dict[str, float] = {}

    # -- the gateway asks ---------------------------------------------------------

    def open(self, asked: facts.Asked) -> Ticket:
        """Ask for a request."""
        ticket = Ticket(asked.request_id)
        one = self._open[asked.request_id] = _Open(asked, ticket, self._clock())
        if asked.program_id is not None:
            tenants = self._of_program.setdefault(asked.program_id, {})
            tenants[asked.tenant] = tenants.get(asked.tenant, 0) + 1
        home = self._sure_home(asked)
        if home is not None:
            one.sent_to = home
            ticket.take(facts.Send(asked.request_id, home, "home"))
        self._say(_as_it_is(one))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Nobody looks at the ticket any more."""
        one = self._open.pop(ticket.request_id, None)
        if one is None or one.asked.program_id is None:
            return
        tenants = self._of_program[one.asked.program_id]
        tenants[one.asked.tenant] -= 1
        if not tenants[one.asked.tenant]:
            del tenants[one.asked.tenant]
        if not tenants:
            del self._of_program[one.asked.program_id]

    def tell(self, fact: facts.AnyFact) -> None:
        """Something happened."""
        if isinstance(fact, facts.Began):
            one = self._open.get(fact.request_id)
            if one is not None:
                one.began, one.sent_to = True, fact.replica_id
        elif isinstance(fact, facts.Failed):
            self._failed(fact)
        elif isinstance(fact, facts.ProgramEnded):
            self.homes.put((fact.tenant, fact.program_id), None)
        self._say(fact)

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        home = self.homes.get(tenant, program_id)
        return home[0] if home is not None else None

    def is_anothers(self, tenant: str, program_id: str) -> bool:
        """A program of this id lives and is another tenant's."""
        return self.homes.is_anothers(tenant, program_id) or bool(
            self._of_program.get(program_id, {}).keys() - {tenant}
        )

    async def programs(self) -> Sequence[ProgramPlace]:
        """All that are alive; none while the coordinator is away."""
        await self._all_said()
        try:
            return (await asyncio.wait_for(self._calls.state(), CALL_TIMEOUT_S)).programs
        except (CoordinatorAway, asyncio.TimeoutError):
            return ()

    async def replicas(self) -> Sequence[ReplicaState]:
        """All that are known; while the coordinator is away, with the requests of this gateway only."""
        await self._all_said()
        try:
            state = await asyncio.wait_for(self._calls.state(), CALL_TIMEOUT_S)
        except (CoordinatorAway, asyncio.TimeoutError):
            return [self._as_known_here(place) for place in self._places.values()]
        self._uses = state.uses
        return state.replicas

    def uses(self) -> dict[str, float]:
        """By tenant, as the coordinator last said."""
        return self._uses

    def probed(self, replica_id: str, instance: str, alive: bool) -> None:
        """This gateway has looked whether a replica lives."""
        self._probes.append(ProbeAnswer(replica_id, instance, alive))
        self._flush()

    def place(self, replica_id: str) -> Place | None:
        """A replica as the coordinator knows it."""
        return self._places.get(replica_id)

    def _sure_home(self, asked: facts.Asked) -> str | None:
        """Where a turn goes without asking."""
        if asked.program_id is None:
            return None
        home = self.homes.get(asked.tenant, asked.program_id)
        place = self._places.get(home[0]) if home is not None else None
        if home is None or place is None or place.instance != home[1]:
            return None
        return home[0] if place.direct or self._away_since_s is not None else None

    def _as_known_here(self, place: Place) -> ReplicaState:
        mine = [one for one in self._open.values() if one.sent_to == place.replica_id]
        of = place.description
        load = sum(one.asked.context_tokens for one in mine) / of.capacity_tokens
        return ReplicaState(
            place.replica_id, place.instance, place.health, round(load, 4), len(mine), 0, 0,
            of.capacity_tokens, of.host_tokens, 0,
        )  # fmt: skip

    # -- what is said -------------------------------------------------------------

    def _say(self, fact: facts.AnyFact) -> None:
        if not self.joined:
            # Requests are told of when it joins, as they are then.
            if isinstance(fact, _OF_NO_REQUEST) and len(self._outbox) < MOST_KEPT:
                self._outbox.append(fact)
            return
        if isinstance(fact, (facts.Asked, facts.Sent)):
            fact = self._from_now(fact)
        self._outbox.append(fact)
        if isinstance(fact, _URGENT):
            self._flush()
        elif self._flush_later is None:
            self._flush_later = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _from_now(self, fact: facts.Asked | facts.Sent) -> facts.Asked | facts.Sent:
        if fact.deadline_s is None:
            return fact
        return msgspec.structs.replace(fact, deadline_s=fact.deadline_s - self._clock())

    def _flush(self) -> None:
        if self._flush_later is not None:
            self._flush_later.cancel()
            self._flush_later = None
        if not self.joined or not (self._outbox or self._probes):
            return
        said, self._outbox = self._outbox, []
        probes, self._probes = self._probes, []
        tell = Tell(
            self.gateway_id,
            self.epoch,
            self._number,
            tuple(said),
            tuple(probes),
            acked=self._heard_mail,
            places_version=self._places_version,
        )
        self._number += 1
        task = asyncio.ensure_future(self._tell(tell, self._joins))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _tell(self, tell: Tell, join: int) -> None:
        try:
            answer = await asyncio.wait_for(self._calls.tell(tell), CALL_TIMEOUT_S)
        except (CoordinatorAway, asyncio.TimeoutError):
            if join == self._joins:
                self._lost_touch()
            return
        if join == self._joins:
            self._hear(answer)

    async def _all_said(self) -> None:
        self._flush()
        if self._sends:
            await asyncio.wait(set(self._sends), timeout=CALL_TIMEOUT_S)

    # -- what is heard ------------------------------------------------------------

    async def run(self) -> None:
        """Listen, and join anew where that is needed, until cancelled."""
        sweeps = asyncio.ensure_future(self._sweep())
        try:
            while True:
                try:
                    if not self.joined:
                        await self._join()
                    else:
                        await self._listen()
                except (CoordinatorAway, asyncio.TimeoutError):
                    self._lost_touch()
                except Exception:
                    logger.exception("the coordinator was misunderstood; please report this")
                    self._lost_touch()
                if not self.joined:
                    await asyncio.sleep(RETRY_S)
        finally:
            sweeps.cancel()
            for task in self._sends:
                task.cancel()
            await asyncio.gather(sweeps, *self._sends, return_exceptions=True)

    async def _join(self) -> None:
        said = {name: (one.sent_to, one.began) for name, one in self._open.items() if not one.refused}
        requests = tuple(self._from_now(_as_it_is(self._open[name])) for name in said)
        self._joins += 1
        join = Join(self.gateway_id, self.epoch, requests)
        answer = await asyncio.wait_for(self._calls.join(join), CALL_TIMEOUT_S)
        if answer.status is not Status.OK or answer.epoch < self.epoch:
            return
        if self.homes.life != str(answer.epoch):
            self.homes.version = -1
            self._inherited = dict(self._places)
            self._joined_s = self._clock()
        self.epoch, self.joined = answer.epoch, True
        self._heard_mail = self._number = 0
        self._places_version = -1
        self._away_since_s = None
        logger.info("gateway %s has joined coordinator %d", self.gateway_id, self.epoch)
        # What happened while it was on its way there.
        for name in said.keys() - self._open.keys():
            self._say(facts.Ended(name))
        for name, one in self._open.items():
            if name in said and (one.refused or one.sent_to != said[name][0]):
                self._say(facts.Ended(name))
            if one.refused or (one.sent_to, one.began) == said.get(name):
                continue
            self._say(_as_it_is(one))
            if one.began and one.sent_to is not None:
                self._say(facts.Began(name, one.sent_to))
        self._hear(answer)
        self._flush()

    async def _listen(self) -> None:
        join = self._joins
        listen = Listen(
            self.gateway_id, self.epoch, self._heard_mail, self.homes.version, self._places_version
        )
        self._lost = asyncio.get_running_loop().create_future()
        listening = asyncio.ensure_future(self._calls.listen(listen))
        try:
            awaited: set[asyncio.Future[Any]] = {listening, self._lost}
            await asyncio.wait(awaited, timeout=LISTEN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                raise CoordinatorAway("it does not answer")
            answer = listening.result()
        finally:
            listening.cancel()
        if join == self._joins:
            self._hear(answer)

    def _lost_touch(self) -> None:
        """From now on it has to join anew."""
        if self.joined:
            logger.warning("the coordinator is away; known homes go on")
        self.joined = False
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        self._outbox = [fact for fact in self._outbox if isinstance(fact, _OF_NO_REQUEST)]
        if self._away_since_s is None:
            self._away_since_s = self._clock()

    def _hear(self, answer: Answer) -> None:
        if answer.status is not Status.OK or answer.epoch != self.epoch:
            # What an earlier one says, that does not know yet that its time is over, is left aside.
            self.epoch = max(self.epoch, answer.epoch)
            self._lost_touch()
            return
        if answer.places is not None and answer.places_version > self._places_version:
            self._places_version = answer.places_version
            self._see_places(answer.places)
        for number, action in enumerate(answer.mail, answer.mail_from):
            if number > self._heard_mail:
                self._heard_mail = number
                self._do(action)
        if answer.homes is not None:
            self.homes.apply(answer.homes, self.on_home)

    def _see_places(self, places: Sequence[Place]) -> None:
        told = {place.replica_id: place for place in places}
        self._inherited = {name: place for name, place in self._inherited.items() if name not in told}
        before, self._places = self._places, {**self._inherited, **told}
        for replica_id, place in before.items():
            now = self._places.get(replica_id)
            if now is None:
                self._replicas.remove(replica_id)
            if now is None or now.instance != place.instance:
                self.homes.forget_replica(replica_id, place.instance)
        for place in self._places.values():
            self._replicas.add(Address(place.replica_id, place.url, place.rank))

    def _do(self, action: facts.AnyAction) -> None:
        if isinstance(action, (facts.Left, facts.Probe)):
            self.on_told(action)
            return
        one = self._open.get(action.request_id)
        if one is None:
            return
        if isinstance(action, facts.Cut):
            if one.sent_to != action.replica_id:
                return
        elif one.began or one.refused:
            return  # it stays where it is, and that has been said
        elif isinstance(action, facts.Recall):
            if one.sent_to != action.replica_id:
                return
            one.sent_to = None
        elif one.placed_here:
            return
        elif isinstance(action, facts.Send):
            one.sent_to = action.replica_id
            self._note_home(one.asked, action.replica_id)
        self.on_decided(action)
        one.ticket.take(action)

    def _note_home(self, asked: facts.Asked, replica_id: str) -> None:
        place = self._places.get(replica_id)
        if asked.program_id is not None and place is not None:
            self.homes.put((asked.tenant, asked.program_id), (replica_id, place.instance))

    # -- while the coordinator is away --------------------------------------------

    def _failed(self, fact: facts.Failed) -> None:
        one = self._open.get(fact.request_id)
        if one is None or one.sent_to != fact.replica_id:
            return
        one.failed_at.append(fact.replica_id)
        one.placed_here = False
        if not one.began:
            one.sent_to = None
        if not self.joined:
            if one.began:
                one.ticket.take(facts.Cut(fact.request_id, fact.replica_id))
            else:
                self._decide_here(one)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._inherited and self.joined and self._clock() - self._joined_s >= INHERIT_S:
                told = [place for name, place in self._places.items() if name not in self._inherited]
                self._inherited = {}
                self._see_places(told)
            since_s = self._away_since_s
            if since_s is None or self._clock() - since_s < self._fallback_s:
                continue
            for one in list(self._open.values()):
                if one.sent_to is None and not one.refused:
                    self._decide_here(one)

    def _decide_here(self, one: _Open) -> None:
        """Where a request goes that the coordinator cannot be asked about."""
        asked = one.asked
        if len(one.failed_at) >= MOST_FAILURES:
            message = f"{len(one.failed_at)} replicas in turn did not answer"
            self._end_here(one, facts.Refuse(asked.request_id, 502, "replicas_failed", message, 1.0))
            return
        sent: dict[str, int] = dict.fromkeys(self._places, 0)
        for other in self._open.values():
            if other.sent_to in sent:
                sent[other.sent_to] += 1
        usable = [
            place
            for place in self._places.values()
            if place.replica_id not in one.failed_at and (place.takes_new or place.health == "suspect")
        ]
        if not usable:
            if self._clock() - one.since_s >= MOST_WAIT_AWAY_S:
                message = "no replica is known that could answer, and nobody who knows more"
                self._end_here(one, facts.Refuse(asked.request_id, 503, "coordinator_away", message, 5.0))
            return
        home = self.home(asked.tenant, asked.program_id) if asked.program_id is not None else None
        chosen = min(
            usable,
            key=lambda place: (place.replica_id != home, not place.takes_new, sent[place.replica_id]),
        )
        moved_from = home if home is not None and home != chosen.replica_id else None
        one.sent_to, one.placed_here = chosen.replica_id, True
        self._note_home(asked, chosen.replica_id)
        one.ticket.take(facts.Send(asked.request_id, chosen.replica_id, "coordinator_away", moved_from))

    def _end_here(self, one: _Open, refuse: facts.Refuse) -> None:
        one.refused = True
        self.on_decided(refuse)
        one.ticket.take(refuse)


class RayWatch:
    """Looks at replicas for the coordinator, and knows what their engines told of themselves."""

    def __init__(self, decider: RayDecider, lives: Callable[[str], Awaitable[bool]]) -> None:
        """``lives``: whether an engine at this URL answers."""
        self._decider = decider
        self._lives = lives
        self._tasks: set[asyncio.Task[None]] = set()

    def probe(self, told: facts.Probe) -> None:
        """Somebody doubts that a replica lives: look now."""
        task = asyncio.ensure_future(self._probe(told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, told: facts.Probe) -> None:
        place = self._decider.place(told.replica_id)
        if place is not None:
            alive = await self._lives(place.url)
            self._decider.probed(told.replica_id, told.instance, alive)

    def describes(self, replica_id: str) -> Description | None:
        """What the engine of a replica last told."""
        place = self._decider.place(replica_id)
        return place.description if place is not None else None

    def missing(self) -> list[str]:
        """No engine is named by hand here, so none is missed."""
        return []


def _as_it_is(one: _Open) -> facts.Asked | facts.Sent:
    """A request as somebody hears of it who knows nothing of it."""
    asked = one.asked
    if one.sent_to is None:
        return asked
    return facts.Sent(
        asked.request_id,
        one.sent_to,
        asked.tenant,
        asked.context_tokens,
        program_id=asked.program_id,
        parent_id=asked.parent_id,
        agent_type=asked.agent_type,
        output_tokens=asked.output_tokens,
        deadline_s=asked.deadline_s,
        began=one.began,
    )
