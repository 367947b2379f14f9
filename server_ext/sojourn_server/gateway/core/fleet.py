"""The replicas, what each was promised and what is on its way there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...policy.replica_views import ReplicaView
from .facts import ReplicaSeen


class Health(str, Enum):
    """What is believed of a replica."""

    UP = "up"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """Not heard of for long: it is being probed, keeps who is at home there, and takes nobody new."""


@dataclass(slots=True)
class Replica:
    """One of them. Sizes in tokens of KV."""

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int
    max_running: int
    max_context_tokens: int
    heard_s: float
    health: Health = Health.UP
    homed: int = 0
    homed_tokens: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Contexts of requests that were sent there and are not over, by request."""
    in_flight_tokens: int = 0
    idle_since_s: float | None = None
    """Since when it could compute more than it was sent; ``None``: it cannot."""
    probed_s: float | None = None

    def view(self) -> ReplicaView:
        """For a policy."""
        load = self.in_flight_tokens / self.capacity_tokens
        if self.max_running:
            load = max(load, len(self.in_flight) / self.max_running)
        return ReplicaView(
            self.replica_id,
            load,
            len(self.in_flight),
            self.capacity_tokens + self.host_tokens - self.homed_tokens,
            self.homed,
            self.health is Health.UP,
        )


class Fleet:
    """All that are known, and a view of each that is as new as they are.

    Views are made when a replica changes and not when it is asked for: of 64 replicas one decision
    changes one.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._places: dict[str, int] = {}
        self._views: list[ReplicaView] = []

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica_id: str | None) -> Replica | None:
        """By its id; ``None`` for one that is not known."""
        return self._replicas.get(replica_id) if replica_id is not None else None

    @property
    def views(self) -> Sequence[ReplicaView]:
        """Of all, in the order in which they registered."""
        return self._views

    def view(self, replica_id: str | None) -> ReplicaView | None:
        """Of one."""
        place = self._places.get(replica_id) if replica_id is not None else None
        return self._views[place] if place is not None else None

    def seen(self, fact: ReplicaSeen, now: float) -> Replica:
        """A replica registers or says that it lives; who was there before under its id is to be gone."""
        replica = self._replicas.get(fact.replica_id)
        if replica is None:
            replica = Replica(
                fact.replica_id,
                fact.instance,
                fact.capacity_tokens,
                fact.host_tokens,
                fact.max_running,
                fact.max_context_tokens,
                now,
            )
            self._replicas[fact.replica_id] = replica
            self._places[fact.replica_id] = len(self._views)
            self._views.append(replica.view())
            return replica
        replica.heard_s, replica.probed_s = now, None
        if replica.health is Health.SUSPECT:
            replica.health = Health.UP
        replica.capacity_tokens, replica.host_tokens = fact.capacity_tokens, fact.host_tokens
        replica.max_running, replica.max_context_tokens = fact.max_running, fact.max_context_tokens
        self.changed(replica)
        return replica

    def gone(self, replica: Replica) -> None:
        """Forget one."""
        place = self._places.pop(replica.replica_id)
        del self._replicas[replica.replica_id], self._views[place]
        for replica_id, other in self._places.items():
            if other > place:
                self._places[replica_id] = other - 1

    def changed(self, replica: Replica) -> None:
        """Look at one again. Whoever changes a replica says so."""
        self._views[self._places[replica.replica_id]] = replica.view()

    def sent(self, replica: Replica, request_id: str, context_tokens: int) -> None:
        """A request goes there."""
        replica.in_flight[request_id] = context_tokens
        replica.in_flight_tokens += context_tokens
        self.changed(replica)

    def over(self, replica: Replica, request_id: str) -> None:
        """A request that was sent there is over, or never came there."""
        replica.in_flight_tokens -= replica.in_flight.pop(request_id)
        self.changed(replica)

    def homed(self, replica: Replica, tokens: int, programs: int = 0) -> None:
        """Programs at home there are so many more, and need so much more together."""
        replica.homed += programs
        replica.homed_tokens += tokens
        self.changed(replica)
