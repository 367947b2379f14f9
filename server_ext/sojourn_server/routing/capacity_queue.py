"""The queue of requests that no replica has KV capacity for, and the order in which they are routed later.

If a request has to wait, its routing decision states the KV capacity that the request needs. A pass over the
queue follows the order of arrival, or the tenants' shares. It routes again only requests that fit into the
largest free capacity of a replica, so a pass over 10,000 requests is cheap.

A request that needs less capacity may overtake one that needs more. The rules for late requests limit this.
The oldest request of a tenant's queue is late in three cases:

- It arrived at least ``patience_s`` seconds ago.
- At least ``patience`` other requests were admitted since it became the oldest.
- It arrived at least ``late_s`` seconds ago: half of the time that a request may wait. This case matters if
  ``patience_s`` is longer than ``late_s``, or counts from a later time (see the last paragraph).

The time since arrival includes time at a replica that lost the request. For a late request, the replica with
the most free capacity is reserved. That replica accepts no other program until it has enough capacity for the
request, or has no programs left.

Only one replica is reserved at a time. If several tenants have a late request, the reservation goes to the
tenant that is served first. Tenants that are served before that tenant do not wait for its late request. The
reserved replica's free capacity only grows. The reservation passes to another replica only if that replica
has more free capacity. So the late request is admitted as soon as enough programs have ended.

A preset may choose another order than the order of arrival (``policies/routing/waiting_order.py``). Then
``patience_s`` counts from the time at which the request became the oldest. A late request that fits is served
before all other requests of its queue. So each request is served in the end, and requests that are not late
are served in the preset's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..policies.routing.replica_views import ReplicaView, RoutingDecision
from .replica_fleet import ReplicaFleet
from .routing_queue import RoutedRequest, TenantQueue, WaitingQueue
from .tenant_accounting import TenantAccounting

MAX_FAILED_ROUTES = 512
"""A pass ends after it has routed this many requests that still have to wait. This happens only if it is
unknown how much capacity the waiting requests need."""
TENANT_REORDER_DIVISOR = 32
"""Tenants are sorted again each time 1/32 of the waiting tenants were served. With up to 63 tenants, they are
sorted after each request. Between two sorts, each tenant is served at most once."""

PlaceCallback = Callable[[RoutedRequest, "str | None", float], RoutingDecision]
"""Function that routes a request, sends or queues it if a replica is found, and returns the decision.

Arguments: the request, the id of the reserved replica, which the request must not use (``None``: no replica
is reserved), and ``now``."""


class CapacityQueue:
    """Routes the requests of the waiting queue ``queue`` when a replica has capacity.

    ``patience_s``, ``patience`` and ``late_s`` define when a request is late (see the module's docstring).
    ``by_arrival``: whether the queue is in order of arrival. ``reserved_replica``: id of the replica that is
    reserved for a late request; ``None``: no replica is reserved. ``admitted_count``: number of requests that
    got a replica so far, including new requests that did not wait.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        fleet: ReplicaFleet,
        tenants: TenantAccounting,
        patience_s: float,
        patience: int,
        *,
        late_s: float,
        by_arrival: bool,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._tenants = tenants
        self._patience_s = patience_s
        self._patience = patience
        self._late_s = late_s
        self._by_arrival = by_arrival
        self.reserved_replica: str | None = None
        self.admitted_count = 0
        self.is_closed_to_new = False
        """True if the capacity that some waiting request needs is unknown. Then new requests wait too, with
        two exceptions: requests that go to their program's home, and requests that may pass waiting
        requests."""

    def place(self, place: PlaceCallback, now: float) -> bool:
        """Route the waiting requests that may fit, each by a call of ``place``, the argument. Returns False
        if the pass reached ``MAX_FAILED_ROUTES`` and some requests still have to be routed."""
        self.reserved_replica, self.is_closed_to_new = None, False
        queue, fleet = self._queue, self._fleet
        if not queue:
            return True
        asked, most_known = 0, math.inf
        best = fleet.most_room()
        while best is not None and queue:
            most = min(most_known, _max_fitting_tokens(best))
            candidates = [
                (tenant, waiting)
                for tenant, waiting in queue.tenant_queues.items()
                if waiting.least <= most or (self.reserved_replica is None and self._is_late(waiting, now))
            ]
            if not candidates:
                break
            order = self._tenants.order(candidates, room=True)
            for tenant in order[: max(1, len(order) // TENANT_REORDER_DIVISOR)]:
                waiting = queue.tenant_queues[tenant]
                if (
                    self.reserved_replica is None
                    and waiting.oldest.needs_tokens > most
                    and self._is_late(waiting, now)
                ):
                    self.reserved_replica = best.replica_id
                    break
                request = waiting.first_fitting(most)
                if (
                    not self._by_arrival
                    and waiting.oldest.needs_tokens <= most
                    and self._is_late(waiting, now)
                ):
                    request = waiting.oldest
                if request is None:
                    continue
                route = place(request, self.reserved_replica, now)
                if route.replica_id is None:
                    if not route.needs_tokens:
                        self.is_closed_to_new = True
                        return True
                    queue.set_needs_tokens(request, route.needs_tokens)
                    most_known = min(most_known, route.needs_tokens - 1)
                    asked += 1
                    if asked == MAX_FAILED_ROUTES:
                        return not any(not waiting.least for waiting in queue.tenant_queues.values())
                else:
                    self.admitted_count += 1
                best = fleet.most_room(self.reserved_replica)
                if best is None:
                    break
                most = min(most_known, _max_fitting_tokens(best))
            best = fleet.most_room(self.reserved_replica)
        return True

    def _is_late(self, waiting: TenantQueue, now: float) -> bool:
        """Whether the oldest request of a tenant's queue is late (see the module's docstring). False while
        its ``needs_tokens`` is 0: its need is unknown until it is routed again. Also records when the request
        became the oldest."""
        first = waiting.oldest
        if first.first_since is None:
            first.first_since, first.first_since_s = self.admitted_count, now
        if not first.needs_tokens:
            return False
        waits_since_s = first.since_s if self._by_arrival else first.first_since_s
        return (
            self.admitted_count - first.first_since >= self._patience
            or now - waits_since_s >= self._patience_s
            or now - first.since_s >= self._late_s
        )


def _max_fitting_tokens(replica: ReplicaView) -> float:
    """Largest number of tokens that a request may need in order to fit on this replica. ``inf`` if no program
    has its home there, because an empty replica accepts any request."""
    return max(0, replica.room_tokens) if replica.homed else math.inf
