"""Strategy that sends all turns of a program to one replica, the program's home. Policies choose replicas,
move waiting requests to idle replicas, and order the tenants.

If no replica has capacity, a request waits, and its routing decision states the KV capacity that it needs. A
pass over the queue follows the order of arrival, the preset's order or the tenants' shares. It routes again
only requests that fit into the largest free capacity of a replica. So a request that needs less may overtake
one that needs more. The oldest request of a tenant's queue is *late* in three cases:

- It arrived at least ``queue_patience_s`` seconds ago. With an order other than that of arrival, this counts
  from the time at which the request became the oldest.
- At least ``queue_patience_requests`` other requests were admitted since it became the oldest.
- It arrived at least half of the time ago that a request may wait.

For a late request, the replica with the most free capacity is reserved. That replica accepts no other
program until it has enough capacity for the request, or has no programs left. Only one replica is reserved
at a time, for the tenant that is served first. Tenants that are served before that tenant do not wait for
its late request. A late request that fits is served before all other requests of its queue. So each
request is served in the end.

If tenants share the capacity (SAGA §6), ``TenantShares`` says whose turn it is, and requests without output
make way for one of a more urgent tenant (SAGA §6.2). If that one waits for a full replica, requests that
were sent there and have no first byte are recalled. If it waits for KV capacity, programs leave one of the
replicas with the most free capacity, if they have one request, and that one has no first byte.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest

from ..policies import routing_policies as policies
from ..policies.fairness_policies import (
    BlockedRequestView,
    PreemptibleRequestView,
    SharePolicy,
    TenantPreemptionPolicy,
    TenantStanding,
)
from .routing_core import RoutingCore, RoutingStrategy, TenantShares
from .routing_events import KvReported, SendRequest
from .routing_limits import PolicyCallError
from .routing_records import Replica, ReplicaHealth, RoutedProgram, RoutedRequest, WaitingQueue

MAX_REPLICAS_COMPARED = 8
"""Maximum number of replicas offered to a policy with ``reads_residents``, for a request without cached
KV. These are the replicas with the most free capacity."""
MAX_PREFIX_PIECES = 200_000
"""Maximum number of prompt pieces remembered per replica; each takes a few hundred bytes of memory."""
MAX_STEAL_CANDIDATES = 8
"""Maximum number of requests of a replica's queue that are examined for stealing, the oldest first."""
MAX_STEALS_PER_ROUND = 64
"""Maximum number of requests that work stealing moves at one event."""
MIN_ENGINE_WAIT_S = 5.0
"""A request counts as waiting in its engine only if it was sent at least this many seconds ago."""
MAX_BLOCKED_REQUESTS = 16
"""Maximum number of waiting requests per ``Tick`` for which other requests may be preempted."""
MAX_VICTIM_CANDIDATES = 64
"""Maximum number of requests of one replica that are examined to free KV capacity."""
MAX_VICTIM_REPLICAS = 4
"""Maximum number of replicas examined to free KV capacity: those with the most free capacity."""
PREEMPTED_REASON = "made_way"
"""Reason of a ``SendRequest`` for a request that made way."""
RELOCATED_REASON = "relocated"
"""Reason of a ``SendRequest`` for a request that had waited in another engine."""


class AffinityStrategy(RoutingStrategy):
    """Sends all turns of a program to its home (see the module's docstring).

    ``routing`` chooses replicas, ``stealing`` moves waiting requests to idle replicas, and ``sharing``
    divides the capacity among tenants. ``preemption`` chooses the requests that make way for more urgent
    tenants; ``None``: none do. ``order`` is the order in which requests wait for capacity; ``None``: the
    order of arrival."""

    unit = "replica"

    def __init__(
        self,
        routing: policies.RoutingPolicy,
        stealing: policies.StealingPolicy,
        sharing: SharePolicy,
        *,
        preemption: TenantPreemptionPolicy | None = None,
        order: policies.WaitingOrderPolicy | None = None,
    ) -> None:
        self._routing = routing
        self._stealing = stealing
        self.sharing = sharing if sharing.divides_capacity else None
        self._preemption = preemption or TenantPreemptionPolicy()
        self._order = order or policies.WaitingOrderPolicy()
        self._reads_residents = bool(getattr(routing, "reads_residents", False))
        self._resident_for_s = float(getattr(routing, "resident_for_s", math.inf))
        self._prefixes: dict[str, OrderedDict[int, None]] = {}
        """Hashes of the prompt pieces that were sent to each replica, least recently used first. A piece's
        hash covers all pieces before it, so a prompt matches up to its first unknown hash."""
        self.anywhere = WaitingQueue(by_arrival=self._order.by_arrival)
        """Requests that wait for any replica and have not failed at one."""
        self.failed: dict[str, RoutedRequest] = {}
        """Requests that failed at a replica and wait for another one, by id. They are apart, because they
        cannot use free capacity of the replica where they failed."""
        self.capacity_changed = False
        """True if capacity may have become free, or if a request has to be routed again."""
        self.reserved: str | None = None
        """Id of the replica that is reserved for a late request; ``None``: no replica is."""
        self._admitted = 0
        """Number of requests that got a replica so far, including new requests that did not wait."""
        self._is_closed_to_new = False
        """True if the capacity that some waiting request needs is unknown. Then new requests wait too, except
        those that go to their program's home or may pass waiting ones."""

    def attach(self, core: RoutingCore) -> None:
        self._core = core
        self._fleet = core.fleet
        self.tenants = core.tenants

    # -- queries ------------------------------------------------------------------

    def longest_tokens(self) -> int:
        return self._fleet.longest_tokens

    # -- bookkeeping --------------------------------------------------------------

    def changed(self, request: RoutedRequest, now: float, *, frees: bool) -> None:
        program = request.program
        if program is not None:
            if not self._order.by_arrival:
                program.idleness.update(now, running=program.in_flight > 0, live=not program.is_idle)
            self._regroup(program)
        self.capacity_changed |= frees
        if not frees and request.sent is not None and self._routing.reads_prefixes:
            self._add_prefix(request.sent.replica_id, request.prefix)

    def answered_at_home(self, program: RoutedProgram) -> None:
        self._estimate_turns(program)

    def homed(self, program: RoutedProgram, tokens: int) -> None:
        self.capacity_changed |= tokens < 0
        if program.waiting and program.cached:
            # The program has its KV at its home now, so its waiting requests need no further capacity.
            for request in self.anywhere.of(program):
                request.needs_tokens, self.capacity_changed = 0, True

    def _regroup(self, program: RoutedProgram) -> None:
        """Note that a program's open requests or turns have changed."""
        home = self._fleet.get(program.home)
        if home is not None:
            home.groups = None

    def enqueue(self, request: RoutedRequest) -> None:
        request.replica_id = None
        if request.failed_at:
            self.failed[request.request_id] = request
            self.capacity_changed = True
            return
        program = request.program
        request.queue_key = self._order.key(
            policies.WaitingProgramView(
                request.number,
                program is not None and program.turns > 0,
                program.idleness.idleness(request.since_s) if program is not None else 0.0,
                request.context_tokens,
                max(request.size_tokens, request.context_tokens),
            )
        )
        self.anywhere.add(request)

    def enqueue_again(self, request: RoutedRequest) -> None:
        """Add a request, which is in no queue, to the queue for any replica, to be routed soon."""
        request.needs_tokens = 0
        self.enqueue(request)
        self.capacity_changed = True

    def dequeue(self, request: RoutedRequest) -> None:
        if self.failed.pop(request.request_id, None) is None:
            self.anywhere.remove(request)

    # -- replicas -----------------------------------------------------------------

    def registered(self, replica: Replica, now: float, *, was: ReplicaHealth | None) -> None:
        self.capacity_changed = True
        if was is not None and was is not ReplicaHealth.UP:
            for request in self.anywhere:
                if request.program is not None and request.program.home == replica.replica_id:
                    request.needs_tokens = 0

    def health_changed(self, replica: Replica, now: float) -> None:
        self.capacity_changed = True
        if replica.health is ReplicaHealth.DRAINING:
            self._release(replica.queue)

    def lost(self, replica: Replica, now: float) -> None:
        self._release(replica.queue)
        self._prefixes.pop(replica.replica_id, None)
        self.capacity_changed = True

    def _release(self, requests: Iterable[RoutedRequest]) -> None:
        """Let requests that wait for one replica wait for any, unless only that one may serve them."""
        for request in [one for one in requests if one.only_replica_id is None]:
            self._core.dequeue(request)
            self.enqueue_again(request)

    # -- choice -------------------------------------------------------------------

    def choose(self, request: RoutedRequest, now: float) -> SendRequest | None:
        route = self.route(request, now, self.reserved)
        home = request.program.home if request.program is not None else None
        comes_new = route.replica_id not in (None, home) and not route.passes
        if comes_new and self._is_closed_to_new and self.anywhere.lanes:
            return None
        replica = self._fleet.get(route.replica_id)
        if replica is None:
            self._is_closed_to_new |= not route.needs_tokens
            # This request could not use the reserved replica. A new pass may reserve another, or none.
            self.capacity_changed |= self.reserved is not None
            request.needs_tokens = route.needs_tokens
            return None
        self._admitted += route.replica_id != home
        return SendRequest(request.request_id, replica.replica_id, route.reason)

    def route(
        self, request: RoutedRequest, now: float, but: str | None = None, *, leaves: bool = False
    ) -> policies.RoutingDecision:
        """Return the routing policy's decision about a request, without carrying it out.

        ``but``: a replica that is reserved for another, late request; ``None``: none is. In the policy's
        view, this replica and the replicas where the request failed accept no new programs. ``leaves``:
        the policy decides as if the program had no home. Raises ``PolicyCallError`` if the policy fails."""
        fleet, program = self._fleet, request.program
        failed_at: set[str] = set()
        if request.failed_at:
            ids = {(one.replica_id, one.instance) for one in fleet.values()}
            failed_at = {name for name, _ in ids & request.failed_at}
        shut = failed_at if but is None else {*failed_at, but}
        home = parent_home = None
        if program is not None and not leaves:
            at = fleet.get(program.home)
            # A request that has failed once does not test whether a suspect home is alive.
            if (
                at is not None
                and at.health is not ReplicaHealth.DRAINING
                and not (request.failures and at.health is ReplicaHealth.SUSPECT)
                and at.replica_id not in failed_at
            ):
                home = at.view()
            if program.parent is not None and not program.turns:
                parent = self._core.programs.get(program.parent)
                near = fleet.get(parent.home) if parent is not None else None
                if near is not None and near.replica_id not in shut:
                    parent_home = near.view()
        view = policies.RoutingView(
            request.request_id,
            request.number,
            request.context_tokens,
            request.size_tokens,
            home,
            program is not None and (program.cached or program.in_flight > 0),
            parent_home,
            self._matches(request) if self._routing.reads_prefixes else {},
        )
        views = []
        for replica in fleet.values():
            one = replica.known_view or replica.view()
            views.append(one._replace(takes_new=False) if replica.replica_id in shut else one)
        if self._reads_residents and not (view.home is not None and view.cached):
            if len(views) > MAX_REPLICAS_COMPARED:
                views = nlargest(MAX_REPLICAS_COMPARED, views, key=_roominess)
            self._estimate_turns(program)
            shown = {one.replica_id: groups for one in views if (groups := self._groups(one, program, now))}
            view = view._replace(turns_left=_turns_left(program), residents=shown)
        try:
            return self._routing.route(view, views, now)
        except Exception as error:
            raise PolicyCallError(f"no route for request {request.request_id!r}") from error

    def route_away(
        self, request: RoutedRequest, replica_id: str, now: float
    ) -> policies.RoutingDecision | None:
        """Return the route that a request would get if its program left ``replica_id``; ``None``: the
        request would have to wait. Changes nothing."""
        route = self.route(request, now, replica_id, leaves=True)
        replica = self._fleet.get(route.replica_id)
        return None if replica is None or replica.is_full else route

    # -- prompts that replicas have computed -----------------------------------------

    def _add_prefix(self, replica_id: str, prefix: Sequence[int]) -> None:
        known = self._prefixes.setdefault(replica_id, OrderedDict())
        # Last piece first, so that the end of a prompt is forgotten before its beginning.
        for piece in reversed(prefix):
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > MAX_PREFIX_PIECES:
            known.popitem(last=False)

    def _matches(self, request: RoutedRequest) -> dict[str, int]:
        """Estimate how many of the prompt's first tokens each replica has computed, by replica id.
        Replicas without any of these tokens are left out. All pieces are assumed to have the same number
        of tokens."""
        prefix, found = request.prefix, {}
        for replica_id, known in self._prefixes.items():
            pieces = next((n for n, piece in enumerate(prefix) if piece not in known), len(prefix))
            if pieces:
                found[replica_id] = request.context_tokens * pieces // len(prefix)
        return found

    # -- resident programs -------------------------------------------------------------

    def _estimate_turns(self, program: RoutedProgram | None) -> None:
        """Estimate again how many turns a program has left, if the policy reads this number."""
        if self._reads_residents and program is not None:
            program.turns_left = self._core.estimator.turns_left(program)
            self._regroup(program)

    def _groups(
        self, view: policies.ReplicaView, but: RoutedProgram | None, now: float
    ) -> tuple[policies.ResidentProgramGroup, ...]:
        """Return the resident programs of a replica, those with the same past and future turns as one
        group. A program is resident if it has an open request or is expected to send one. Many clients
        never end their programs, so one without an open request counts for a limited time, and not at all
        if its turns left are unknown. ``but``: a program that does not count."""
        replica = self._fleet.get(view.replica_id)
        assert replica is not None
        is_alone = but is None or but.home != replica.replica_id
        if is_alone and replica.groups is not None and now < replica.groups_until_s:
            return replica.groups
        sums: dict[tuple[float, int], list[int]] = {}
        until_s = math.inf
        for program in replica.programs.values():
            if program is but:
                continue
            if program.is_idle:
                over_s = program.last_s + self._resident_for_s
                if program.turns_left is None or now >= over_s:
                    continue
                until_s = min(until_s, over_s)
            row = sums.setdefault((_turns_left(program), program.turns), [0, 0, 0])
            row[0] += program.context_tokens
            row[1] += max(program.size_tokens, program.context_tokens)
            row[2] += 1
        groups = tuple(
            policies.ResidentProgramGroup(context, size, turns, left, count)
            for (left, turns), (context, size, count) in sorted(sums.items())
        )
        if is_alone:
            replica.groups, replica.groups_until_s = groups, until_s
        return groups

    # -- dispatch ---------------------------------------------------------------------

    def dispatch(self, now: float, *, epoch: bool) -> None:
        """Send the requests for which a replica has capacity. Work stealing runs on a ``Tick``, and on
        other events if a replica registered or stopped being full. Preemption between tenants runs only on
        a ``Tick``."""
        if not self._core.waiting:  # the usual case: nothing to send, steal, reserve for or make way for
            self.capacity_changed = self._is_closed_to_new = self._fleet.newly_idle = False
            self.reserved = None
            return
        self.capacity_changed |= epoch  # as time passes, requests become late, and only a pass finds them
        self._send_eligible(now)
        if epoch or self._fleet.newly_idle:
            self._fleet.newly_idle = False
            with self._counted_failures():
                self._steal(now)
            self._send_eligible(now)
        if epoch and self.tenants is not None:
            with self._counted_failures():
                self._make_way(self.tenants, now)
            self._send_eligible(now)

    @contextmanager
    def _counted_failures(self) -> Iterator[None]:
        """Count a ``PolicyCallError`` of the block. The policy is called again on the next ``Tick``."""
        try:
            yield
        except PolicyCallError as error:
            self._core.counts.policy_failed(error)

    def _send_eligible(self, now: float) -> None:
        """Send requests that wait for any replica, as long as some replica has capacity. Then send
        requests that wait for one replica, as long as it is not full."""
        while self.capacity_changed:
            self.capacity_changed = False
            self._send_failed(now)
            self._pass(now)
        for replica in sorted(self._fleet.values(), key=lambda one: one.replica_id):
            while (lanes := replica.queue.lanes) and replica.idle_since_s is not None:
                request = lanes[self._order_lanes(replica.queue, lanes, room=False)[0]][0]
                self._core.dequeue(request)
                self._core.send(request, now)

    def place(self, request: RoutedRequest, but: str | None, now: float) -> policies.RoutingDecision:
        """Route a request that waits for any replica; return the decision. If a replica is found, send the
        request there or add it to the replica's queue. ``but``: a replica that takes no new program;
        ``None``: none."""
        route = self.route(request, now, but)
        replica = self._fleet.get(route.replica_id)
        if replica is not None:
            self._core.dequeue(request)
            self._place_at(request, replica.replica_id, route.reason, now)
        return route

    def _place_at(self, request: RoutedRequest, replica_id: str, reason: str, now: float) -> None:
        self._core.place(request, SendRequest(request.request_id, replica_id, reason), now)

    def _place_or_reject(self, request: RoutedRequest, now: float) -> policies.RoutingDecision:
        try:
            return self.place(request, self.reserved, now)
        except PolicyCallError as error:
            self._core.reject_unrouted(request, error, now)
            return policies.RoutingDecision("", "policy_failed")

    def _send_failed(self, now: float) -> None:
        """Route again the oldest requests that failed at a replica. Reject a request that no living
        replica can retry."""
        if not self.failed:
            return
        for request in sorted(self.failed.values(), key=lambda request: request.number):
            failed_here = [
                (one.replica_id, one.instance) in request.failed_at for one in self._fleet.values()
            ]
            # A suspect replica may soon be replaced by a new instance, which may retry the request.
            if not any(failed_here) or any(
                one.health is ReplicaHealth.SUSPECT if failed else one.health is not ReplicaHealth.DRAINING
                for one, failed in zip(self._fleet.values(), failed_here, strict=True)
            ):
                self._place_or_reject(request, now)
            else:
                self._core.give_up(request, now)

    def _pass(self, now: float) -> None:
        """Route the waiting requests that may fit (see the module's docstring)."""
        self.reserved, self._is_closed_to_new = None, False
        queue, fleet = self.anywhere, self._fleet
        most_known = math.inf
        while (best := fleet.most_room(self.reserved)) is not None:
            most = min(most_known, _max_fitting_tokens(best))
            lanes = [
                lane
                for lane, waiting in queue.lanes.items()
                if any(one.needs_tokens <= most for one in waiting)
                or (self.reserved is None and self._is_late(queue.first(lane), now))
            ]
            if not lanes:
                return
            lane = self._order_lanes(queue, lanes, room=True)[0]
            oldest = queue.first(lane)
            if self.reserved is None and oldest.needs_tokens > most and self._is_late(oldest, now):
                self.reserved = best.replica_id
                continue
            request = oldest
            if self._order.by_arrival or oldest.needs_tokens > most or not self._is_late(oldest, now):
                request = next(one for one in queue.lanes[lane] if one.needs_tokens <= most)
            route = self._place_or_reject(request, now)
            if route.replica_id is not None:
                self._admitted += 1
            elif route.needs_tokens:
                request.needs_tokens = route.needs_tokens
                most_known = min(most_known, route.needs_tokens - 1)
            else:
                self._is_closed_to_new = True
                return

    def _order_lanes(self, queue: WaitingQueue, lanes: Iterable[str], *, room: bool) -> list[str]:
        """Return some lanes of a queue in the order in which they are served: ``TenantShares.order``."""
        if self.tenants is None:
            return list(lanes)
        return self.tenants.order(map(queue.first, lanes), room=room)

    def _is_late(self, first: RoutedRequest, now: float) -> bool:
        """Whether the oldest request of a lane is late. False while its ``needs_tokens`` is 0: its need is
        unknown until it is routed again. Also records when the request became the oldest."""
        limits = self._core.limits
        if first.first_since is None:
            first.first_since, first.first_since_s = self._admitted, now
        if not first.needs_tokens:
            return False
        waits_since_s = first.since_s if self._order.by_arrival else first.first_since_s
        return (
            self._admitted - first.first_since >= limits.queue_patience_requests
            or now - waits_since_s >= limits.queue_patience_s
            or now - first.since_s >= limits.wait_s / 2
        )

    # -- requests that make way for more urgent tenants --------------------------------

    def _make_way(self, tenants: TenantShares, now: float) -> None:
        """Let requests of less urgent tenants make way for the oldest request of each tenant in each queue,
        if it has waited for the policy's ``blocked_s`` seconds. Those of tenants with the largest shares come
        first. Raises ``PolicyCallError``; even then, each open request is in a queue or at a replica."""
        if not self._preemption.is_used or len(tenants.shares) < 2:
            return
        queues = [self.anywhere, *(replica.queue for replica in self._fleet.values())]
        firsts = [queue.first(lane) for queue in queues for lane in queue.lanes]
        waited = [one for one in firsts if now - one.waiting_since_s >= self._preemption.blocked_s]
        waited.sort(key=lambda one: (-tenants.shares.get(one.tenant, 0.0), one.number))
        for blocked in waited[:MAX_BLOCKED_REQUESTS]:
            if blocked.sent is not None:
                continue  # an earlier preemption in this loop has sent it
            if blocked.replica_id is not None:
                self._make_way_at(self._fleet[blocked.replica_id], blocked, tenants, now)
            elif blocked.needs_tokens:
                roomy = [one for one in self._fleet.values() if one.view().takes_new]
                for replica in nlargest(MAX_VICTIM_REPLICAS, roomy, key=lambda one: one.view().room_tokens):
                    if self._make_way_at(replica, blocked, tenants, now):
                        break

    def _make_way_at(
        self, replica: Replica, blocked: RoutedRequest, tenants: TenantShares, now: float
    ) -> bool:
        """Let requests make way for ``blocked`` at a replica, as the policy decides. If ``blocked`` waits for
        this replica, which is full, requests are recalled from it. If ``blocked`` waits for KV capacity,
        programs leave the replica. Returns whether any request makes way."""
        core, fleet, room = self._core, self._fleet, blocked.replica_id is None
        capacity, needs, missing = fleet.capacity_tokens, blocked.context_tokens, fleet.missing(replica)
        sizes = {
            one.request_id: one.context_tokens
            for one in replica.in_flight.values()
            if one.tenant != blocked.tenant and not (one.began or one.recalled or one.displaced_others)
        }
        if room:
            capacity, needs, sizes = fleet.memory_tokens, blocked.needs_tokens, {}
            missing = (needs - replica.view().room_tokens, 0)
            for one in self._movable_from(replica):
                program = one.program
                assert program is not None
                if one.tenant != blocked.tenant and not (
                    program.cached and self.route_away(one, replica.replica_id, now) is None
                ):
                    sizes[one.request_id] = program.size_tokens
        others = []
        for name, size in sizes.items():
            one = core.requests[name]
            sent_s = one.sent_s if one.sent is not None else None
            others.append(PreemptibleRequestView(name, one.tenant, size, size / capacity, sent_s))
        if not others:
            return False
        standings = {
            tenant: TenantStanding(tenants.shares.get(tenant, 0.0), tenants.used(tenant, room=room))
            for tenant in {blocked.tenant, *(other.tenant for other in others)}
        }
        waited_s = now - blocked.waiting_since_s
        view = BlockedRequestView(blocked.request_id, blocked.tenant, waited_s, needs / capacity, *missing)
        try:
            named = list(self._preemption.preempt_less_urgent(view, others, standings))
        except Exception as error:
            raise PolicyCallError(f"the preemption policy failed at request {view.request_id!r}") from error
        chosen = [core.requests[request_id] for request_id in named if request_id in sizes]
        if not chosen:
            return False
        # A request that loses its home is queued after ``blocked`` has its place, even after an error.
        homeless: list[RoutedRequest] = []
        try:
            self._displace(chosen, replica, blocked, now, homeless if room else None)
            if room:
                self.place(blocked, None, now)
            elif fleet.missing(replica) == (0, 0):
                core.dequeue(blocked)
                core.send(blocked, now)
        finally:
            for request in homeless:
                self.enqueue_again(request)
        return True

    def _movable_from(self, replica: Replica) -> list[RoutedRequest]:
        """Return the requests whose programs have their home at this replica and could leave it, at most
        ``MAX_VICTIM_CANDIDATES``. Waiting requests come first, oldest first. Sent requests follow, newest
        first."""
        found = []
        for one in [*replica.queue.oldest(MAX_VICTIM_CANDIDATES), *reversed(replica.in_flight.values())]:
            program = one.program
            if program is None or program.home != replica.replica_id or one.began or one.recalled:
                continue
            is_alone = program.in_flight + program.waiting == 1 and self._core.knows(program)
            if is_alone and program.moved_at_turn != program.turns and one.only_replica_id is None:
                found.append(one)
        return found[:MAX_VICTIM_CANDIDATES]

    def _displace(
        self,
        chosen: list[RoutedRequest],
        replica: Replica,
        blocked: RoutedRequest,
        now: float,
        homeless: list[RoutedRequest] | None = None,
    ) -> None:
        """Move the chosen requests away from a replica, in favour of ``blocked``. ``homeless``: receives the
        requests that lose their home, which the caller has to queue; ``None``: no request loses it."""
        core = self._core
        for request in chosen:
            program = request.program
            route = self.route_away(request, replica.replica_id, now)
            if homeless is not None and route is None and program is not None and program.cached:
                continue  # an earlier request took the room elsewhere, so this one stays with its cached KV
            if request.sent is not None:
                core.recall(request, now)
            else:
                core.dequeue(request)
            if request.can_move and route is not None and route.replica_id is not None:
                self._place_at(request, route.replica_id, PREEMPTED_REASON, now)
            elif request.can_move and homeless is not None and program is not None:
                core.leave_home(program)
                homeless.append(request)
            else:
                core.enqueue_at(request, replica)
        blocked.displaced_others = True

    # -- moves ------------------------------------------------------------------------

    def _steal(self, now: float) -> None:
        """Move waiting requests to idle replicas, as the stealing policy decides. Raises
        ``PolicyCallError`` if the policy fails; earlier moves stay valid."""
        replicas = self._fleet.values()
        if not (self._stealing.is_used and any(one.queue.lanes for one in replicas)):
            return
        if all(one.idle_since_s is None for one in replicas):
            return
        for _ in range(MAX_STEALS_PER_ROUND):
            views = [self._stealing_view(replica, now) for replica in replicas]
            try:
                steal = self._stealing.steal(views, now)
            except Exception as error:
                raise PolicyCallError("the stealing policy failed") from error
            if steal is None:
                return
            thief, victim = self._fleet.get(steal.thief), self._fleet.get(steal.victim)
            movable = self._movable(victim) if victim is not None else []
            if thief is None or thief is victim or not movable:
                return  # the policy's answer does not fit the replicas
            self._core.dequeue(movable[0])
            self._place_at(movable[0], steal.thief, f"stolen_{steal.reason}", now)

    def _stealing_view(self, replica: Replica, now: float) -> policies.ReplicaView:
        idle_s = 0.0
        if replica.idle_since_s is not None and not replica.is_full:
            idle_s = max(0.0, now - replica.idle_since_s)
        return replica.view()._replace(idle_s=idle_s, may_leave=len(self._movable(replica)))

    def _movable(self, replica: Replica) -> list[RoutedRequest]:
        """Return the requests that may move, among the ``MAX_STEAL_CANDIDATES`` oldest requests that wait
        for this replica."""
        return [one for one in replica.queue.oldest(MAX_STEAL_CANDIDATES) if one.can_move]

    def kv_lost(self, program: RoutedProgram, replica: Replica) -> None:
        self._release(replica.queue.of(program))

    def kv_reported(self, event: KvReported, replica: Replica, now: float) -> None:
        """A request that waits in the engine until it has room may move to another replica (MORI §4.3.1)."""
        for key in event.waiting:
            waits = self._core.programs.get(key)
            if waits is not None and waits.home == replica.replica_id:
                self._relocate(waits, replica, now)

    def _relocate(self, program: RoutedProgram, replica: Replica, now: float) -> None:
        """Move a program whose only request waits inside the engine without KV, if another replica has
        capacity. A program moves at most once per turn."""
        if program.in_flight != 1 or program.moved_at_turn == program.turns:
            return
        request = next((one for one in replica.in_flight.values() if one.program is program), None)
        if request is None or request.began or request.recalled or request.only_replica_id is not None:
            return
        if now - request.sent_s < MIN_ENGINE_WAIT_S:
            return  # the request may have been sent after the engine's report
        with self._counted_failures():
            route = self.route_away(request, replica.replica_id, now)
            if route is None or route.replica_id is None:
                return
            self._core.recall(request, now)
            self._place_at(request, route.replica_id, RELOCATED_REASON, now)


def _roominess(view: policies.ReplicaView) -> tuple[bool, bool, int]:
    return view.takes_new, not view.homed, view.room_tokens


def _turns_left(program: RoutedProgram | None) -> float:
    """Return the expected number of turns that a program has left, at least 1. If unknown, the number of
    past turns is used. Without a program, 1."""
    if program is None:
        return 1.0
    return max(1.0, program.turns if program.turns_left is None else program.turns_left)


def _max_fitting_tokens(replica: policies.ReplicaView) -> float:
    """Largest number of tokens that a request may need in order to fit on this replica. ``inf`` if no
    program has its home there, because an empty replica accepts any request."""
    return max(0, replica.room_tokens) if replica.homed else math.inf
