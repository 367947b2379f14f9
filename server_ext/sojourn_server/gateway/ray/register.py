"""Which engines there are, what replicas each of them is, and what gateways are shown of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from ...policy.replica_views import RouteView
from ...policy.routing import RoutingPolicy
from ..core.core import RoutingCore
from ..core.fleet import Health, Replica
from ..http.replicas import addresses
from .messages import Place, Registration

ASKED_ABOUT = 8
"""Made-up turns that a policy is asked about to see whether it sends all of them home."""


class Entry(NamedTuple):
    """What a registration comes to, in the register."""

    places: list[Place]
    """The engine's."""
    changed: bool
    """They are not what they were."""
    left: list[Place]
    """Of this engine before, that are not there any more or in another life."""
    replaced: list[str]
    """Other engines that had one of its addresses before; they are still in the register."""


class Register:
    """Of all engines that are there, in the order in which they registered."""

    def __init__(self, engines: Mapping[str, list[Place]] | None = None) -> None:
        self._engines = {engine: list(places) for engine, places in (engines or {}).items()}
        self._drains: dict[str, str | None] = {}
        """Engines that are to be left, and which life of each; ``None``: it has not registered yet."""
        self._heard: set[str] = set()
        """Engines that have registered here; of others there is only what a coordinator before knew."""
        self.shown: tuple[Place, ...] = ()
        """As gateways see them since the last ``look``."""
        self.version = 0
        """Of that."""

    def kept(self) -> dict[str, list[Place]]:
        """For whoever comes after; a copy."""
        return {engine: list(places) for engine, places in self._engines.items()}

    def of(self, engine_id: str) -> list[Place]:
        """The places that an engine is; none: it is not there."""
        return self._engines.get(engine_id, [])

    def engine_of(self, replica_id: str) -> str | None:
        """Whose place it is."""
        for engine_id, places in self._engines.items():
            if any(place.replica_id == replica_id for place in places):
                return engine_id
        return None

    def has_heard(self, engine_id: str) -> bool:
        """An engine is there, and has said so here."""
        return engine_id in self._heard

    def put(self, told: Registration) -> Entry:
        """An engine is there. Another life of it than the one that was to be left is not to be left."""
        before = self.of(told.engine_id)
        was = {place.replica_id: place for place in before}
        of = told.description
        self._heard.add(told.engine_id)
        if self._drains.get(told.engine_id, of.instance) not in (None, of.instance):
            del self._drains[told.engine_id]
        elif told.engine_id in self._drains:
            self._drains[told.engine_id] = of.instance
        places = [
            Place(a.replica_id, a.url, a.rank, of, Health.UP.value, False, True, told.paths)
            if a.replica_id not in was
            else msgspec.structs.replace(
                was[a.replica_id], url=a.url, rank=a.rank, description=of, paths=told.paths
            )
            for a in addresses(told.url, of.ranks)
        ]
        now = {place.replica_id for place in places}
        self._engines[told.engine_id] = places
        return Entry(
            places,
            places != before,
            [place for place in before if place.replica_id not in now or place.instance != of.instance],
            [
                engine_id
                for engine_id, others in self._engines.items()
                if engine_id != told.engine_id and any(place.replica_id in now for place in others)
            ],
        )

    def remove(self, engine_id: str) -> list[Place]:
        """An engine is there no more; the places that it was."""
        self._drains.pop(engine_id, None)
        self._heard.discard(engine_id)
        return self._engines.pop(engine_id, [])

    def drain(self, engine_id: str) -> bool:
        """An engine is to be left by all, also one that has yet to register; False: that has been said."""
        if engine_id in self._drains:
            return False
        places = self.of(engine_id)
        self._drains[engine_id] = places[0].instance if places else None
        return True

    def drains(self, engine_id: str) -> bool:
        """An engine is to be left by all."""
        return engine_id in self._drains

    def look(self, core: RoutingCore, routing: RoutingPolicy, now: float) -> bool:
        """Look how the replicas are; whether gateways are to be shown something else than before."""

        def shown(place: Place) -> Place | None:
            replica = core.fleet.get(place.replica_id)
            if replica is None:
                return None
            return msgspec.structs.replace(
                place,
                health=replica.health.value,
                direct=is_direct(core, routing, replica, now),
                takes_new=replica.health is Health.UP,
            )

        return self.show(shown)

    def show(self, shown: Callable[[Place], Place | None]) -> bool:
        """As ``look``; ``shown``: a place as it is now, ``None`` for one that nobody is sent to."""
        each = (shown(place) for places in self._engines.values() for place in places)
        found = tuple(place for place in each if place is not None)
        if found == self.shown:
            return False
        self.shown = found
        self.version += 1
        return True

    def __len__(self) -> int:
        return sum(1 for places in self._engines.values() if places)

    def __iter__(self) -> Iterator[str]:
        """Names of engines."""
        return iter(self._engines)


def is_direct(core: RoutingCore, routing: RoutingPolicy, replica: Replica, now: float) -> bool:
    """Turns of programs at home there go there now, whatever they are: then gateways need not ask.

    A policy that fails is counted, and gateways ask.
    """
    if (
        replica.health is not Health.UP
        or routing.reads_prefixes
        or core.fleet.full(replica)
        or replica.replica_id in core.requests.queues
    ):
        return False
    home = core.fleet.view(replica.replica_id)
    try:
        for number in range(ASKED_ABOUT):
            turn = RouteView(f"made-up-{number}", number, 1, 1, home, True, None, {})
            if routing.route(turn, core.fleet.views, now).replica_id != replica.replica_id:
                return False
    except Exception as error:
        core.counts.policy_failed(error)
        return False
    return True
