"""Decides with a coordinator elsewhere: turns whose home is known go there at once, of others it is asked.

While the coordinator is away nothing breaks: known homes go on; new programs wait a moment for it, and then
go to the replica that this gateway has sent the least to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..core import facts
from ..core.journal import Home
from ..core.programs import Key
from ..http.decider import ProgramPlace, ReplicaStatus, Told
from ..http.replicas import Replicas
from ..http.ticket import Ticket
from ..pd.decider import PairStatus
from ..pd.facts import SendPair
from .calls import CALL_TIMEOUT_S, CoordinatorAway, CoordinatorCalls, answered
from .homes import HomesCopy
from .messages import (
    Answer,
    CannotBeWritten,
    Join,
    Listen,
    Place,
    ProbeAnswer,
    Status,
    Tell,
    write,
)
from .open_requests import OpenRequest, OpenRequests
from .places import KnownPlaces
from .seldom import Seldom

logger = logging.getLogger(__name__)

MOST_CALLS = 2
"""On their way at once: each costs the coordinator a millisecond, however many requests it asks for. What
comes meanwhile is asked for together when one of them is answered, or with what is told every ``BATCH_S``."""
BATCH_S = 0.015
"""What nobody waits for is told together, so often."""
FALLBACK_S = 3.0
"""A request that the coordinator says nothing of, and it is away for so long, is decided here."""
MOST_KEPT = 10_000
"""Facts that are no request's, kept for a coordinator that is away."""

LISTEN_TIMEOUT_S = 20.0
RETRY_S = 0.2
SWEEP_S = 0.25

MISUNDERSTOOD = "the coordinator was misunderstood; please report this"

_OF_NO_REQUEST = (facts.ProgramEnded, facts.KvDropped, facts.ReplicaDrains, facts.ReplicaStays)
_URGENT = (facts.Asked, facts.Failed, facts.ReplicaDrains, facts.ReplicaStays)


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
        self.places = KnownPlaces(replicas, self.homes.forget_replica)
        self.requests = OpenRequests()
        self._calls = calls
        self._clock = clock
        self._seldom = Seldom(logger, clock)
        self._fallback_s = fallback_s
        self._outbox: list[facts.AnyFact] = []
        self._probes: list[ProbeAnswer] = []
        self._heard_mail = 0
        self._number = 0
        self._joins = 0
        """What is said goes with the number of the latest; answers to what was said before are of no use."""
        self._away_since_s: float | None = clock()
        self._flush_later: asyncio.TimerHandle | None = None
        self._flush_next: asyncio.Handle | None = None
        self._is_urgent = False
        """Somebody waits for an answer to what is not said yet."""
        self._sends: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[None] | None = None
        self._uses: dict[str, float] = {}

    # -- the gateway asks ---------------------------------------------------------

    def open(self, asked: facts.Asked) -> Ticket:
        """Ask for a request."""
        one = self.requests.add(asked, self._clock())
        try:
            write(asked)
        except CannotBeWritten as error:
            self._refuse_untold(one, error)
            return one.ticket
        home = self._sure_home(asked)
        if home is not None:
            one.sent_to = home
            one.ticket.take(facts.Send(asked.request_id, home, "home"))
        self._say(one.as_it_is())
        return one.ticket

    def close(self, ticket: Ticket) -> None:
        """Nobody looks at the ticket any more."""
        self.requests.remove(ticket.request_id)

    def tell(self, fact: facts.AnyFact) -> None:
        """Something happened."""
        if isinstance(fact, facts.Began):
            one = self.requests.get(fact.request_id)
            if one is not None:
                one.began, one.sent_to, one.prefill_id = True, fact.replica_id, None
        elif isinstance(fact, facts.Prefilled):
            one = self.requests.get(fact.request_id)
            if one is not None and one.prefill_id == fact.replica_id:
                one.prefill_id = None
        elif isinstance(fact, facts.Failed):
            self._failed(fact)
        elif isinstance(fact, facts.ProgramEnded):
            self.homes.put((fact.tenant, fact.program_id), None)
        self._say(fact)

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        home = self.homes.get(tenant, program_id)
        return home[0] if home is not None else None

    async def programs(self) -> Sequence[ProgramPlace]:
        """All that are alive; none while the coordinator is away."""
        await self._all_said()
        try:
            return (await answered(self._calls.state())).programs
        except CoordinatorAway:
            return ()

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All that are known; while the coordinator is away, with the requests of this gateway only."""
        await self._all_said()
        try:
            state = await answered(self._calls.state())
        except CoordinatorAway:
            return [self._as_known_here(place) for place in self.places.values()]
        self._uses = state.uses
        return state.pairs or state.replicas

    def uses(self) -> dict[str, float]:
        """By tenant, as the coordinator last said."""
        return self._uses

    def probed(self, replica_id: str, instance: str, alive: bool) -> None:
        """This gateway has looked whether a replica lives."""
        self._probes.append(ProbeAnswer(replica_id, instance, alive))
        self._flush()

    def place(self, replica_id: str) -> Place | None:
        """A replica as the coordinator knows it."""
        return self.places.get(replica_id)

    def _sure_home(self, asked: facts.Asked) -> str | None:
        """Where a turn goes without asking."""
        if asked.program_id is None:
            return None
        home = self.homes.get(asked.tenant, asked.program_id)
        place = self.places.get(home[0]) if home is not None else None
        if home is None or place is None or place.instance != home[1]:
            return None
        return home[0] if place.direct or self._away_since_s is not None else None

    def _as_known_here(self, place: Place) -> ReplicaStatus:
        mine = self.requests.sent_to(place.replica_id)
        of = place.description
        load = sum(one.asked.context_tokens for one in mine) / of.capacity_tokens
        known = (
            place.replica_id, place.instance, place.health, round(load, 4), len(mine), 0, 0,
            of.capacity_tokens, of.host_tokens, 0,
        )  # fmt: skip
        if place.paths is None:
            return ReplicaStatus(*known)
        paths = place.paths
        return PairStatus(*known, role=paths.role.value, node=paths.node, epoch=paths.epoch, links={})

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
        loop = asyncio.get_running_loop()
        if isinstance(fact, _URGENT) and len(self._sends) < MOST_CALLS:
            # With all that this turn of the loop still brings.
            self._flush_next = self._flush_next or loop.call_soon(self._flush)
        elif self._flush_later is None:
            self._flush_later = loop.call_later(BATCH_S, self._flush)
        self._is_urgent = self._is_urgent or isinstance(fact, _URGENT)

    def _from_now(self, fact: facts.Asked | facts.Sent) -> facts.Asked | facts.Sent:
        if fact.deadline_s is None:
            return fact
        return msgspec.structs.replace(fact, deadline_s=fact.deadline_s - self._clock())

    def _refuse_untold(self, one: OpenRequest, error: CannotBeWritten) -> None:
        """A request that the coordinator cannot be told of, ever."""
        one.refused = True
        message = f"this request has a value that gateways cannot tell of: {error}"
        refused = facts.Refuse(one.asked.request_id, 400, "bad_request", message)
        one.ticket.take(refused)
        self.on_decided(refused)

    def _flush(self) -> None:
        self._flush_no_more()
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
            places_version=self.places.version,
            join=self._joins,
        )
        try:
            write(tell)
        except CannotBeWritten:
            tell = msgspec.structs.replace(tell, facts=self._tellable(said))
            if not (tell.facts or probes):
                return
        self._number += 1
        task = asyncio.ensure_future(self._tell(tell))
        self._sends.add(task)
        task.add_done_callback(self._said)

    def _flush_no_more(self) -> None:
        """Not at the moments that were chosen for it."""
        for handle in (self._flush_later, self._flush_next):
            if handle is not None:
                handle.cancel()
        self._flush_later = self._flush_next = None
        self._is_urgent = False

    def _tellable(self, said: Sequence[facts.AnyFact]) -> tuple[facts.AnyFact, ...]:
        """Those that can be written; of a request that is over at least that."""
        found: list[facts.AnyFact] = []
        for fact in said:
            try:
                write(fact)
            except CannotBeWritten as error:
                what = type(fact).__name__
                self._seldom.say(logging.ERROR, f"{what} cannot be told as it is: %s", error)
                if isinstance(fact, facts.Ended):
                    found.append(facts.Ended(fact.request_id, 0, fact.replica_id, fact.answered))
            else:
                found.append(fact)
        return tuple(found)

    def _said(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if self._is_urgent and self.joined and not task.cancelled():
            self._flush()

    async def _tell(self, tell: Tell) -> None:
        try:
            answer = await answered(self._calls.tell(tell))
            if tell.join == self._joins:
                self._hear(answer)
            return
        except CoordinatorAway:
            pass
        except Exception:
            self._seldom.say(logging.ERROR, MISUNDERSTOOD, exc_info=True)
        if tell.join == self._joins:
            self._lost_touch()

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
                except CoordinatorAway:
                    self._lost_touch()
                except Exception:
                    self._seldom.say(logging.ERROR, MISUNDERSTOOD, exc_info=True)
                    self._lost_touch()
                if not self.joined:
                    await asyncio.sleep(RETRY_S)
        finally:
            # Nothing more is told: what is still said waits for another ``run``, which joins anew.
            self.joined = False
            self._flush_no_more()
            ending = {sweeps, *self._sends}
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _join(self) -> None:
        open_ = self.requests
        said = {name: one.state for name, one in open_.items() if not one.refused}
        requests = tuple(self._from_now(open_[name].as_it_is()) for name in said)
        self._joins += 1
        join = Join(self.gateway_id, self.epoch, requests, self._joins)
        answer = await answered(self._calls.join(join))
        if answer.status is not Status.OK or answer.epoch < self.epoch:
            return
        another = self.homes.life != str(answer.epoch)
        if another:
            self.homes.version = -1
        self.places.joined(self._clock(), another=another)
        self.epoch, self.joined = answer.epoch, True
        self._heard_mail = self._number = 0
        self._away_since_s = None
        self._seldom.say(logging.INFO, "gateway %s has joined coordinator %d", self.gateway_id, self.epoch)
        # What happened while it was on its way there.
        for name in said.keys() - open_.keys():
            self._say(facts.Ended(name, answered=None))
        for name, one in open_.items():
            if name in said and (one.refused or one.sent_to != said[name][0]):
                self._say(facts.Ended(name, answered=None))
            if one.refused or one.state == said.get(name):
                continue
            self._say(one.as_it_is())
            if one.began and one.sent_to is not None:
                self._say(facts.Began(name, one.sent_to))
        self._hear(answer)
        self._flush()

    async def _listen(self) -> None:
        join = self._joins
        listen = Listen(
            self.gateway_id, self.epoch, self._heard_mail, self.homes.version, self.places.version, join
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
            self._seldom.say(logging.WARNING, "the coordinator is away; known homes go on")
        self.joined = False
        # Of no more use, and calls to the next coordinator would wait for these.
        for task in self._sends - {asyncio.current_task()}:
            task.cancel()
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
        if answer.places is not None:
            self.places.told(answer.places, answer.places_version)
        for number, action in enumerate(answer.mail, answer.mail_from):
            if number > self._heard_mail:
                self._heard_mail = number
                self._do(action)
        if answer.homes is not None:
            self.homes.apply(answer.homes, self.on_home)

    def _do(self, action: facts.AnyAction) -> None:
        if isinstance(action, (facts.Left, facts.Probe)):
            self.on_told(action)
            return
        one = self.requests.get(action.request_id)
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
            one.goes(action)
            self._note_home(one.asked, action)
        one.ticket.take(action)  # first: it is decided, whatever becomes of the books
        self.on_decided(action)

    def _note_home(self, asked: facts.Asked, send: facts.Send) -> None:
        place = self.places.get(send.replica_id)
        if asked.program_id is not None and place is not None and not isinstance(send, SendPair):
            self.homes.put((asked.tenant, asked.program_id), (send.replica_id, place.instance))

    # -- while the coordinator is away --------------------------------------------

    def _failed(self, fact: facts.Failed) -> None:
        one = self.requests.get(fact.request_id)
        if one is None or not one.is_at(fact.replica_id):
            return
        one.failed_at.append(fact.replica_id)
        one.failures_computing += fact.computing
        one.placed_here = False
        if not one.began:
            one.goes(None)
        if not self.joined:
            if one.began:
                one.ticket.take(facts.Cut(fact.request_id, fact.replica_id))
            else:
                self._decide_here(one)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self.joined:
                self.places.grow_old(self._clock())
            since_s = self._away_since_s
            if since_s is None or self._clock() - since_s < self._fallback_s:
                continue
            for one in list(self.requests.values()):
                if one.sent_to is None and not one.refused:
                    self._decide_here(one)

    def _decide_here(self, one: OpenRequest) -> None:
        asked = one.asked
        home = self.home(asked.tenant, asked.program_id) if asked.program_id is not None else None
        decided = self.requests.decide(one, self.places, home, self._clock())
        if isinstance(decided, facts.Refuse):
            one.refused = True
            self.on_decided(decided)
        elif decided is not None:
            one.goes(decided)
            one.placed_here = True
            self._note_home(asked, decided)
        if decided is not None:
            one.ticket.take(decided)
