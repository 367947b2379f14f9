"""Tables of an affinity core: the homes of programs and the states of requests. ``RoutingTables`` groups all
tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..policies.fairness.fair_share import SharePolicy
from ..policies.routing.routing_policy import RoutingPolicy
from ..policies.routing.waiting_order import ArrivalOrder, WaitingOrderPolicy, WaitingProgramView
from .bounded_program_table import BoundedProgramTable
from .home_change_log import HomeChangeLog
from .replica_fleet import Replica, ReplicaFleet
from .routed_programs import (
    ProgramEstimator,
    ResidentPrograms,
    RoutedProgram,
    build_resident_programs,
)
from .routing_limits import RoutingCounters, RoutingLimits
from .routing_queue import RoutedRequest, WaitingQueue
from .tenant_accounting import TenantAccounting


class ProgramAffinity:
    """Sets and removes the homes of programs, and keeps the totals of replicas and tenants up to date. No
    other class changes homes."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        tenants: TenantAccounting,
        journal: HomeChangeLog,
        residents: ResidentPrograms,
    ) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._journal = journal
        self._residents = residents
        self.capacity_grew = False
        """True if a replica got more free KV capacity since the core last set this to False."""

    def leave(self, program: RoutedProgram, now: float) -> None:
        """Remove a program's home. The program's KV counts as lost. No effect without a home."""
        replica = self._fleet.get(program.home)
        if replica is not None:
            self._fleet.add_homed(replica, -program.size_tokens, -1)
            self._tenants.add_homed_tokens(program.tenant, -program.size_tokens)
            self.capacity_grew = True
        if program.home is not None:
            self._journal.record_home(program.key, None, now)
            self._residents.mark_stale(program)
        program.home, program.cached, program.size_tokens = None, False, 0

    def set_home(self, program: RoutedProgram, replica: Replica, size_tokens: int, now: float) -> str | None:
        """Make a replica a program's home, and count ``size_tokens`` there for the program. Returns the id of
        the former home; ``None``: the program had no home, or had its home at this replica."""
        before = program.home
        if before == replica.replica_id:
            self.resize(program, size_tokens)
            return None
        self.leave(program, now)
        program.home, program.size_tokens = replica.replica_id, size_tokens
        self._residents.mark_stale(program)
        self._fleet.add_homed(replica, size_tokens, 1)
        self._tenants.add_homed_tokens(program.tenant, size_tokens)
        self._journal.record_home(program.key, (replica.replica_id, replica.instance), now)
        if before is not None:
            program.moves += 1
            program.moved_at_turn = program.turns
        return before

    def resize(self, program: RoutedProgram, size_tokens: int) -> None:
        """Change the number of tokens that are counted for a program at its home. Also update the totals of
        its home and its tenant."""
        replica = self._fleet.get(program.home)
        if replica is not None and size_tokens != program.size_tokens:
            self._fleet.add_homed(replica, size_tokens - program.size_tokens)
            self._tenants.add_homed_tokens(program.tenant, size_tokens - program.size_tokens)
            self.capacity_grew = self.capacity_grew or size_tokens < program.size_tokens
        program.size_tokens = size_tokens
        self._residents.mark_stale(program)


class RoutedRequestTable:
    """Moves requests between queues and replicas, and keeps the totals of programs, replicas and tenants up
    to date."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        tenants: TenantAccounting,
        residents: ResidentPrograms,
        order: WaitingOrderPolicy | ArrivalOrder,
    ) -> None:
        self._order = order
        self._reads_idleness = not order.by_arrival
        self._fleet = fleet
        self._tenants = tenants
        self._residents = residents
        self.by_id: dict[str, RoutedRequest] = {}
        """All requests in progress."""
        self.anywhere = WaitingQueue(by_tenant=tenants.shares_capacity, by_arrival=order.by_arrival)
        """Requests that wait for any replica and have not failed at a registered one."""
        self.failed = WaitingQueue(by_tenant=False)
        """Requests that failed at a replica that is still registered, and wait for any other replica. Their
        queue is separate, because they cannot use free capacity of the replica where they failed."""
        self.queues: dict[str, WaitingQueue] = {}
        """Requests that wait for one replica, by replica id; only non-empty queues."""
        self.waiting = 0
        """Number of requests that have not been sent."""
        self.waiting_of: dict[str, int] = {}
        """Number of requests that have not been sent, by tenant; tenants without such requests are absent."""
        self.unregistered_requests: dict[str, RoutedRequest] = {}
        """Requests, by id, that gateways sent to replicas that have not registered with this core."""
        self.freed: set[str] = set()
        """Ids of replicas whose load has fallen, or that became available, since the core last emptied this
        set."""
        self.unanswered: list[RoutedProgram] = []
        """Programs whose requests all ended without an answer. The core empties the list and removes the
        programs."""

    def open(self, request: RoutedRequest) -> None:
        """Add a new request to the table. The caller must queue or send it next."""
        self.by_id[request.request_id] = request
        self._count(request, 1)
        if request.program is not None:
            request.program.waiting += 1
            self._residents.mark_stale(request.program)
            if self._reads_idleness:
                request.program.idleness.arrived(request.request_id, request.since_s)
        self._tenants.add_request(request.tenant, request.program)

    def close(self, request: RoutedRequest, now: float) -> None:
        """Remove a request from the table and from its queue or replica."""
        if request.sent_s is not None:
            self.undo_send(request, now)
        else:
            self.take_out(request)
        del self.by_id[request.request_id]
        self._count(request, -1)
        if request.program is not None:
            request.program.waiting -= 1
            if self._reads_idleness:
                request.program.idleness.finished(request.request_id, now)
            self._residents.mark_stale(request.program)
            if not request.program.turns and request.program.is_idle:
                self.unanswered.append(request.program)
        self._tenants.remove_request(request.tenant, request.program)

    def enqueue_for_any(self, request: RoutedRequest) -> None:
        """Add a request to ``anywhere``, or to ``failed`` if it failed at a registered replica. The request
        must be in no queue."""
        request.replica_id = None
        if request.failed_at:
            request.queue_key = (request.number,)
            self.failed.add(request)
        else:
            request.queue_key = self._queue_key(request)
            self.anywhere.add(request)

    def _queue_key(self, request: RoutedRequest) -> tuple[float, ...]:
        """Return the sort key of a request among those that wait for any replica."""
        program = request.program
        view = WaitingProgramView(
            request.number,
            program is not None and program.turns > 0,
            program.idleness.idleness(request.since_s) if program is not None else 0.0,
            request.context_tokens,
            max(request.size_tokens, request.context_tokens),
        )
        return self._order.key(view)

    def enqueue_for_replica(self, request: RoutedRequest, replica_id: str) -> None:
        """Add a request to the queue for one replica. The request must be in no queue."""
        request.replica_id = replica_id
        request.queue_key = (request.number,)
        queue = self.queues.get(replica_id)
        if queue is None:
            queue = self.queues[replica_id] = WaitingQueue(by_tenant=self._tenants.shares_capacity)
        queue.add(request)
        replica = self._fleet.get(replica_id)
        if replica is not None:
            self._fleet.add_queued(replica, request.context_tokens, 1)

    def take_out(self, request: RoutedRequest) -> None:
        """Remove a waiting request from its queue. No effect if it is in no queue."""
        if request.replica_id is None:
            (self.failed if request.failed_at else self.anywhere).remove(request)
            return
        queue = self.queues.get(request.replica_id)
        if queue is not None and queue.remove(request):
            replica = self._fleet.get(request.replica_id)
            if replica is not None:
                self._fleet.add_queued(replica, -request.context_tokens, -1)
            if not queue:
                del self.queues[request.replica_id]
        request.replica_id = None

    def send(self, request: RoutedRequest, replica_id: str, now: float) -> None:
        """Record that a request is sent to a replica, registered or not. The request must be in no queue."""
        request.replica_id, request.sent_s = replica_id, now
        self._count(request, -1)
        if request.program is not None:
            request.program.waiting -= 1
            request.program.in_flight += 1
            if self._reads_idleness:
                request.program.idleness.admitted(request.request_id, now)
        self._tenants.charge(request.tenant, request.context_tokens)
        replica = self._fleet.get(replica_id)
        if replica is None:
            self.unregistered_requests[request.request_id] = request
        else:
            self._fleet.add_in_flight(replica, request.request_id, request.context_tokens, now)

    def undo_send(self, request: RoutedRequest, now: float) -> None:
        """Record that a sent request is no longer at its replica. Afterwards the request is in no queue."""
        replica = self._fleet.get(request.replica_id)
        if replica is not None and request.request_id in replica.in_flight:
            self._fleet.remove_in_flight(replica, request.request_id, now)
            self.freed.add(replica.replica_id)
        self.unregistered_requests.pop(request.request_id, None)
        self._tenants.charge(request.tenant, -request.context_tokens)
        self._count(request, 1)
        if request.program is not None:
            request.program.in_flight -= 1
            request.program.waiting += 1
            if self._reads_idleness:
                request.program.idleness.preempted(request.request_id, now)
        request.replica_id = request.sent_s = None
        request.began = False
        request.waiting_since_s = now

    def adopt(self, replica: Replica, now: float) -> None:
        """Count as in flight the requests that gateways sent to ``replica`` before it registered."""
        for request in [w for w in self.unregistered_requests.values() if w.replica_id == replica.replica_id]:
            del self.unregistered_requests[request.request_id]
            self._fleet.add_in_flight(replica, request.request_id, request.context_tokens, now)

    def unregistered_since(self, before_s: float) -> list[RoutedRequest]:
        """Return the requests that were sent at or before the time ``before_s`` to replicas that have not
        registered yet. Such a request needs a timeout, because no event reports the failure of an
        unregistered replica."""
        return [
            one
            for one in self.unregistered_requests.values()
            if one.sent_s is not None and one.sent_s <= before_s
        ]

    def all_queues(self) -> list[WaitingQueue]:
        """All queues of waiting requests."""
        return [self.anywhere, self.failed, *self.queues.values()]

    def replica_gone(self, replica: Replica) -> None:
        """Process the removal of a replica. Requests that failed there may use a new instance of the replica,
        but not the removed one."""
        for request in self.by_id.values():
            if replica.replica_id not in request.failed_at:
                continue
            aside = self.failed.remove(request)
            request.failed_at = tuple(one for one in request.failed_at if one != replica.replica_id)
            gone = (replica.replica_id, replica.instance)
            request.failed_at_gone = (*request.failed_at_gone, gone)
            if aside:
                self.enqueue_for_any(request)

    def replica_came(self, replica: Replica) -> None:
        """Process the registration of a replica. If the same instance was removed before by mistake, requests
        that failed there still may not use it."""
        came = (replica.replica_id, replica.instance)
        for request in [one for one in self.by_id.values() if came in one.failed_at_gone]:
            waits_anywhere = request.sent_s is None and request.replica_id is None
            if waits_anywhere:
                self.take_out(request)
            request.failed_at = (*request.failed_at, replica.replica_id)
            request.failed_at_gone = tuple(one for one in request.failed_at_gone if one != came)
            if waits_anywhere:
                self.enqueue_for_any(request)

    def _count(self, request: RoutedRequest, more: int) -> None:
        """Add ``more``, 1 or -1, to the total number of waiting requests and to the number of the tenant's
        waiting requests."""
        self.waiting += more
        left = self.waiting_of.get(request.tenant, 0) + more
        if left:
            self.waiting_of[request.tenant] = left
        else:
            del self.waiting_of[request.tenant]

    def waiting_since(self, before_s: float, most: int) -> list[RoutedRequest]:
        """Return up to ``most`` requests that began to wait at or before the time ``before_s``. In each
        queue, the search stops at the first request that arrived after ``before_s``."""
        found: list[RoutedRequest] = []
        for queue in self.all_queues():
            for tenant_queue in queue.tenant_queues.values():
                for request in tenant_queue.since(before_s):
                    if len(found) >= most:
                        break
                    found.append(request)
        return found

    def waiting_requests(self) -> Iterator[RoutedRequest]:
        """Yield all requests in queues."""
        for queue in self.all_queues():
            yield from queue


@dataclass(slots=True)
class RoutingTables:
    """The replicas, programs, requests and tenants of one core."""

    fleet: ReplicaFleet
    programs: BoundedProgramTable[RoutedProgram]
    expected: ProgramEstimator
    tenants: TenantAccounting
    residents: ResidentPrograms
    homes: ProgramAffinity
    requests: RoutedRequestTable
    counts: RoutingCounters

    def is_current(self, program: RoutedProgram) -> bool:
        """Whether a program is still in the table of programs. A removed program may still have open
        requests."""
        return self.programs.get(program.key) is program


def build_routing_tables(
    routing: RoutingPolicy,
    sharing: SharePolicy,
    expected: ProgramEstimator,
    limits: RoutingLimits,
    counts: RoutingCounters,
    journal: HomeChangeLog,
    order: WaitingOrderPolicy | ArrivalOrder,
) -> RoutingTables:
    """Create empty tables for a core with these policies, limits and counters."""
    fleet = ReplicaFleet(limits.send_below_load)
    tenants = TenantAccounting(sharing, fleet, expected, limits.slo_factor, limits.usual_life_s, counts)
    residents = build_resident_programs(routing)
    return RoutingTables(
        fleet,
        BoundedProgramTable(),
        expected,
        tenants,
        residents,
        ProgramAffinity(fleet, tenants, journal, residents),
        RoutedRequestTable(fleet, tenants, residents, order),
        counts,
    )
