"""The core of pairs of a coordinator: nobody has a home, and nothing is left to the next one.

What it knows comes from engines within a second, and from gateways as they join. What a coordinator before
it knew of programs' stored contexts and of requests' sizes is lost: a hint, and books that fill again.
"""

from __future__ import annotations

import dataclasses
import logging
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
from ..pd.description import Kind, kind_of, nic_told, seen_as, unlike
from ..pd.standalone import READ_SIDES
from ..pd.told import LinkTold
from .autoscale import Need
from .deciding import Deciding, Seen
from .messages import Place, Registration, State
from .register import Register

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairRules:
    """What an operator chooses, in place of a cluster preset."""

    read_side: str = "shorter"


class DecidingPairs(Deciding):
    """By load alone."""

    core: PdCore

    def __init__(self, rules: PairRules, limits: CoreLimits, life: str, clock: Callable[[], float]) -> None:
        self.core = PdCore(PairScheduler(side=READ_SIDES[rules.read_side]()), limits, engines_come=True)
        self.journal = StateJournal(life)
        self._reads = PdDecider(self.core, clock)
        """Only to read from."""
        self._reads.links_of = lambda replica_id: self._links.get(replica_id, {})
        self._links: dict[str, Mapping[str, LinkTold]] = {}
        """What engines told last, by replica."""
        self._kinds: dict[str, Kind] = {}
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
        return why

    def _why_not(self, told: Registration) -> str:
        if told.paths is None:
            return "it tells of no paths; expected an engine that was started with --role"
        [address] = addresses(told.url, 1)
        kind = kind_of(told.description, told.paths)
        self._kinds = {name: one for name, one in self._kinds.items() if name in self.core.engines}
        others = [one for name, one in self._kinds.items() if name != address.replica_id]
        why = unlike(kind, others[0]) if others else ""
        if not why:
            self._kinds[address.replica_id] = kind
        return why

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
