"""Sends waiting requests of an affinity core once a replica has capacity for them, and moves requests away
from replicas that cannot serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..policies.routing.replica_views import RoutingDecision
from . import routing_events
from .capacity_queue import CapacityQueue
from .replica_fleet import Replica, ReplicaHealth
from .request_placer import RequestPlacer
from .request_stealer import RequestStealer
from .routed_programs import RoutedProgram
from .routing_limits import PolicyCallError
from .routing_preemption import RoutingPreemption
from .routing_queue import RoutedRequest
from .routing_tables import RoutingTables

MAX_FAILED_REROUTED = 256
"""Maximum number of requests of the ``failed`` queue that one pass routes again. These requests failed at a
replica that is still registered."""
MIN_ENGINE_WAIT_S = 5.0
"""A request counts as waiting in its engine only if it was sent at least this many seconds ago. Engines are
polled at this interval."""
RELOCATED_REASON = "relocated"
"""Reason of a ``SendRequest`` for a request that had waited in another engine."""
UNROUTED_ROUTE = RoutingDecision("", "policy_failed")
"""Placeholder route of a request that is rejected because the routing policy failed."""


class RequestDispatcher:
    """Decides when the waiting requests of one core go to a replica.

    There are four occasions. Capacity becomes free. An idle replica steals work. Less urgent requests make
    way. A request waits inside an engine that has no room for the request's KV.
    """

    def __init__(
        self,
        tables: RoutingTables,
        placer: RequestPlacer,
        capacity_queue: CapacityQueue,
        stealer: RequestStealer,
        preemption: RoutingPreemption,
        *,
        give_up: Callable[[RoutedRequest, float], None],
        reject_unrouted: Callable[[str, PolicyCallError], None],
    ) -> None:
        """``give_up`` rejects a request that no replica can retry, ``reject_unrouted`` a request for which
        the routing policy failed."""
        self._tables = tables
        self._fleet, self._requests, self._tenants = tables.fleet, tables.requests, tables.tenants
        self._placer = placer
        self._capacity_queue = capacity_queue
        self._stealer = stealer
        self._preemption = preemption
        self._give_up = give_up
        self._reject_unrouted = reject_unrouted
        self.capacity_changed = False
        """True if capacity may have become free, or if a request has to be routed again."""
        self._has_unrouted = False
        """True if some requests that wait for capacity have not been routed yet; the next event routes
        them."""

    def dispatch(self, now: float, *, epoch: bool) -> None:
        """Send the requests for which a replica has capacity.

        ``epoch``: whether the event that is processed is a ``Tick``. Work stealing runs on a ``Tick``, and on
        other events if a replica registered or stopped being full. Preemption between tenants runs only on a
        ``Tick``.
        """
        self._forget_unanswered(now)
        if self._has_unrouted:
            self.capacity_changed, self._has_unrouted = True, False
        self._send_eligible(now)
        if epoch or self._fleet.newly_idle:
            self._fleet.newly_idle = False
            with self.counted_failures():
                for request, thief, reason in self._stealer.each(now):
                    self._requests.take_out(request)
                    self._tables.counts.steals += 1
                    self._placer.send_or_queue(request, RoutingDecision(thief, reason), now)
            self._send_eligible(now)
        if epoch:
            with self.counted_failures():
                self._tables.counts.recalls += self._preemption.preempt_less_urgent(now)
            self._send_eligible(now)

    def enqueue_for_any(self, request: RoutedRequest) -> None:
        """Add a request to the queue for any replica, to be routed again. The request must be in no queue."""
        request.needs_tokens = 0
        self._requests.enqueue_for_any(request)
        self.capacity_changed = True

    @contextmanager
    def counted_failures(self) -> Iterator[None]:
        """Context manager that catches and counts a ``PolicyCallError`` of its block. The policy is called
        again on the next ``Tick``."""
        try:
            yield
        except PolicyCallError as error:
            self._tables.counts.policy_failed(error)

    def _send_eligible(self, now: float) -> None:
        """Send requests that wait for any replica, as long as some replica has capacity. Then send requests
        that wait for one replica, if the load of that replica has fallen."""
        while self.capacity_changed or self._tables.homes.capacity_grew:
            self.capacity_changed = self._tables.homes.capacity_grew = False
            self._send_failed(now)
            if not self._capacity_queue.place(self._place, now):
                self._has_unrouted = True
                break
        freed = self._requests.freed
        if not freed:
            return
        self._requests.freed = set()
        queues = self._requests.queues
        for replica_id in sorted(freed & queues.keys()):
            replica = self._fleet.get(replica_id)
            while replica is not None and replica_id in queues and not self._fleet.full(replica):
                tenant_queues = queues[replica_id].tenant_queues
                request = tenant_queues[self._tenants.order(tenant_queues.items(), room=False)[0]].first
                self._requests.take_out(request)
                self._placer.send(request, replica, now)

    def _place(self, request: RoutedRequest, reserved_replica: str | None, now: float) -> RoutingDecision:
        """Route a waiting request with ``RequestPlacer.place``; return the decision. If the routing policy
        fails, reject the request."""
        try:
            return self._placer.place(request, reserved_replica, now)
        except PolicyCallError as error:
            # Another attempt would fail again and block the requests behind this one.
            self._requests.close(request, now)
            self._reject_unrouted(request.request_id, error)
            return UNROUTED_ROUTE

    def _send_failed(self, now: float) -> None:
        """Route again the oldest requests of the ``failed`` queue. Reject a request if no replica can retry
        it."""
        failed = self._requests.failed
        for request in failed.oldest(MAX_FAILED_REROUTED) if failed else ():
            if any(_can_retry_at(replica, request) for replica in self._fleet):
                self._place(request, self._capacity_queue.reserved_replica, now)
            else:
                self._give_up(request, now)

    def yield_answered(self, event: routing_events.YieldAnswered, now: float) -> None:
        """Handle the answer to a ``YieldPrograms``."""
        with self.counted_failures():
            self._tables.counts.recalls += self._preemption.yield_answered(event, now)

    def kv_dropped(self, program: RoutedProgram, replica_id: str, now: float) -> None:
        """Handle the report that a program's home has no KV of it any more. The program loses its home,
        and its requests that wait for the replica are routed again. A program with requests in flight is
        passed to ``relocate`` instead."""
        if program.in_flight:
            self.relocate(program, replica_id, now)
            return
        self._tables.homes.leave(program, now)
        queue = self._requests.queues.get(replica_id)
        for request in queue.of(program) if queue is not None else ():
            self._requests.take_out(request)
            self.enqueue_for_any(request)

    def relocate(self, program: RoutedProgram, replica_id: str, now: float) -> None:
        """Move a program to another replica. The program's request waits inside the engine ``replica_id``,
        and this engine has no KV of the program (MORI §4.3.1).

        The program moves only if two conditions hold: the request certainly waits, and another replica has
        capacity. A program moves at most once per turn.
        """
        replica = self._fleet.get(replica_id)
        if replica is None or program.in_flight != 1 or program.moved_at_turn == program.turns:
            return
        request = next(
            (
                one
                for one in map(self._requests.by_id.__getitem__, replica.in_flight)
                if one.program is program
            ),
            None,
        )
        if request is None or request.began or request.recalled or request.sent_s is None:
            return
        if now - request.sent_s < MIN_ENGINE_WAIT_S:
            return  # the request may have been sent after the engine's report
        with self.counted_failures():
            route = self._placer.route_away_from(request, replica_id, now)
            if route is None or route.replica_id is None:
                return
            self._placer.actions.append(routing_events.RecallRequest(request.request_id, replica_id))
            self._requests.undo_send(request, now)
            request.recalled, request.recalled_from = True, replica_id
            self._tables.counts.relocations += 1
            self._placer.send_or_queue(request, RoutingDecision(route.replica_id, RELOCATED_REASON), now)

    def _forget_unanswered(self, now: float) -> None:
        """Remove programs that have had no answer and have no request in progress. This frees the capacity
        that was counted for them. So programs of refused requests do not fill the table."""
        unanswered = self._requests.unanswered
        while unanswered:
            program = unanswered.pop()
            if not program.turns and program.is_idle and self._tables.is_current(program):
                self._tables.homes.leave(program, now)
                self._tables.programs.remove(program.key)


def _can_retry_at(replica: Replica, request: RoutedRequest) -> bool:
    """Whether a failed request may wait for this replica.

    A request that has not failed at the replica may wait for it, except while the replica drains. A request
    that has failed there may wait only while the replica is suspect: a new instance may soon replace the
    replica."""
    if replica.replica_id in request.failed_at:
        return replica.health is ReplicaHealth.SUSPECT
    return replica.health is not ReplicaHealth.DRAINING
