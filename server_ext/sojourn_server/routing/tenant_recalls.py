"""Preemption between tenants: requests without output make way for a waiting request of a more urgent tenant
(SAGA §6.2).

If the urgent request waits for a full replica, requests that were sent to this replica and have no first
byte yet are recalled. If it waits for KV capacity, programs leave one of the replicas with the most free
capacity. A program may leave if it has only one request, and this request has no first byte yet. If the
program's KV is cached at the replica, another replica must also have capacity for the program.
"""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple, Protocol

from ..policies.fairness.tenant_preemption import (
    BlockedRequestView,
    NoTenantPreemption,
    PreemptibleRequestView,
    TenantPreemptionPolicy,
    TenantStanding,
)
from ..policies.routing.replica_views import RoutingDecision
from .routing_core import Placement, RoutingCore
from .routing_limits import PolicyCallError
from .routing_records import Replica, RoutedRequest
from .tenant_shares import TenantShares
from .waiting_queues import WaitingQueue

MAX_BLOCKED_REQUESTS = 16
"""Maximum number of waiting requests per ``Tick`` for which other requests may be preempted."""
MAX_VICTIM_CANDIDATES = 64
"""Maximum number of requests of one replica that are examined to free KV capacity."""
MAX_VICTIM_REPLICAS = 4
"""Maximum number of replicas examined to free KV capacity: those with the most free capacity."""
PREEMPTED_REASON = "made_way"
"""Reason of a ``SendRequest`` for a preempted request."""


class QueueingStrategy(Protocol):
    """The strategy whose queued and sent requests make way."""

    queues: dict[str, WaitingQueue]

    def all_queues(self) -> list[WaitingQueue]: ...
    def route_away(self, request: RoutedRequest, replica_id: str, now: float) -> RoutingDecision | None: ...
    def place(self, request: RoutedRequest, but: str | None, now: float) -> RoutingDecision: ...
    def enqueue_again(self, request: RoutedRequest) -> None: ...
    def enqueue_at(self, request: RoutedRequest, replica: Replica) -> None: ...
    def dequeue(self, request: RoutedRequest) -> None: ...


class RecallPlan(NamedTuple):
    """A waiting request to serve next at a replica, and the requests that make way for it there."""

    blocked: RoutedRequest
    others: list[RoutedRequest]
    replica: Replica
    for_capacity: bool
    """Whether ``blocked`` waits for KV capacity. If not, it waits for this replica, which is full."""


class TenantRecalls:
    """Asks the preemption policy about the oldest request of each tenant in each queue, and carries out
    the policy's decisions. The most urgent tenants come first."""

    def __init__(
        self,
        policy: TenantPreemptionPolicy | NoTenantPreemption,
        core: RoutingCore,
        strategy: QueueingStrategy,
        tenants: TenantShares,
    ) -> None:
        self._policy = policy
        self._core = core
        self._fleet = core.fleet
        self._strategy = strategy
        self._tenants = tenants

    def make_way(self, now: float) -> int:
        """Preempt requests of less urgent tenants; return how many were recalled from a replica. Raises
        ``PolicyCallError`` if a policy fails. Even then, each open request is in a queue or at a replica."""
        if not self._policy.is_used or not self._core.waiting or len(self._tenants.shares) < 2:
            return 0
        recalled = 0
        for blocked in self._blocked(now):
            if blocked.sent is not None:
                continue  # an earlier preemption in this loop has sent it
            if blocked.replica_id is None:
                plan = self._plan_for_capacity(blocked, now)
            else:
                plan = self._plan_in_queue(blocked, self._fleet.get(blocked.replica_id), now)
            if plan is not None:
                recalled += self._carry_out(plan, now)
        return recalled

    def _blocked(self, now: float) -> list[RoutedRequest]:
        """Return the blocked requests: the oldest request of each tenant in each queue, if it has waited
        for at least the policy's ``blocked_s`` seconds. Requests of tenants with the largest shares come
        first."""
        shares = self._tenants.shares
        firsts = [one.oldest for queue in self._strategy.all_queues() for one in queue.tenants.values()]
        waited = [request for request in firsts if now - request.waiting_since_s >= self._policy.blocked_s]
        waited.sort(key=lambda request: (-shares.get(request.tenant, 0.0), request.number))
        return waited[:MAX_BLOCKED_REQUESTS]

    def _plan_in_queue(
        self, blocked: RoutedRequest, replica: Replica | None, now: float
    ) -> RecallPlan | None:
        """Plan which requests at a full replica make way, so that ``blocked`` can be sent there; ``None``:
        there is no such plan."""
        if replica is None:
            return None
        tokens, requests = self._fleet.missing(replica)
        capacity = self._fleet.capacity_tokens
        others = [
            PreemptibleRequestView(
                one.request_id, one.tenant, one.context_tokens, one.context_tokens / capacity, one.sent_s
            )
            for one in replica.in_flight.values()
            if one.tenant != blocked.tenant and not (one.began or one.recalled or one.displaced_others)
        ]
        view = BlockedRequestView(
            blocked.request_id,
            blocked.tenant,
            now - blocked.waiting_since_s,
            blocked.context_tokens / capacity,
            tokens,
            requests,
        )
        return self._ask_policy(blocked, view, others, replica, for_capacity=False)

    def _plan_for_capacity(self, blocked: RoutedRequest, now: float) -> RecallPlan | None:
        """Plan which programs leave a replica, so that ``blocked`` has enough KV capacity there; ``None``:
        there is no such plan."""
        if not blocked.needs_tokens:
            return None
        memory = self._fleet.memory_tokens
        roomy = [replica for replica in self._fleet.values() if replica.view().takes_new]
        for replica in nlargest(MAX_VICTIM_REPLICAS, roomy, key=lambda one: one.view().room_tokens):
            others = []
            for request in self._at_home(replica):
                program = request.program
                assert program is not None
                if request.tenant == blocked.tenant:
                    continue
                if program.cached and self._strategy.route_away(request, replica.replica_id, now) is None:
                    continue
                size = program.size_tokens
                sent_s = request.sent_s if request.sent is not None else None
                others.append(
                    PreemptibleRequestView(request.request_id, request.tenant, size, size / memory, sent_s)
                )
            view = BlockedRequestView(
                blocked.request_id,
                blocked.tenant,
                now - blocked.waiting_since_s,
                blocked.needs_tokens / memory,
                blocked.needs_tokens - replica.view().room_tokens,
            )
            plan = self._ask_policy(blocked, view, others, replica, for_capacity=True)
            if plan is not None:
                return plan
        return None

    def _at_home(self, replica: Replica) -> list[RoutedRequest]:
        """Return the requests whose programs have their home at this replica and could leave it, at most
        ``MAX_VICTIM_CANDIDATES``. Waiting requests come first, oldest first. Sent requests follow, newest
        first."""
        queue = self._strategy.queues.get(replica.replica_id)
        waiting = queue.oldest(MAX_VICTIM_CANDIDATES) if queue is not None else []
        found = []
        for one in [*waiting, *reversed(replica.in_flight.values())]:
            program = one.program
            if program is None or program.home != replica.replica_id or one.began or one.recalled:
                continue
            is_alone = program.in_flight + program.waiting == 1
            if (
                is_alone
                and program.moved_at_turn != program.turns
                and self._core.programs.get(program.key) is program
            ):
                found.append(one)
        return found[:MAX_VICTIM_CANDIDATES]

    def _ask_policy(
        self,
        blocked: RoutedRequest,
        view: BlockedRequestView,
        others: list[PreemptibleRequestView],
        replica: Replica,
        *,
        for_capacity: bool,
    ) -> RecallPlan | None:
        """Ask the policy which of ``others`` make way for ``blocked``, and return the plan; ``None``: no
        request makes way. ``for_capacity``: whether ``blocked`` waits for KV capacity."""
        if not others:
            return None
        tenants = self._tenants
        standings = {
            tenant: TenantStanding(tenants.shares.get(tenant, 0.0), tenants.used(tenant, room=for_capacity))
            for tenant in {blocked.tenant, *(other.tenant for other in others)}
        }
        known = {other.request_id for other in others}
        try:
            named = list(self._policy.preempt_less_urgent(view, others, standings))
        except Exception as error:
            raise PolicyCallError(f"the preemption policy failed at request {view.request_id!r}") from error
        chosen = [self._core.requests[request_id] for request_id in named if request_id in known]
        return RecallPlan(blocked, chosen, replica, for_capacity) if chosen else None

    def _carry_out(self, plan: RecallPlan, now: float) -> int:
        """Carry out a plan; return how many requests were recalled. A request that lost its home is queued
        again only after the blocked request has its place, even after an error."""
        unqueued: list[RoutedRequest] = []
        try:
            return self._apply(plan, unqueued, now)
        finally:
            for request in unqueued:
                self._strategy.enqueue_again(request)

    def _apply(self, plan: RecallPlan, unqueued: list[RoutedRequest], now: float) -> int:
        """Move the plan's requests and send the blocked one; return how many requests were recalled.
        Appends to ``unqueued`` the requests that the caller has to queue again."""
        core, strategy, replica = self._core, self._strategy, plan.replica
        recalled = 0
        for request in plan.others:
            program = request.program
            route = strategy.route_away(request, replica.replica_id, now)
            if plan.for_capacity and route is None and program is not None and program.cached:
                continue  # an earlier request took the room elsewhere, so this one stays with its cached KV
            if request.sent is not None:
                core.recall(request, now)
                recalled += 1
            else:
                strategy.dequeue(request)
            if not request.can_move:
                strategy.enqueue_at(request, replica)
            elif route is not None and route.replica_id is not None:
                core.place(request, Placement(route.replica_id, PREEMPTED_REASON), now)
            elif plan.for_capacity and program is not None:
                core.leave_home(program)
                unqueued.append(request)
            else:
                strategy.enqueue_at(request, replica)
        plan.blocked.displaced_others = True
        if plan.for_capacity:
            strategy.place(plan.blocked, None, now)
        elif self._fleet.missing(replica) == (0, 0):
            strategy.dequeue(plan.blocked)
            core.send(plan.blocked, Placement(replica.replica_id, plan.blocked.reason), now)
        return recalled
