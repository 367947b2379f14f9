"""The core of pairs of a coordinator: nobody has a home, and nothing is left to the next one.

What it knows comes from engines within a second, and from gateways as they join. What a coordinator before
it knew of programs' stored contexts and of requests' sizes is lost: a hint, and books that fill again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...policy.pd_pairs import PairScheduler
from ..core import facts
from ..core.journal import Changes, StateJournal
from ..core.limits import CoreLimits
from ..core.state import CoreState
from ..http.replicas import addresses
from ..pd.core import Engine, PdCore
from ..pd.decider import PdDecider
from ..pd.description import Kind, kind_of, leading, nic_told, seen_as, unlike
from ..pd.facts import Role
from ..pd.standalone import READ_SIDES
from ..pd.told import LinkTold
from .autoscale import Need
from .deciding import Deciding, Seen
from .messages import Place, Registration, State
from .register import Register

logger = logging.getLogger(__name__)

COUNTED_EVERY_S = 1.0
"""Engines tell twice a second that they live. What most of them have is looked at when one tells something
new, and else so often."""


@dataclass(frozen=True, slots=True)
class PairRules:
    """What an operator chooses, in place of a cluster preset."""

    read_side: str = "shorter"


@dataclass(slots=True)
class _Known:
    """An engine that registers, also one that is sent nothing."""

    kind: Kind
    role: Role
    heard_s: float
    fits: bool = False


class DecidingPairs(Deciding):
    """By load alone.

    Which model and which KV are served is what most engines have that register, of those of which pairs can
    be made; whoever came first has no say. Of an engine that comes to be one of the fewer nothing is cut:
    it gets nobody new, and is sent nothing from when its requests have ended.
    """

    core: PdCore

    def __init__(self, rules: PairRules, limits: CoreLimits, life: str, clock: Callable[[], float]) -> None:
        self.core = PdCore(PairScheduler(side=READ_SIDES[rules.read_side]()), limits, engines_come=True)
        self.journal = StateJournal(life)
        self._reads = PdDecider(self.core, clock)
        """Only to read from."""
        self._reads.links_of = lambda replica_id: self._links.get(replica_id, {})
        self._links: dict[str, Mapping[str, LinkTold]] = {}
        """What engines told last, by replica."""
        self._known: dict[str, _Known] = {}
        self._kind: Kind | None = None
        """That is served."""
        self._has_turned = False
        """It is another one, and engines that are there do not know yet."""
        self._outnumbered: set[str] = set()
        """Replicas that nobody new goes to for that reason, and no other."""
        self._clock = clock
        self._silent_s = limits.lease_s
        self._counted_s = -math.inf
        self._left_aside: dict[str, str] = {}
        """Why, by engine: said once."""

    def restore(self, kept: CoreState, now: float, elapsed_s: float) -> int:
        raise ValueError("it is of engines that do both; expected none")

    def snapshot(self, now: float) -> CoreState | None:
        return None

    def why_not(self, told: Registration) -> str:
        why = self._why_not(told)
        if not why:
            self._left_aside.pop(told.engine_id, None)
        elif self._left_aside.get(told.engine_id) != why:
            logger.warning("engine %s is sent nothing: %s", told.engine_id, why)
            self._left_aside[told.engine_id] = why
        [address] = addresses(told.url, 1)
        there = self.replica(address.replica_id)
        if not why:
            self._may_come_back(address.replica_id, told.description.instance)
        elif (
            told.paths is not None
            and there is not None
            and there.instance == told.description.instance
            and there.in_flight
        ):
            return ""  # it is drained: what runs there ends there
        return why

    def _why_not(self, told: Registration) -> str:
        [address] = addresses(told.url, 1)
        if told.paths is None:
            self._known.pop(address.replica_id, None)
            return "it tells of no paths; expected an engine that was started with --role"
        now, kind, role = self._clock(), kind_of(told.description, told.paths), told.paths.role
        one = self._known.get(address.replica_id)
        is_new = one is None or (one.kind, one.role) != (kind, role)
        if one is None or is_new:
            one = self._known[address.replica_id] = _Known(kind, role, now)
        one.heard_s = now
        if is_new or now - self._counted_s >= COUNTED_EVERY_S:
            self._count(address.replica_id, now)
        why = unlike(kind, self._kind) if self._kind is not None else ""
        one.fits = not why
        return why

    def _count(self, replica_id: str, now: float) -> None:
        """Find what most engines have, ``replica_id`` among them."""
        self._counted_s = now
        engines = self.core.engines
        self._known = {
            name: one
            for name, one in self._known.items()
            # Of those that are sent nothing nobody says when they are gone.
            if name == replica_id or (name in engines if one.fits else now - one.heard_s < self._silent_s)
        }
        kind = leading(((one.kind, one.role) for one in self._known.values()), self._kind)
        if kind != self._kind:
            self._has_turned = self._kind is not None
            self._kind = kind

    def turned(self) -> Sequence[facts.ReplicaDrains | facts.ReplicaStays]:
        if not self._has_turned or self._kind is None:
            return ()
        self._has_turned = False
        found: list[facts.ReplicaDrains | facts.ReplicaStays] = []
        for name, engine in self.core.engines.items():
            one = self._known.get(name)
            if one is None:
                continue
            why = unlike(one.kind, self._kind)
            one.fits = not why
            if why and not engine.draining:
                self._outnumbered.add(name)
                found.append(facts.ReplicaDrains(name))
            elif not why and name in self._outnumbered:
                self._outnumbered.discard(name)
                found.append(facts.ReplicaStays(name))
        return found

    def _may_come_back(self, replica_id: str, instance: str) -> None:
        """It fits, and is not there: that it was to be left once is no reason to leave it again."""
        if replica_id in self._outnumbered and replica_id not in self.core.engines:
            self._outnumbered.discard(replica_id)
            if self.core.drained.get(replica_id) == instance:
                del self.core.drained[replica_id]

    def seen_as(self, place: Place) -> facts.Fact:
        assert place.paths is not None, "else it is not taken"
        return seen_as(place.replica_id, place.description, place.paths)

    def told(self, told: Registration, now: float) -> Sequence[facts.AnyAction]:
        if not told.links or told.paths is None:
            return ()
        self._links = {name: links for name, links in self._links.items() if name in self.core.engines}
        [address] = addresses(told.url, 1)
        self._links[address.replica_id] = told.links
        node = told.paths.node
        there = [self._links.get(one.seen.replica_id, {}) for one in self._at(node)]
        fact = nic_told(node, there)
        return self.core.take(fact, now) if fact is not None else ()

    def _at(self, node: str) -> list[Engine]:
        return [engine for engine in self.core.engines.values() if engine.seen.node == node]

    def replica(self, replica_id: str) -> Seen | None:
        engine = self.core.engines.get(replica_id)
        if engine is None:
            return None
        in_flight = sum(flight.is_at(replica_id) for flight in self.core.flights.values())
        return Seen(engine.seen.instance, engine.heard_s, in_flight)

    def drains(self, place: Place) -> facts.ReplicaDrains | None:
        engine = self.core.engines.get(place.replica_id)
        if engine is None:
            self.core.drained[place.replica_id] = place.instance
        elif not engine.draining:
            return facts.ReplicaDrains(place.replica_id)
        return None

    def look(self, register: Register, now: float) -> bool:
        return register.show(self._shown)

    def _shown(self, place: Place) -> Place | None:
        engine = self.core.engines.get(place.replica_id)
        if engine is None or place.paths is None:
            return None
        health = "suspect" if engine.suspect else "draining" if engine.draining else "up"
        # Of no use to gateways, and another number each time.
        paths = dataclasses.replace(place.paths, block_s=0.0)
        return msgspec.structs.replace(place, health=health, takes_new=health == "up", paths=paths)

    def knows(self, request_id: str) -> bool:
        flight = self.core.flights.get(request_id)
        return (
            flight is not None and not flight.adopted
        )  # such a one is asked for if its gateway took it back

    def sent(self, request_id: str) -> facts.Send | None:
        flight = self.core.flights.get(request_id)
        if flight is None or flight.decode_id is None:
            return None
        return flight.sent

    def need(self, engines: int) -> Need:
        return Need(0, 0)

    def changes_since(self, version: int, life: str) -> Changes:
        return self.journal.since(version, life, lambda: ())

    def flush(self, now: float) -> Changes | None:
        return self.journal.flush(now, lambda: ())

    async def onto(self, state: State) -> State:
        return msgspec.structs.replace(
            state, programs=list(await self._reads.programs()), pairs=list(await self._reads.replicas())
        )
