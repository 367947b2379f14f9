"""State of the replicas: their health, the number of programs at home there, and the requests sent to
them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..policies.routing.replica_views import ReplicaView
from .routing_events import ReplicaRegistered
from .routing_status import ReplicaStatus

MAX_REMEMBERED_DRAINS = 1024
"""Maximum number of remembered replicas that disappeared while draining. They drain again if they return."""
DEFAULT_MAX_RUNNING = 64
"""Assumed number of requests that a replica runs at once, if it does not report one."""


class ReplicaHealth(str, Enum):
    """Assumed state of a replica."""

    UP = "up"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """Silent for too long, or failed at a request. The replica is probed, keeps its programs, and gets no new
    ones."""


@dataclass(slots=True)
class Replica:
    """A replica: an engine, or one data-parallel rank of an engine. Sizes in tokens of KV."""

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int
    max_running: int
    max_context_tokens: int
    heard_s: float
    epoch: int
    """Serial number of the replica's registration, counted over all replicas."""
    health: ReplicaHealth = ReplicaHealth.UP
    homed: int = 0
    homed_tokens: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Context length of each request in progress at the replica, by request id."""
    in_flight_tokens: int = 0
    queued: int = 0
    """Number of requests that wait for the replica at the gateway."""
    queued_tokens: int = 0
    idle_since_s: float | None = None
    """Time at which the replica stopped being full; ``None``: it is full."""
    probed_s: float | None = None

    @property
    def sent_load(self) -> float:
        """Load from requests in progress: used share of KV capacity or of request slots, whichever is
        larger."""
        return self._load(self.in_flight_tokens, len(self.in_flight))

    def _load(self, tokens: int, requests: int) -> float:
        load = tokens / self.capacity_tokens
        return max(load, requests / self.max_running) if self.max_running else load

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Reported sizes: device KV and host KV in tokens, requests run at once, longest context in
        tokens."""
        return (self.capacity_tokens, self.host_tokens, self.max_running, self.max_context_tokens)

    @property
    def state(self) -> str:
        """Health of the replica, for gateways."""
        return self.health.value

    @property
    def is_draining(self) -> bool:
        """Whether the replica drains: its programs move away at their next turn."""
        return self.health is ReplicaHealth.DRAINING

    def status(self, queued: int) -> ReplicaStatus:
        """Status of the replica, for operators. ``queued``: number of requests that wait for it at the
        gateway."""
        view = self.view()
        return ReplicaStatus(
            self.replica_id,
            self.instance,
            self.state,
            round(view.load, 4),
            view.in_flight,
            queued,
            view.homed,
            self.capacity_tokens,
            self.host_tokens,
            view.room_tokens,
        )

    def view(self) -> ReplicaView:
        """The replica as routing policies see it."""
        return ReplicaView(
            self.replica_id,
            self._load(self.in_flight_tokens + self.queued_tokens, len(self.in_flight) + self.queued),
            len(self.in_flight),
            self.capacity_tokens + self.host_tokens - self.homed_tokens,
            self.homed,
            self.health is ReplicaHealth.UP,
            self.queued,
            self.capacity_tokens + self.host_tokens,
        )


class ReplicaFleet:
    """All known replicas, with a view of each for policies.

    A view is rebuilt only when it is read after a change, because one decision may change a replica three
    times. ``full_load``: a replica with at least this load gets no more requests.
    """

    def __init__(self, full_load: float = math.inf) -> None:
        self._full_load = full_load
        self.capacity_tokens = 0
        """KV capacity of all replicas on their devices."""
        self.room_tokens = 0
        """KV capacity of all replicas in all tiers, used or free."""
        self.longest_tokens = 0
        """Longest context that any replica can compute; 0: there is no replica."""
        self.max_running = 0
        """Number of requests that all replicas together run at once."""
        self.epoch = 0
        """Number of registrations so far."""
        self.newly_idle = False
        """True if a replica registered or stopped being full since this was last set to False."""
        self.drained: OrderedDict[str, str] = OrderedDict()
        """Instance by replica id, for replicas that disappeared while draining. If this instance returns, it
        drains again."""
        self._replicas: dict[str, Replica] = {}
        self._places: dict[str, int] = {}
        self._views: list[ReplicaView] = []
        self._stale: set[str] = set()
        """Replicas whose view is outdated."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica_id: str | None) -> Replica | None:
        """The replica with this id; ``None``: unknown."""
        return self._replicas.get(replica_id) if replica_id is not None else None

    @property
    def views(self) -> Sequence[ReplicaView]:
        """Views of all replicas, in the order of registration."""
        if self._stale:
            for replica_id in self._stale:
                self._views[self._places[replica_id]] = self._replicas[replica_id].view()
            self._stale.clear()
        return self._views

    def view(self, replica_id: str | None) -> ReplicaView | None:
        """The view of one replica; ``None``: unknown."""
        replica = self._replicas.get(replica_id) if replica_id is not None else None
        if replica is None:
            return None
        place = self._places[replica.replica_id]
        if replica.replica_id in self._stale:
            self._stale.discard(replica.replica_id)
            self._views[place] = replica.view()
        return self._views[place]

    def full(self, replica: Replica) -> bool:
        """Whether a replica is too loaded to get more requests."""
        return self._full_load < math.inf and replica.sent_load >= self._full_load

    def missing(self, replica: Replica) -> tuple[int, int]:
        """How many tokens and how many requests of those in flight must end before a replica gets another
        request. A request's tokens end with it."""
        if math.isinf(self._full_load):
            return 0, 0
        tokens = replica.in_flight_tokens - math.ceil(self._full_load * replica.capacity_tokens) + 1
        requests = 0
        if replica.max_running:
            requests = len(replica.in_flight) - math.ceil(self._full_load * replica.max_running) + 1
        return max(0, tokens), max(0, requests)

    def most_room(self, but: str | None = None) -> ReplicaView | None:
        """The view of the replica with the most free capacity; ``None``: no replica accepts new programs.
        Only replicas that accept new programs are compared. An empty replica wins over others. ``but``: id of
        a replica to leave out."""
        best: ReplicaView | None = None
        for view in self.views:
            if not view.takes_new or view.replica_id == but:
                continue
            if best is None or (not view.homed, view.room_tokens) > (not best.homed, best.room_tokens):
                best = view
        return best

    def views_without(self, replica_ids: Collection[str]) -> Sequence[ReplicaView]:
        """All views, with the given replicas marked as not accepting new programs."""
        places = [self._places[one] for one in replica_ids if one in self._places]
        if not places:
            return self.views
        views = list(self.views)
        for place in places:
            views[place] = views[place]._replace(takes_new=False)
        return views

    def fitting(self, tokens: int) -> int:
        """Limit ``tokens`` to the longest context that any replica can compute. Without replicas there is no
        limit."""
        return min(tokens, self.longest_tokens) if self.longest_tokens else tokens

    def seen(self, event: ReplicaRegistered, now: float) -> bool:
        """Process a registration; return whether waiting requests have to be routed again. If an earlier
        instance of the replica is in the fleet, the caller must remove that one first.

        Raises ``ValueError`` for invalid sizes, such as no KV memory.
        """
        if (
            event.capacity_tokens < 1
            or min(event.host_tokens, event.max_running, event.max_context_tokens) < 0
        ):
            raise ValueError(
                f"replica {event.replica_id!r}: capacity_tokens {event.capacity_tokens}, host_tokens "
                f"{event.host_tokens}, max_running {event.max_running}, max_context_tokens "
                f"{event.max_context_tokens}; expected ≥ 1, ≥ 0, ≥ 0, ≥ 0"
            )
        sizes = (event.capacity_tokens, event.host_tokens, event.max_running, event.max_context_tokens)
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            self.epoch += 1
            drained = self.drained.pop(event.replica_id, None) == event.instance
            health = ReplicaHealth.DRAINING if drained else ReplicaHealth.UP
            self.add(Replica(event.replica_id, event.instance, *sizes, now, self.epoch, health), now)
            return True
        replica.heard_s, replica.probed_s = now, None
        if replica.sizes == sizes and replica.health is not ReplicaHealth.SUSPECT:
            return False
        if replica.health is ReplicaHealth.SUSPECT:
            replica.health = ReplicaHealth.UP
        replica.capacity_tokens, replica.host_tokens, replica.max_running, replica.max_context_tokens = sizes
        self._sum_up()
        self.changed(replica, now)
        return True

    def add(self, replica: Replica, now: float) -> None:
        """Add a replica that is not in the fleet."""
        self._replicas[replica.replica_id] = replica
        self._places[replica.replica_id] = len(self._views)
        self._views.append(replica.view())
        self._sum_up()
        self.changed(replica, now)

    def gone(self, replica: Replica) -> None:
        """Remove a replica. If it was draining, remember that."""
        if replica.health is ReplicaHealth.DRAINING:
            self.drained[replica.replica_id] = replica.instance
            self.drained.move_to_end(replica.replica_id)
            if len(self.drained) > MAX_REMEMBERED_DRAINS:
                self.drained.popitem(last=False)
        self._stale.discard(replica.replica_id)
        place = self._places.pop(replica.replica_id)
        del self._replicas[replica.replica_id], self._views[place]
        for replica_id, other in self._places.items():
            if other > place:
                self._places[replica_id] = other - 1
        self._sum_up()

    def changed(self, replica: Replica, now: float) -> None:
        """Mark a replica's view as outdated. Call this after each change of its load or health."""
        self._stale.add(replica.replica_id)
        if self.full(replica):
            replica.idle_since_s = None
        elif replica.idle_since_s is None:
            replica.idle_since_s = now
            self.newly_idle = True

    def sent(self, replica: Replica, request_id: str, context_tokens: int, now: float) -> None:
        """Count a request as sent to the replica."""
        replica.in_flight[request_id] = context_tokens
        replica.in_flight_tokens += context_tokens
        self.changed(replica, now)

    def over(self, replica: Replica, request_id: str, now: float) -> None:
        """Stop counting a request that was sent to the replica: it ended, or never arrived there."""
        replica.in_flight_tokens -= replica.in_flight.pop(request_id)
        self.changed(replica, now)

    def queued(self, replica: Replica, tokens: int, requests: int) -> None:
        """Count requests that begin to wait for the replica at the gateway: their number and their total
        ``tokens``. Negative numbers count requests that stop waiting."""
        replica.queued += requests
        replica.queued_tokens += tokens
        self._stale.add(replica.replica_id)

    def homed(self, replica: Replica, tokens: int, programs: int = 0) -> None:
        """Count programs that get their home at the replica: their number and their total ``tokens``.
        Negative numbers count programs that leave. With ``programs`` 0, only the size of a program
        changes."""
        replica.homed += programs
        replica.homed_tokens += tokens
        self._stale.add(replica.replica_id)

    def _sum_up(self) -> None:
        self.capacity_tokens = sum(replica.capacity_tokens for replica in self)
        self.room_tokens = self.capacity_tokens + sum(replica.host_tokens for replica in self)
        self.max_running = sum(replica.max_running or DEFAULT_MAX_RUNNING for replica in self)
        self.longest_tokens = max((r.max_context_tokens or r.capacity_tokens for r in self), default=0)
