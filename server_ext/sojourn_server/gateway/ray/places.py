"""Replicas as one gateway knows them: what the coordinator told, and for a while what the one before knew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..http.replicas import Address, Replicas
from .messages import Place

INHERIT_S = 10.0
"""A replica that an earlier coordinator knew stays known for so long, until the later one has heard of it."""


class KnownPlaces(Mapping[str, Place]):
    """By replica. ``replicas`` is kept the same."""

    def __init__(self, replicas: Replicas, on_gone: Callable[[str, str], None]) -> None:
        """``on_gone`` hears of each replica, and of which life, that is not known any more."""
        self.version = -1
        """Of what the coordinator told; -1: it has told nothing since this gateway joined."""
        self.inherited: dict[str, Place] = {}
        """Those of the coordinator before that this one has not told of."""
        self._inherited_s = 0.0
        self._places: dict[str, Place] = {}
        self._replicas = replicas
        self._on_gone = on_gone

    def joined(self, now: float, *, another: bool) -> None:
        """A coordinator is going to tell; ``another`` than before."""
        self.version = -1
        if another:
            self.inherited = dict(self._places)
            self._inherited_s = now

    def told(self, places: Sequence[Place], version: int) -> None:
        """All that the coordinator knows; what is older than what came before is left aside."""
        if version > self.version:
            self.version = version
            self._see(places)

    def grow_old(self, now: float) -> None:
        """Time has gone by since a coordinator was joined that is still there."""
        if self.inherited and now - self._inherited_s >= INHERIT_S:
            told = [place for name, place in self._places.items() if name not in self.inherited]
            self.inherited = {}
            self._see(told)

    def _see(self, places: Sequence[Place]) -> None:
        told = {place.replica_id: place for place in places}
        self.inherited = {name: place for name, place in self.inherited.items() if name not in told}
        before, self._places = self._places, {**self.inherited, **told}
        for replica_id, place in before.items():
            now = self._places.get(replica_id)
            if now is None:
                self._replicas.remove(replica_id)
            if now is None or now.instance != place.instance:
                self._on_gone(replica_id, place.instance)
        for place in self._places.values():
            self._replicas.add(Address(place.replica_id, place.url, place.rank))

    def __getitem__(self, replica_id: str) -> Place:
        return self._places[replica_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
