"""The replicas, what each was promised and what is on its way there."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...policy.replica_views import ReplicaView
from .facts import ReplicaSeen

MOST_DRAINED = 1024
"""Replicas that were gone while they were drained, and that would be drained still if they came back."""
USUAL_RUNNING = 64
"""Requests that a replica is taken to compute at once which does not say."""


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
    epoch: int
    """Which registration this is, of all replicas': a later one has a higher number."""
    health: Health = Health.UP
    homed: int = 0
    homed_tokens: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Contexts of requests that were sent there and are not over, by request."""
    in_flight_tokens: int = 0
    queued: int = 0
    """Requests that wait for it at the gateway."""
    queued_tokens: int = 0
    idle_since_s: float | None = None
    """Since when it could be sent more than it was; ``None``: it is full."""
    probed_s: float | None = None

    @property
    def sent_load(self) -> float:
        """Share of it that requests use which were sent there."""
        return self._load(self.in_flight_tokens, len(self.in_flight))

    def _load(self, tokens: int, requests: int) -> float:
        load = tokens / self.capacity_tokens
        return max(load, requests / self.max_running) if self.max_running else load

    @property
    def told(self) -> tuple[int, int, int, int]:
        """What it says of itself."""
        return (self.capacity_tokens, self.host_tokens, self.max_running, self.max_context_tokens)

    def view(self) -> ReplicaView:
        """For a policy."""
        return ReplicaView(
            self.replica_id,
            self._load(self.in_flight_tokens + self.queued_tokens, len(self.in_flight) + self.queued),
            len(self.in_flight),
            self.capacity_tokens + self.host_tokens - self.homed_tokens,
            self.homed,
            self.health is Health.UP,
            self.queued,
            self.capacity_tokens + self.host_tokens,
        )


class Fleet:
    """All that are known, and a view of each that is as new as they are.

    A view is kept until its replica changes and made again when it is next looked at: of 64 replicas one
    decision changes one, and it may change it thrice. ``full_load``: a replica with at least this load is
    sent no more.
    """

    def __init__(self, full_load: float = math.inf) -> None:
        self._full_load = full_load
        self.capacity_tokens = 0
        """Of all together, on their devices."""
        self.room_tokens = 0
        """Of all together, in all tiers."""
        self.longest_tokens = 0
        """Longest context that one of them computes; 0: there is none."""
        self.max_running = 0
        """Requests that all together compute at once."""
        self.epoch = 0
        """Registrations so far."""
        self.newly_idle = False
        """One came or is no longer full since this was last set to False."""
        self.drained: OrderedDict[str, str] = OrderedDict()
        """Instances that were drained when they were last known, by replica: a blip undrains nobody."""
        self._replicas: dict[str, Replica] = {}
        self._places: dict[str, int] = {}
        self._views: list[ReplicaView] = []
        self._stale: set[str] = set()
        """Replicas whose view is of before they changed."""

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
        if self._stale:
            for replica_id in self._stale:
                self._views[self._places[replica_id]] = self._replicas[replica_id].view()
            self._stale.clear()
        return self._views

    def view(self, replica_id: str | None) -> ReplicaView | None:
        """Of one."""
        replica = self._replicas.get(replica_id) if replica_id is not None else None
        if replica is None:
            return None
        place = self._places[replica.replica_id]
        if replica.replica_id in self._stale:
            self._stale.discard(replica.replica_id)
            self._views[place] = replica.view()
        return self._views[place]

    def full(self, replica: Replica) -> bool:
        """It is sent no more."""
        return self._full_load < math.inf and replica.sent_load >= self._full_load

    def missing(self, replica: Replica) -> tuple[int, int]:
        """Tokens and requests in flight that a replica is too many by to be sent one more."""
        if math.isinf(self._full_load):
            return 0, 0
        tokens = replica.in_flight_tokens - math.ceil(self._full_load * replica.capacity_tokens) + 1
        requests = 0
        if replica.max_running:
            requests = len(replica.in_flight) - math.ceil(self._full_load * replica.max_running) + 1
        return max(0, tokens), max(0, requests)

    def most_room(self, but: str | None = None) -> ReplicaView | None:
        """Of those that take new programs, the one with the most room, an empty one before all others."""
        best: ReplicaView | None = None
        for view in self.views:
            if not view.takes_new or view.replica_id == but:
                continue
            if best is None or (not view.homed, view.room_tokens) > (not best.homed, best.room_tokens):
                best = view
        return best

    def views_without(self, replica_ids: Collection[str]) -> Sequence[ReplicaView]:
        """Of all, as if these took nobody."""
        places = [self._places[one] for one in replica_ids if one in self._places]
        if not places:
            return self.views
        views = list(self.views)
        for place in places:
            views[place] = views[place]._replace(takes_new=False)
        return views

    def fitting(self, tokens: int) -> int:
        """So many, but no more than the longest context: more is never computed."""
        return min(tokens, self.longest_tokens) if self.longest_tokens else tokens

    def seen(self, fact: ReplicaSeen, now: float) -> bool:
        """A replica registers or says that it lives; who was there before under its id is to be gone.

        True if that changes anything for those who wait. Raises ``ValueError`` for a replica without KV.
        """
        if fact.capacity_tokens < 1 or min(fact.host_tokens, fact.max_running, fact.max_context_tokens) < 0:
            raise ValueError(
                f"replica {fact.replica_id!r}: capacity_tokens {fact.capacity_tokens}, host_tokens "
                f"{fact.host_tokens}, max_running {fact.max_running}, max_context_tokens "
                f"{fact.max_context_tokens}; expected ≥ 1, ≥ 0, ≥ 0, ≥ 0"
            )
        told = (fact.capacity_tokens, fact.host_tokens, fact.max_running, fact.max_context_tokens)
        replica = self._replicas.get(fact.replica_id)
        if replica is None:
            self.epoch += 1
            drained = self.drained.pop(fact.replica_id, None) == fact.instance
            health = Health.DRAINING if drained else Health.UP
            self.add(Replica(fact.replica_id, fact.instance, *told, now, self.epoch, health), now)
            return True
        replica.heard_s, replica.probed_s = now, None
        if replica.told == told and replica.health is not Health.SUSPECT:
            return False
        if replica.health is Health.SUSPECT:
            replica.health = Health.UP
        replica.capacity_tokens, replica.host_tokens, replica.max_running, replica.max_context_tokens = told
        self._sum_up()
        self.changed(replica, now)
        return True

    def add(self, replica: Replica, now: float) -> None:
        """One more, that is not known."""
        self._replicas[replica.replica_id] = replica
        self._places[replica.replica_id] = len(self._views)
        self._views.append(replica.view())
        self._sum_up()
        self.changed(replica, now)

    def gone(self, replica: Replica) -> None:
        """Forget one, but not that it was drained."""
        if replica.health is Health.DRAINING:
            self.drained[replica.replica_id] = replica.instance
            self.drained.move_to_end(replica.replica_id)
            if len(self.drained) > MOST_DRAINED:
                self.drained.popitem(last=False)
        self._stale.discard(replica.replica_id)
        place = self._places.pop(replica.replica_id)
        del self._replicas[replica.replica_id], self._views[place]
        for replica_id, other in self._places.items():
            if other > place:
                self._places[replica_id] = other - 1
        self._sum_up()

    def changed(self, replica: Replica, now: float) -> None:
        """Look at one again, whose load or health may be another. Whoever changes a replica says so."""
        self._stale.add(replica.replica_id)
        if self.full(replica):
            replica.idle_since_s = None
        elif replica.idle_since_s is None:
            replica.idle_since_s = now
            self.newly_idle = True

    def sent(self, replica: Replica, request_id: str, context_tokens: int, now: float) -> None:
        """A request goes there."""
        replica.in_flight[request_id] = context_tokens
        replica.in_flight_tokens += context_tokens
        self.changed(replica, now)

    def over(self, replica: Replica, request_id: str, now: float) -> None:
        """A request that was sent there is over, or never came there."""
        replica.in_flight_tokens -= replica.in_flight.pop(request_id)
        self.changed(replica, now)

    def queued(self, replica: Replica, tokens: int, requests: int) -> None:
        """So many more wait for it at the gateway."""
        replica.queued += requests
        replica.queued_tokens += tokens
        self._stale.add(replica.replica_id)

    def homed(self, replica: Replica, tokens: int, programs: int = 0) -> None:
        """Programs at home there are so many more, and need so much more together."""
        replica.homed += programs
        replica.homed_tokens += tokens
        self._stale.add(replica.replica_id)

    def _sum_up(self) -> None:
        self.capacity_tokens = sum(replica.capacity_tokens for replica in self)
        self.room_tokens = self.capacity_tokens + sum(replica.host_tokens for replica in self)
        self.max_running = sum(replica.max_running or USUAL_RUNNING for replica in self)
        self.longest_tokens = max((r.max_context_tokens or r.capacity_tokens for r in self), default=0)
