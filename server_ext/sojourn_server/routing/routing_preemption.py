"""Preemption between tenants: requests make way for a waiting request of a more urgent tenant (SAGA §6.2).

If the urgent request waits for a full replica, the core recalls requests that were sent to this replica and
have no first byte yet. If that is not enough, requests whose answers have begun must yield too. The core
sends this order to the replica's engine (``YieldPrograms``). Meanwhile the urgent request keeps waiting. If
the engine answers that enough requests yield (``YieldAnswered``), the urgent request is sent although the
replica is full. The engine preempts the yielding requests for it. If the engine refuses or does not answer,
nothing changes, and the engine is not asked again for some time.

If the urgent request waits for KV capacity, programs leave one of the replicas with the most free capacity. A
program may leave if it has only one request, and this request has no first byte yet. If the program's KV is
cached at the replica, another replica must also have capacity for the program.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import nlargest
from typing import NamedTuple

from ..policies.fairness.tenant_preemption import (
    BlockedRequestView,
    NoTenantPreemption,
    PreemptibleRequestView,
    TenantPreemptionPolicy,
    TenantStanding,
)
from ..policies.routing.replica_views import RoutingDecision
from .replica_fleet import Replica
from .request_placer import RequestPlacer
from .routing_events import RecallRequest, YieldAnswered, YieldPrograms
from .routing_limits import PolicyCallError
from .routing_queue import RoutedRequest, can_move
from .routing_tables import RoutingTables

MAX_BLOCKED_REQUESTS = 16
"""Maximum number of waiting requests per ``Tick`` for which other requests may be preempted."""
MAX_VICTIM_CANDIDATES = 64
"""Maximum number of requests of one replica that are examined to free KV capacity."""
MAX_VICTIM_REPLICAS = 4
"""Maximum number of replicas examined to free KV capacity: those with the most free capacity."""
ORDER_WAIT_S = 6.0
"""Seconds to wait for the answer to a ``YieldPrograms``. A gateway stops waiting for the engine after five
seconds and then answers itself."""
NO_YIELD_S = 30.0
"""Seconds for which a replica gets no ``YieldPrograms`` after its engine did not understand one or was
silent."""
REFUSED_S = 5.0
"""Seconds for which a replica gets no ``YieldPrograms`` after its engine answered that a request does not
yield."""
PREEMPTED_REASON = "made_way"
"""Reason of a ``SendRequest`` for a preempted request."""


class PreemptionPlan(NamedTuple):
    """A waiting request to serve next at a replica, and the requests that make way for it there."""

    blocked: RoutedRequest
    """The waiting request."""
    others: list[RoutedRequest]
    """The requests that make way."""
    replica_id: str
    for_capacity: bool
    """Whether ``blocked`` waits for KV capacity. If not, it waits for this replica, which is full."""


class _YieldOrder(NamedTuple):
    """A ``YieldPrograms`` that was sent and has not been answered."""

    plan: PreemptionPlan
    yielding: tuple[RoutedRequest, ...]
    """The plan's running requests."""
    instance: str
    """Instance of the replica that was asked. A later instance does not know the order."""
    until_s: float


class RoutingPreemption:
    """Finds requests to preempt for waiting requests of more urgent tenants. It asks the preemption policy
    about the oldest request of each tenant in each queue, and carries out the policy's decisions. The most
    urgent tenants come first."""

    def __init__(
        self,
        policy: TenantPreemptionPolicy | NoTenantPreemption,
        tables: RoutingTables,
        placer: RequestPlacer,
    ) -> None:
        self._policy = policy
        self._tables = tables
        self._fleet, self._requests, self._tenants = tables.fleet, tables.requests, tables.tenants
        self._placer = placer
        self._yielding: dict[str, str] = {}
        """Id of each running request that yields → id of the urgent request that it yields to."""
        self._orders: dict[str, _YieldOrder] = {}
        """Orders without an answer, by replica id. A replica has at most one."""

    def preempt_less_urgent(self, now: float) -> int:
        """Preempt requests of less urgent tenants; return how many were recalled from a replica. Raises
        ``PolicyCallError`` if a policy fails. Even then, each open request is in a queue or at a replica."""
        if self._yielding:
            self._forget_resumed(now)
        for replica_id, order in list(self._orders.items()):
            if now >= order.until_s:
                self.yield_answered(YieldAnswered(replica_id, order.plan.blocked.request_id, (), False), now)
        if not self._policy.is_used or not self._requests.waiting or len(self._tenants.shares) < 2:
            return 0
        recalled = 0
        for blocked in self._blocked(now):
            if blocked.sent_s is not None:
                continue  # an earlier preemption in this loop has sent it
            if blocked.replica_id is None:
                plan = self._preempt_for_capacity(blocked, now)
            else:
                plan = self._preempt_in_queue(blocked, blocked.replica_id, now)
            if plan is None:
                continue
            yielding = [request for request in plan.others if request.began]
            if yielding:
                self._order_yield(plan, yielding, now)
            else:
                recalled += self._carry_out(plan, now)
        return recalled

    def yield_answered(self, answer: YieldAnswered, now: float) -> int:
        """Process the answer to a ``YieldPrograms``; return how many requests were recalled. If enough
        requests yield, send the urgent request. If not, it keeps waiting. Raises ``PolicyCallError`` if a
        policy fails."""
        order = self._orders.get(answer.replica_id)
        if order is None or order.plan.blocked.request_id != answer.to_request_id:
            return 0  # the answer came too late
        del self._orders[answer.replica_id]
        replica = self._fleet.get(answer.replica_id)
        if replica is None or replica.instance != order.instance:
            return 0
        told = set(answer.programs)
        refused = [one for one in order.yielding if one.program is None or one.program.key not in told]
        if not answer.understood:
            replica.no_yields_until_s = now + NO_YIELD_S
        elif any(self._runs_at(one, replica) for one in refused):
            replica.no_yields_until_s = now + REFUSED_S
        blocked = order.plan.blocked
        if self._requests.by_id.get(blocked.request_id) is not blocked or blocked.sent_s is not None:
            return 0
        if blocked.replica_id != answer.replica_id:
            return 0
        yielding = [one for one in order.yielding if one not in refused and self._runs_at(one, replica)]
        if not yielding:
            return 0
        self._forget_resumed(now)
        others = [one for one in order.plan.others if self._can_be_recalled_from(one, replica)]
        tokens, requests = self._missing(replica, {one.request_id for one in yielding})
        if tokens > sum(one.context_tokens for one in others) or requests > len(others):
            return 0
        for request in yielding:
            self._yielding[request.request_id] = blocked.request_id
        try:
            return self._carry_out(order.plan._replace(others=others if tokens or requests else []), now)
        finally:
            is_sent = blocked.sent_s is not None
            self._tables.counts.yields += len(yielding) * is_sent
            for request in yielding:
                request.yields += is_sent
                if not is_sent:  # as after a policy's failure; then no request yields
                    del self._yielding[request.request_id]

    def _runs_at(self, request: RoutedRequest, replica: Replica) -> bool:
        """Whether a request is still being answered at a replica."""
        return request.request_id in replica.in_flight and request.began

    def _can_be_recalled_from(self, request: RoutedRequest, replica: Replica) -> bool:
        """Whether a request of a plan was sent to a replica and may still be recalled from it."""
        return request.request_id in replica.in_flight and not (request.began or request.recalled)

    def _missing(self, replica: Replica, yielding: Collection[str]) -> tuple[int, int]:
        """Return (tokens, requests) that must end before a full replica is no longer full. Requests that
        yield count as ended, because the engine does not compute them. These are the requests in
        ``yielding``, and those that yield already."""
        tokens, requests = self._fleet.missing(replica)
        for request_id, context_tokens in replica.in_flight.items():
            if request_id in self._yielding or request_id in yielding:
                tokens, requests = max(0, tokens - context_tokens), max(0, requests - 1)
        return tokens, requests

    def _carry_out(self, plan: PreemptionPlan, now: float) -> int:
        """Carry out a plan; return how many requests were recalled. Requests that lost their replica are
        queued again, even after an error."""
        unqueued: list[RoutedRequest] = []
        try:
            return self._apply_preemption(plan, unqueued, now)
        finally:
            for request in unqueued:
                request.needs_tokens = 0
                self._requests.enqueue_for_any(request)

    def _apply_preemption(self, plan: PreemptionPlan, unqueued: list[RoutedRequest], now: float) -> int:
        """Move the plan's requests and send the blocked one; return how many requests were recalled. Appends
        to ``unqueued`` the requests that the caller has to queue again."""
        recalled = 0
        for request in plan.others:
            program = request.program
            route = self._placer.route_away_from(request, plan.replica_id, now)
            if plan.for_capacity and route is None and program is not None and program.cached:
                continue  # an earlier request took the room elsewhere, so this one stays with its cached KV
            recalled += self._take_back(request, plan.replica_id, now)
            if not can_move(request):
                self._requests.enqueue_for_replica(request, plan.replica_id)
            elif route is not None:
                self._placer.send_or_queue(request, RoutingDecision(route.replica_id, PREEMPTED_REASON), now)
            elif plan.for_capacity and program is not None:
                self._tables.homes.leave(program, now)
                unqueued.append(request)
            else:
                self._requests.enqueue_for_replica(request, plan.replica_id)
        replica = self._fleet.get(plan.replica_id)
        plan.blocked.displaced_others = True
        if plan.for_capacity:
            self._placer.place(plan.blocked, None, now)
        elif replica is not None and self._missing(replica, ()) == (0, 0):
            self._requests.take_out(plan.blocked)
            self._placer.send(plan.blocked, replica, now)
        return recalled

    def _order_yield(self, plan: PreemptionPlan, yielding: list[RoutedRequest], now: float) -> None:
        """Order running requests of a replica to yield. ``yield_answered`` then carries out the plan."""
        replica, to = self._fleet.get(plan.replica_id), plan.blocked.program
        assert replica is not None
        assert to is not None
        programs = tuple(request.program.key for request in yielding if request.program is not None)
        self._orders[plan.replica_id] = _YieldOrder(
            plan, tuple(yielding), replica.instance, now + ORDER_WAIT_S
        )
        self._placer.actions.append(
            YieldPrograms(plan.replica_id, to.tenant, to.key[1], programs, plan.blocked.request_id)
        )

    def _forget_resumed(self, now: float) -> None:
        """Forget the requests that yield no longer, because the urgent request has ended or left the replica.

        The replica does not report when it resumes such a request, so ``ran_since_s`` becomes ``now``."""
        by_id = self._requests.by_id
        for request_id, urgent_id in list(self._yielding.items()):
            request, urgent = by_id.get(request_id), by_id.get(urgent_id)
            if request is None or urgent is None or urgent.replica_id != request.replica_id:
                del self._yielding[request_id]
                if request is not None:
                    request.ran_since_s = now

    def _take_back(self, request: RoutedRequest, replica_id: str, now: float) -> bool:
        """Remove a request from its queue, or recall it from its replica. Returns whether it was recalled."""
        if request.sent_s is None:
            self._requests.take_out(request)
            return False
        self._requests.undo_send(request, now)
        request.recalled, request.recalled_from = True, replica_id
        self._placer.actions.append(RecallRequest(request.request_id, replica_id))
        return True

    def _blocked(self, now: float) -> list[RoutedRequest]:
        """Return the blocked requests: the oldest request of each tenant in each queue, if it has waited for
        at least the policy's ``blocked_s`` seconds. Requests of tenants with the largest shares come first.
        At most ``MAX_BLOCKED_REQUESTS`` are returned."""
        shares = self._tenants.shares
        firsts = [
            waiting.oldest
            for queue in self._requests.all_queues()
            for waiting in queue.tenant_queues.values()
        ]
        waited = [request for request in firsts if now - request.waiting_since_s >= self._policy.blocked_s]
        waited.sort(key=lambda request: (-shares.get(request.tenant, 0.0), request.number))
        return waited[:MAX_BLOCKED_REQUESTS]

    def _preempt_in_queue(self, blocked: RoutedRequest, replica_id: str, now: float) -> PreemptionPlan | None:
        """Plan which requests at a full replica make way, so that ``blocked`` can be sent there; ``None``:
        there is no such plan."""
        replica = self._fleet.get(replica_id)
        if replica is None:
            return None
        tokens, requests = self._missing(replica, ())
        capacity = self._fleet.capacity_tokens
        may_yield = replica_id not in self._orders and now >= replica.no_yields_until_s
        others = []
        for one in map(self._requests.by_id.__getitem__, replica.in_flight):
            if one.request_id in self._yielding or one.tenant == blocked.tenant:
                continue
            if self._may_make_way(one, blocked) and (may_yield or not one.began):
                others.append(
                    PreemptibleRequestView(
                        one.request_id,
                        one.tenant,
                        one.context_tokens,
                        one.context_tokens / capacity,
                        one.sent_s,
                        one.began,
                        now - one.ran_since_s,
                        one.yields,
                    )
                )
        view = BlockedRequestView(
            blocked.request_id,
            blocked.tenant,
            now - blocked.waiting_since_s,
            blocked.context_tokens / capacity,
            tokens,
            requests,
        )
        return self._ask_policy(blocked, view, others, replica_id, for_capacity=False)

    def _may_make_way(self, request: RoutedRequest, urgent: RoutedRequest) -> bool:
        """Whether a request of a full replica may be recalled or, if its answer has begun, may yield."""
        if request.recalled or request.displaced_others:
            return False
        program = request.program
        if not request.began:
            return True
        # Engines know programs, not the gateway's requests.
        return (
            self._policy.most_yields > 0
            and urgent.program is not None
            and program is not None
            and program.in_flight == 1
            and self._tables.is_current(program)
        )

    def _preempt_for_capacity(self, blocked: RoutedRequest, now: float) -> PreemptionPlan | None:
        """Plan which programs leave a replica, so that ``blocked`` has enough KV capacity there; ``None``:
        there is no such plan."""
        if not blocked.needs_tokens:
            return None
        roomy = [view for view in self._fleet.views if view.takes_new]
        for view in nlargest(MAX_VICTIM_REPLICAS, roomy, key=lambda view: view.room_tokens):
            replica = self._fleet.get(view.replica_id)
            if replica is not None:
                plan = self._preempt_for_capacity_at(replica, view.room_tokens, blocked, now)
                if plan is not None:
                    return plan
        return None

    def _preempt_for_capacity_at(
        self, replica: Replica, room_tokens: int, blocked: RoutedRequest, now: float
    ) -> PreemptionPlan | None:
        """Plan which programs leave this replica, so that ``blocked`` has enough KV capacity here; ``None``:
        there is no such plan. ``room_tokens``: KV capacity that is free already."""
        room = self._fleet.total_kv_tokens
        others = []
        for request in self._at_home(replica):
            program = request.program
            assert program is not None
            if request.tenant == blocked.tenant:
                continue
            if program.cached and self._placer.route_away_from(request, replica.replica_id, now) is None:
                continue
            size = program.size_tokens
            others.append(
                PreemptibleRequestView(request.request_id, request.tenant, size, size / room, request.sent_s)
            )
        view = BlockedRequestView(
            blocked.request_id,
            blocked.tenant,
            now - blocked.waiting_since_s,
            blocked.needs_tokens / room,
            blocked.needs_tokens - room_tokens,
        )
        return self._ask_policy(blocked, view, others, replica.replica_id, for_capacity=True)

    def _at_home(self, replica: Replica) -> list[RoutedRequest]:
        """Return the requests whose programs have their home at this replica and could leave it, at most
        ``MAX_VICTIM_CANDIDATES``. Waiting requests come first, oldest first. Sent requests follow, newest
        first."""
        queue = self._requests.queues.get(replica.replica_id)
        request = queue.oldest(MAX_VICTIM_CANDIDATES) if queue is not None else []
        newest = [self._requests.by_id[request_id] for request_id in reversed(replica.in_flight)]
        found = []
        for one in [*request, *newest]:
            program = one.program
            if program is None or program.home != replica.replica_id or one.began or one.recalled:
                continue
            alone = program.in_flight + program.waiting == 1
            if alone and program.moved_at_turn != program.turns and self._tables.is_current(program):
                found.append(one)
        return found[:MAX_VICTIM_CANDIDATES]

    def _ask_policy(
        self,
        blocked: RoutedRequest,
        view: BlockedRequestView,
        others: list[PreemptibleRequestView],
        replica_id: str,
        *,
        for_capacity: bool,
    ) -> PreemptionPlan | None:
        """Ask the policy which of ``others`` make way for ``blocked``, and return the plan; ``None``: no
        request makes way. ``for_capacity``: whether ``blocked`` waits for KV capacity."""
        if not others:
            return None
        tenants = self._tenants
        yielded: dict[str, float] = {}
        if not for_capacity:
            for request_id in self._yielding:
                one = self._requests.by_id[request_id]
                share = one.context_tokens / self._fleet.capacity_tokens
                yielded[one.tenant] = yielded.get(one.tenant, 0.0) + share
        standings = {
            tenant: TenantStanding(
                tenants.shares.get(tenant, 0.0),
                max(0.0, tenants.used(tenant, room=for_capacity) - yielded.get(tenant, 0.0)),
            )
            for tenant in {blocked.tenant, *(other.tenant for other in others)}
        }
        known = {other.request_id for other in others}
        try:
            named = list(self._policy.preempt_less_urgent(view, others, standings))
        except Exception as error:
            raise PolicyCallError(f"the preemption policy failed at request {view.request_id!r}") from error
        chosen = [request_id for request_id in named if request_id in known]
        if not chosen:
            return None
        return PreemptionPlan(blocked, [self._requests.by_id[i] for i in chosen], replica_id, for_capacity)
