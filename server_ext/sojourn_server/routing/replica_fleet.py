"""State of the replicas: their health, and the number and size of their programs and requests."""

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
"""Maximum number of absent replicas that are remembered in order to drain them when they return."""
DEFAULT_MAX_RUNNING = 64
"""Assumed number of requests that a replica runs at once, if the replica does not report it."""


class ReplicaHealth(str, Enum):
    """State of a replica, as far as the core knows."""

    UP = "up"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """The replica was silent for too long or failed at a request. It is probed, keeps its programs, and gets
    no new programs until it reports."""


@dataclass(slots=True)
class Replica:
    """A replica: an engine, or one data-parallel rank of an engine. Sizes are in tokens of KV, times on the
    core's clock."""

    replica_id: str
    instance: str
    capacity_tokens: int
    """KV capacity of the device."""
    host_tokens: int
    """KV capacity of host memory."""
    max_running: int
    """Number of requests that the replica runs at once; 0: unknown."""
    max_context_tokens: int
    """Longest context that the replica computes; 0: unknown."""
    heard_s: float
    """Time of the replica's last report."""
    epoch: int
    """Serial number of the replica's registration, counted over all replicas."""
    health: ReplicaHealth = ReplicaHealth.UP
    homed: int = 0
    """Number of programs whose home is the replica."""
    homed_tokens: int = 0
    """Sum of the expected sizes of the programs whose home is the replica."""
    in_flight: dict[str, int] = field(default_factory=dict)
    """Context length of each request in progress at the replica, by request id."""
    in_flight_tokens: int = 0
    queued: int = 0
    """Number of requests that wait for the replica at the gateway."""
    queued_tokens: int = 0
    idle_since_s: float | None = None
    """Time at which the replica stopped being full; ``None``: the replica is full."""
    probed_s: float | None = None
    """Time of the last probe since the replica's last report; ``None``: there was none."""
    no_yields_until_s: float = 0.0
    """Until this time the replica gets no ``YieldPrograms``, because its engine did not carry out the last
    order."""

    @property
    def sent_load(self) -> float:
        """Load from the requests in flight: the larger of their context tokens ÷ ``capacity_tokens`` and
        their number ÷ ``max_running``. If ``max_running`` is unknown, only the tokens count."""
        return self._load(self.in_flight_tokens, len(self.in_flight))

    def _load(self, tokens: int, requests: int) -> float:
        """Return the load from ``requests`` requests with ``tokens`` context tokens in total."""
        load = tokens / self.capacity_tokens
        return max(load, requests / self.max_running) if self.max_running else load

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The reported sizes: (``capacity_tokens``, ``host_tokens``, ``max_running``,
        ``max_context_tokens``)."""
        return (self.capacity_tokens, self.host_tokens, self.max_running, self.max_context_tokens)

    @property
    def state(self) -> str:
        """Health of the replica: ``up``, ``draining`` or ``suspect``."""
        return self.health.value

    @property
    def is_draining(self) -> bool:
        """Whether the replica drains. If so, its programs move away at their next turn."""
        return self.health is ReplicaHealth.DRAINING

    def status(self) -> ReplicaStatus:
        """Status of the replica, for operators."""
        view = self.view()
        return ReplicaStatus(
            self.replica_id,
            self.instance,
            self.state,
            round(view.load, 4),
            view.in_flight,
            self.queued,
            view.homed,
            self.capacity_tokens,
            self.host_tokens,
            view.room_tokens,
        )

    def view(self) -> ReplicaView:
        """Return the view of the replica for routing policies."""
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


def remember_drain(drained: OrderedDict[str, str], replica_id: str, instance: str) -> None:
    """Add an absent replica to ``drained``, which keeps the newest ``MAX_REMEMBERED_DRAINS`` replicas."""
    drained[replica_id] = instance
    drained.move_to_end(replica_id)
    if len(drained) > MAX_REMEMBERED_DRAINS:
        drained.popitem(last=False)


class ReplicaFleet:
    """All known replicas, with a view of each for policies.

    One decision may change a replica three times, so a view is rebuilt only when it is read. ``full_load``: a
    replica with at least this load is full and gets no more requests; ``inf``: no replica is ever full.
    """

    def __init__(self, full_load: float = math.inf) -> None:
        self._full_load = full_load
        self.capacity_tokens = 0
        """KV capacity of all replicas on their devices."""
        self.total_kv_tokens = 0
        """KV capacity of all replicas in device and host memory, used or free. Disk is not counted."""
        self.longest_tokens = 0
        """Longest context that any replica can compute; 0: there is no replica."""
        self.max_running = 0
        """Number of requests that all replicas together run at once."""
        self.epoch = 0
        """Number of registrations so far."""
        self.newly_idle = False
        """True if a replica registered or stopped being full since the core last set this to False."""
        self.drained: OrderedDict[str, str] = OrderedDict()
        """Replicas to drain as soon as they register: replica id → instance. A replica that registers as
        another instance is not drained. The newest ``MAX_REMEMBERED_DRAINS`` entries are kept."""
        self._replicas: dict[str, Replica] = {}
        self._places: dict[str, int] = {}
        """Index of each replica in ``_views``."""
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
        for replica_id in self._stale:
            self._views[self._places[replica_id]] = self._replicas[replica_id].view()
        self._stale.clear()
        return self._views

    def view(self, replica_id: str | None) -> ReplicaView | None:
        """The view of one replica; ``None``: unknown."""
        replica = self.get(replica_id)
        if replica is None:
            return None
        place = self._places[replica.replica_id]
        if replica.replica_id in self._stale:
            self._stale.discard(replica.replica_id)
            self._views[place] = replica.view()
        return self._views[place]

    def full(self, replica: Replica) -> bool:
        """Whether a replica gets no more requests, because ``sent_load`` has reached the fleet's
        ``full_load``."""
        return self._full_load < math.inf and replica.sent_load >= self._full_load

    def missing(self, replica: Replica) -> tuple[int, int]:
        """Return (tokens, requests): how many context tokens in flight and how many requests in flight must
        end until a full replica is no longer full. If the replica is not full, both are 0."""
        if math.isinf(self._full_load):
            return 0, 0
        tokens = replica.in_flight_tokens - math.ceil(self._full_load * replica.capacity_tokens) + 1
        requests = 0
        if replica.max_running:
            requests = len(replica.in_flight) - math.ceil(self._full_load * replica.max_running) + 1
        return max(0, tokens), max(0, requests)

    def most_room(self, but: str | None = None) -> ReplicaView | None:
        """Return the view of the replica with the most free KV capacity; ``None``: no replica accepts new
        programs.

        Only replicas that accept new programs are compared. A replica without programs is preferred to all
        others. ``but``: id of a replica to leave out.
        """
        best: ReplicaView | None = None
        for view in self.views:
            if not view.takes_new or view.replica_id == but:
                continue
            if best is None or (not view.homed, view.room_tokens) > (not best.homed, best.room_tokens):
                best = view
        return best

    def views_without(self, replica_ids: Collection[str]) -> Sequence[ReplicaView]:
        """Return all views, with the given replicas marked as not accepting new programs."""
        places = [self._places[one] for one in replica_ids if one in self._places]
        if not places:
            return self.views
        views = list(self.views)
        for place in places:
            views[place] = views[place]._replace(takes_new=False)
        return views

    def fitting(self, tokens: int) -> int:
        """Return the smaller of ``tokens`` and the longest context that any replica can compute. Without
        replicas, return ``tokens``."""
        return min(tokens, self.longest_tokens) if self.longest_tokens else tokens

    def register(self, event: ReplicaRegistered, now: float) -> bool:
        """Process a registration or report of a replica. Returns whether waiting requests have to be routed
        again: the replica is new, has other sizes, or was suspect. The caller must have removed an earlier
        instance of the replica.

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

    def remove(self, replica: Replica) -> None:
        """Remove a replica. If it was draining, remember its instance in ``drained``."""
        if replica.health is ReplicaHealth.DRAINING:
            remember_drain(self.drained, replica.replica_id, replica.instance)
        self._stale.discard(replica.replica_id)
        place = self._places.pop(replica.replica_id)
        del self._replicas[replica.replica_id], self._views[place]
        for replica_id, other in self._places.items():
            if other > place:
                self._places[replica_id] = other - 1
        self._sum_up()

    def changed(self, replica: Replica, now: float) -> None:
        """Mark a replica's view as outdated, and update ``idle_since_s`` and ``newly_idle``. Call this after
        each change of the replica's health, sizes or requests in flight."""
        self._stale.add(replica.replica_id)
        if self.full(replica):
            replica.idle_since_s = None
        elif replica.idle_since_s is None:
            replica.idle_since_s = now
            self.newly_idle = True

    def add_in_flight(self, replica: Replica, request_id: str, context_tokens: int, now: float) -> None:
        """Count a request of ``context_tokens`` tokens as in flight at the replica."""
        replica.in_flight[request_id] = context_tokens
        replica.in_flight_tokens += context_tokens
        self.changed(replica, now)

    def remove_in_flight(self, replica: Replica, request_id: str, now: float) -> None:
        """Stop counting a request as in flight at the replica."""
        replica.in_flight_tokens -= replica.in_flight.pop(request_id)
        self.changed(replica, now)

    def add_queued(self, replica: Replica, tokens: int, requests: int) -> None:
        """Add to the number and total context tokens of the replica's waiting requests. Negative numbers
        subtract requests that stop waiting."""
        replica.queued += requests
        replica.queued_tokens += tokens
        self._stale.add(replica.replica_id)

    def add_homed(self, replica: Replica, tokens: int, programs: int = 0) -> None:
        """Add to the number and total expected size of the programs whose home is the replica. Negative
        numbers subtract programs that leave. If ``programs`` is 0, only the size of an already counted
        program changes."""
        replica.homed += programs
        replica.homed_tokens += tokens
        self._stale.add(replica.replica_id)

    def _sum_up(self) -> None:
        """Compute the fleet's totals again."""
        self.capacity_tokens = sum(replica.capacity_tokens for replica in self)
        self.total_kv_tokens = self.capacity_tokens + sum(replica.host_tokens for replica in self)
        self.max_running = sum(replica.max_running or DEFAULT_MAX_RUNNING for replica in self)
        self.longest_tokens = max((r.max_context_tokens or r.capacity_tokens for r in self), default=0)
