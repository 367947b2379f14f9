"""Replicas as one gateway knows them: the coordinator's, and for a while those of its predecessor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..http.replica_addresses import ReplicaAddress, ReplicaAddresses
from .coordinator_messages import ReplicaInfo

INHERITED_TTL_S = 10.0
"""Time that a predecessor's replica stays known until the coordinator reports it."""


class ReplicaCache(Mapping[str, ReplicaInfo]):
    """Replicas by id. ``replicas`` is kept equal."""

    def __init__(self, replicas: ReplicaAddresses, on_gone: Callable[[str, str], None]) -> None:
        """``on_gone`` is called with each replica and instance that is not known any more."""
        self.version = -1
        """Version of the coordinator's report; -1: none since this gateway joined."""
        self.inherited: dict[str, ReplicaInfo] = {}
        """The predecessor's replicas that the coordinator has not reported."""
        self._inherited_s = 0.0
        self._places: dict[str, ReplicaInfo] = {}
        self._replicas = replicas
        self._on_gone = on_gone

    def joined(self, now: float, *, another: bool) -> None:
        """A coordinator was joined; ``another`` than before."""
        self.version = -1
        if another:
            self.inherited = dict(self._places)
            self._inherited_s = now

    def told(self, places: Sequence[ReplicaInfo], version: int) -> None:
        """Replace the replicas by the coordinator's; an older report is ignored."""
        if version > self.version:
            self.version = version
            self._set_replicas(places)

    def expire_inherited(self, now: float) -> None:
        """Forget a predecessor's replicas after ``INHERITED_TTL_S``."""
        if self.inherited and now - self._inherited_s >= INHERITED_TTL_S:
            told = [place for name, place in self._places.items() if name not in self.inherited]
            self.inherited = {}
            self._set_replicas(told)

    def _set_replicas(self, places: Sequence[ReplicaInfo]) -> None:
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
            self._replicas.add(ReplicaAddress(place.replica_id, place.url, place.rank))

    def __getitem__(self, replica_id: str) -> ReplicaInfo:
        return self._places[replica_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
