"""A gateway's copy of the coordinator's tables of homes and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ...routing.bounded_program_table import Key
from ...routing.home_change_log import Home, HomeChanges
from ..http.replica_addresses import ReplicaAddress, ReplicaAddresses
from .coordinator_messages import ReplicaInfo

OnAffinityChange = Callable[[Key, Home], object]
"""Function that is called with a program's key and its new home."""


class ProgramAffinityCache:
    """Homes of programs, as the present or an earlier coordinator last reported them.

    A restarted coordinator may lack its predecessor's latest homes. The cache keeps those homes until the new
    coordinator reports others, so that programs stay where they are.
    """

    def __init__(self) -> None:
        self.life = ""
        """Id of the routing core that numbered ``version``."""
        self.version = -1
        """Version of the last change of homes that this copy has; -1: no change from this coordinator yet."""
        self._homes: dict[Key, Home] = {}

    def get(self, tenant: str, program_id: str) -> Home | None:
        """Return a program's home; ``None``: unknown."""
        return self._homes.get((tenant, program_id))

    def put(self, key: Key, home: Home | None) -> None:
        """Set a program's home at once, without a report of the coordinator; ``None``: remove the home."""
        if home is not None:
            self._homes[key] = home
        else:
            self._homes.pop(key, None)

    def apply(self, changes: HomeChanges, on_affinity_change: OnAffinityChange) -> None:
        """Apply changes of homes that the coordinator reports. Call ``on_affinity_change`` for each program
        with a new home.

        If earlier changes are missing, apply nothing. The next poll requests them again.
        """
        if not changes.full and (changes.life != self.life or changes.since > self.version):
            return  # changes in between are missing, and are requested again
        if changes.full and changes.life == self.life:
            reported = {(change.tenant, change.program_id) for change in changes.changes}
            for key in [key for key in self._homes if key not in reported]:
                self.put(key, None)
        for change in changes.changes:
            key = (change.tenant, change.program_id)
            if change.replica_id is None or change.instance is None:
                self.put(key, None)
                continue
            home = (change.replica_id, change.instance)
            if self._homes.get(key) != home:
                self.put(key, home)
                on_affinity_change(key, home)
        if changes.full or changes.version > self.version:
            self.life, self.version = changes.life, changes.version

    def forget_replica(self, replica_id: str, instance: str) -> None:
        """Remove all homes at this instance of a replica, because it is gone."""
        for key in [key for key, home in self._homes.items() if home == (replica_id, instance)]:
            self.put(key, None)


INHERITED_TTL_S = 10.0
"""Seconds after which a replica of the previous coordinator is forgotten if the new coordinator has not
reported it."""


class ReplicaCache(Mapping[str, ReplicaInfo]):
    """Replicas by id, as the coordinator reports them. Every change is also made in the gateway's table of
    addresses."""

    def __init__(self, replicas: ReplicaAddresses, on_gone: Callable[[str, str], None]) -> None:
        """``on_gone`` is called with the id and instance of each replica that is gone or has restarted."""
        self.version = -1
        """Version of the coordinator's last report; -1: no report since this gateway joined."""
        self.inherited: dict[str, ReplicaInfo] = {}
        """Replicas of the previous coordinator that the new coordinator has not reported yet."""
        self._inherited_s = 0.0
        self._places: dict[str, ReplicaInfo] = {}
        self._replicas = replicas
        self._on_gone = on_gone

    def joined(self, now: float, *, another: bool) -> None:
        """Record that this gateway joined a coordinator. ``another``: whether it is another coordinator than
        at the last join."""
        self.version = -1
        if another:
            self.inherited = dict(self._places)
            self._inherited_s = now

    def update(self, places: Sequence[ReplicaInfo], version: int) -> None:
        """Replace the replicas by those that the coordinator reports. Replicas in ``inherited`` stay. Ignore
        a report that is not newer than the last one."""
        if version > self.version:
            self.version = version
            self._set_replicas(places)

    def expire_inherited(self, now: float) -> None:
        """Forget the previous coordinator's replicas after ``INHERITED_TTL_S``."""
        if self.inherited and now - self._inherited_s >= INHERITED_TTL_S:
            reported = [place for name, place in self._places.items() if name not in self.inherited]
            self.inherited = {}
            self._set_replicas(reported)

    def _set_replicas(self, places: Sequence[ReplicaInfo]) -> None:
        """Set the reported replicas, and update the table of addresses. Call ``on_gone`` for replicas that
        are gone or have restarted."""
        reported = {place.replica_id: place for place in places}
        self.inherited = {name: place for name, place in self.inherited.items() if name not in reported}
        before, self._places = self._places, {**self.inherited, **reported}
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
