"""A routing core that sends all turns of a program to one replica, the program's home.

Each request is in one of three states: sent to a replica, waiting for a chosen replica, or waiting for any
replica. This module moves requests between these states.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from ..policies.fairness.fair_share import SharePolicy
from ..policies.fairness.tenant_preemption import NoTenantPreemption, TenantPreemptionPolicy
from ..policies.routing.routing_policy import RoutingPolicy
from ..policies.routing.waiting_order import ArrivalOrder, WaitingOrderPolicy
from ..policies.routing.work_stealing import StealingPolicy
from . import routing_events
from .bounded_program_table import Key
from .capacity_queue import CapacityQueue
from .home_change_log import Home
from .replica_fleet import Replica, ReplicaHealth
from .request_dispatcher import RequestDispatcher
from .request_placer import RequestPlacer
from .request_stealer import RequestStealer
from .routed_programs import ProgramEstimator, RoutedProgram
from .routing_core import RoutingCore
from .routing_limits import RoutingLimits
from .routing_preemption import RoutingPreemption
from .routing_queue import RoutedRequest
from .routing_snapshot import RoutingState, restore_routing_state, snapshot_routing_state
from .routing_status import ProgramRouteStatus, ReplicaStatus
from .routing_tables import build_routing_tables

MAX_EXPIRED_PER_TICK = 500
"""Maximum number of timed-out requests rejected in one tick; later ticks reject the rest."""


class AffinityCore(RoutingCore):
    """Routing core that sends all turns of a program to one replica, the program's home.

    Policies make the decisions. ``routing`` chooses replicas, ``stealing`` moves waiting requests to idle
    replicas, and ``sharing`` divides the capacity among tenants. ``yielding`` chooses the requests that make
    way for more urgent tenants; if it is ``None``, tenants do not preempt each other. ``order`` is the order
    in which requests wait for capacity; if it is ``None``, they wait in the order of arrival. ``expected``
    estimates the sizes and turns of programs; ``None``: a new estimator.
    """

    def __init__(
        self,
        routing: RoutingPolicy,
        stealing: StealingPolicy,
        sharing: SharePolicy,
        limits: RoutingLimits | None = None,
        *,
        yielding: TenantPreemptionPolicy | None = None,
        order: WaitingOrderPolicy | None = None,
        expected: ProgramEstimator | None = None,
        life: str = "",
    ) -> None:
        super().__init__(limits, life)
        self.expected = expected or ProgramEstimator()
        self.tables = tables = build_routing_tables(
            routing, sharing, self.expected, self.limits, self.counts, self.journal, order or ArrivalOrder()
        )
        self.fleet, self.programs, self.tenants = tables.fleet, tables.programs, tables.tenants
        self.homes, self.requests = tables.homes, tables.requests
        self.drained = self.fleet.drained
        self._placer = RequestPlacer(routing, tables, self._actions)
        self._capacity_queue = CapacityQueue(
            self.requests.anywhere,
            self.fleet,
            self.tenants,
            self.limits.queue_patience_s,
            self.limits.queue_patience_requests,
            late_s=self.limits.wait_s / 2,
            by_arrival=order is None or order.by_arrival,
        )
        self._preemption = RoutingPreemption(yielding or NoTenantPreemption(), tables, self._placer)
        self._dispatcher = RequestDispatcher(
            tables,
            self._placer,
            self._capacity_queue,
            RequestStealer(stealing, self.fleet, self.requests),
            self._preemption,
            give_up=self._give_up,
            reject_unrouted=self._reject_unrouted,
        )
        self._number = 0  # number of requests so far
        self._ending: dict[Key, None] = {}
        """Keys of ended programs that still have requests in progress."""
        self._handlers[routing_events.ReplicaRegistered] = self._registered
        self._handlers[routing_events.KvReported] = self._kv_reported
        self._handlers[routing_events.YieldAnswered] = self._dispatcher.yield_answered

    # -- questions ----------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return self.requests.waiting

    def home(self, tenant: str, program_id: str) -> str | None:
        program = self.programs.get((tenant, program_id))
        return program.home if program is not None and program.key not in self._ending else None

    def is_open(self, request_id: str) -> bool:
        return request_id in self.requests.by_id

    def sent_request(self, request_id: str) -> routing_events.SendRequest | None:
        known = self.requests.by_id.get(request_id)
        if known is None or known.sent_s is None:
            return None
        assert known.replica_id is not None
        return routing_events.SendRequest(
            request_id, known.replica_id, known.reason, known.moved_from, known.left_because
        )

    def replica(self, replica_id: str) -> Replica | None:
        return self.fleet.get(replica_id)

    def replicas(self) -> Iterable[Replica]:
        return self.fleet

    def in_flight(self, replica_id: str) -> int:
        replica = self.fleet.get(replica_id)
        return len(replica.in_flight) if replica is not None else 0

    def program_statuses(self) -> list[ProgramRouteStatus]:
        return [program.status() for program in self.programs][::-1]

    def replica_statuses(self) -> list[ReplicaStatus]:
        return [replica.status() for replica in self.fleet]

    def demand_tokens(self) -> tuple[int, int]:
        homed = sum(replica.homed_tokens for replica in self.fleet)
        queues = (self.requests.anywhere, self.requests.failed)
        waiting = sum(max(one.needs_tokens, one.size_tokens) for queue in queues for one in queue)
        return homed + waiting, self.fleet.total_kv_tokens

    def shares_used(self) -> dict[str, float]:
        tenants = self.tenants
        return {tenant: tenants.used(tenant) / share for tenant, share in tenants.shares.items() if share > 0}

    # -- copies -------------------------------------------------------------------

    def snapshot(self, now: float) -> RoutingState:
        state = super().snapshot(now)
        assert state is not None
        return state

    def snapshot_steps(self, now: float) -> Generator[None, None, RoutingState]:
        programs = self.programs.unordered()
        return snapshot_routing_state(self.fleet, programs, self._is_saved, self.expected, self._number, now)

    def _is_saved(self, program: RoutedProgram) -> bool:
        """Whether a snapshot contains a program: the program is in the table, and has not ended."""
        return self.tables.is_current(program) and program.key not in self._ending

    def restore(self, state: RoutingState, now: float, elapsed_s: float | None = None) -> int:
        """Restore a snapshot; return the number of programs with a home.

        Each replica counts as having reported at ``now``. ``elapsed_s``: seconds since the snapshot, if the
        snapshot's times are on another clock; ``None``: they are on this core's clock. Raises ``ValueError``
        for an invalid state, or if this core has had requests or has replicas or programs already.
        """
        if self._number or len(self.fleet) or len(self.programs):
            raise ValueError("this core has replicas or programs already; expected a new one")
        shift_s = 0.0 if elapsed_s is None else now - state.taken_s - elapsed_s
        restore_routing_state(state, self.fleet, self.programs, self.homes, self.expected, now, shift_s)
        for program in self.programs:
            self._placer.update_turns_left(program)
        self._number = state.number
        return sum(program.home is not None for program in self.programs)

    def suspect_all(self, now: float) -> None:
        """Mark all replicas as suspect, except those that drain. A suspect replica gets no new programs until
        it registers again."""
        for replica in self.fleet:
            if replica.health is ReplicaHealth.UP:
                replica.health = ReplicaHealth.SUSPECT
                self.fleet.changed(replica, now)

    def _all_homes(self) -> Iterator[tuple[Key, Home]]:
        for program in self.programs:
            replica = self.fleet.get(program.home)
            if replica is not None:
                yield program.key, (replica.replica_id, replica.instance)

    # -- requests -----------------------------------------------------------------

    def _longest_tokens(self) -> int:
        return self.fleet.longest_tokens

    def _is_queue_full(self, tenant: str) -> bool:
        """Whether a new request of ``tenant`` must be rejected because too many requests wait. The rule is in
        ``RoutingLimits.most_waiting``."""
        most = self.limits.most_waiting
        if self.waiting < most or not self.tenants.shares_capacity or self.waiting >= 2 * most:
            return self.waiting >= most
        waiting_of = self.requests.waiting_of
        return waiting_of.get(tenant, 0) >= most / (len(waiting_of) + (tenant not in waiting_of))

    def _open(self, event: routing_events.RequestReceived, now: float) -> None:
        request = self._add_request(event, now)
        reserved = self._capacity_queue.reserved_replica
        route = self._placer.route(request, now, reserved)
        home = request.program.home if request.program is not None else None
        comes_new = route.replica_id not in (None, home) and not route.passes
        if comes_new and self._capacity_queue.is_closed_to_new and self.requests.anywhere:
            self._dispatcher.enqueue_for_any(request)
        elif self._placer.send_or_queue(request, route, now):
            self._capacity_queue.admitted_count += route.replica_id != home
        else:
            request.needs_tokens = route.needs_tokens
            self._capacity_queue.is_closed_to_new |= not route.needs_tokens
            self.requests.enqueue_for_any(request)
            # This request could not use the reserved replica. A new pass may reserve another, or none.
            self._dispatcher.capacity_changed |= reserved is not None

    def _close_if_open(self, request_id: str, now: float) -> None:
        request = self.requests.by_id.get(request_id)
        if request is not None:
            self.requests.close(request, now)

    def _add_request(
        self, event: routing_events.RequestReceived | routing_events.RequestSent, now: float
    ) -> RoutedRequest:
        program = None
        if event.program_id is not None:
            key = (event.tenant, event.program_id)
            self._ending.pop(key, None)  # the program goes on
            parent = (event.tenant, event.parent_id) if event.parent_id else None
            program, forgotten = self.programs.find_or_add(
                key, lambda: RoutedProgram(key, event.agent_type, parent, now, now), now
            )
            if forgotten is not None:
                self.homes.leave(forgotten, now)
            if event.deadline_s is not None:
                program.deadline_s = event.deadline_s
        context_tokens = self.fleet.fitting(event.context_tokens)
        request = RoutedRequest(
            event.request_id,
            self._number,
            event.tenant,
            program,
            context_tokens,
            self._size(program, context_tokens + event.output_tokens),
            now,
            output_tokens=event.output_tokens,
            prefix=event.prefix if isinstance(event, routing_events.RequestReceived) else (),
        )
        self._number += 1
        self.requests.open(request)
        return request

    def _sent(self, event: routing_events.RequestSent, now: float) -> None:
        request = self.requests.by_id.get(event.request_id)
        if request is None:
            request = self._add_request(event, now)
        elif request.sent_s is not None:
            return
        else:
            self.requests.take_out(request)
        request.reason = "sent_by_gateway"
        replica = self.fleet.get(event.replica_id)
        program = request.program
        if program is not None and replica is not None and self.tables.is_current(program):
            # The gateway's copy of the homes may be outdated, so the gateway's choice does not change an
            # existing home.
            size_tokens = max(request.size_tokens, program.size_tokens)
            if program.home in (None, replica.replica_id):
                self.homes.set_home(program, replica, size_tokens, now)
        self.requests.send(request, event.replica_id, now)
        request.began = event.began
        self.counts.sent(request.reason)

    def _began(self, event: routing_events.FirstByteSent, now: float) -> None:
        request = self.requests.by_id.get(event.request_id)
        if request is not None and self._is_at(request, event.replica_id, now):
            request.began, request.recalled_from = True, None
            request.ran_since_s = now

    def _ended(self, event: routing_events.RequestFinished, now: float) -> None:
        request = self.requests.by_id.get(event.request_id)
        if request is None:
            return
        if event.replica_id is not None and not self._is_at(request, event.replica_id, now):
            return  # the end of an earlier attempt
        sent_s, replica_id, program = request.sent_s, request.replica_id, request.program
        answered = request.began if event.answered is None else event.answered
        self.requests.close(request, now)
        self._dispatcher.capacity_changed = True
        if program is None or not self.tables.is_current(program):
            return
        self.programs.touched(program, now)
        if sent_s is not None and answered:
            program.turns += 1
            self.expected.observe_turn(program, now - sent_s)
            prompt_tokens = max(event.prompt_tokens, request.context_tokens)
            program.context_tokens = max(program.context_tokens, prompt_tokens + event.output_tokens)
            if program.home == replica_id:
                program.cached = True
                self._placer.update_turns_left(program)
                self.homes.resize(program, self._size(program, program.context_tokens, anew=True))
                self._reset_capacity_needs(program)
        if program.key in self._ending:
            self._end_program(program.key, now)

    def _is_at(self, request: RoutedRequest, replica_id: str, now: float) -> bool:
        """Whether a request is at the replica that has just reported an event about it.

        If the request was recalled from this replica, the event shows that the gateway ignored the recall,
        because the answer had begun. Then the request is recorded again as sent to this replica, and the
        result is True."""
        if request.sent_s is not None and request.replica_id == replica_id:
            return True
        if request.recalled_from != replica_id:
            return False
        if request.sent_s is not None:
            self.requests.undo_send(request, now)
        else:
            self.requests.take_out(request)
        request.recalled_from = None
        self.requests.send(request, replica_id, now)
        replica, program = self.fleet.get(replica_id), request.program
        if replica is not None and program is not None and self.tables.is_current(program):
            self._placer.set_home(program, replica, request.size_tokens, now)
        return True

    def _failed(self, event: routing_events.RequestFailed, now: float) -> None:
        request = self.requests.by_id.get(event.request_id)
        if request is None:
            return
        if request.replica_id != event.replica_id or request.sent_s is None:
            # The request is waiting, or was sent to another replica meanwhile. If the replica that the event
            # names is gone, the event says whether that replica had accepted the request.
            if event.computing and request.lost_with == event.replica_id:
                request.lost_with = None
                request.failures_computing += 1
            return
        request.failures_computing += event.computing
        replica = self.fleet.get(event.replica_id)
        if replica is not None:
            request.failed_at = (*request.failed_at, event.replica_id)
            if replica.health is ReplicaHealth.UP:
                self._suspect(event.replica_id, now)
        self._retry_or_reject(request, now)

    def _retry_or_reject(self, request: RoutedRequest, now: float) -> None:
        """Process a request that its replica did not answer, or answered only in part. If the answer has
        begun, abort its stream. If the request failed too often, reject the request. Otherwise queue the
        request again."""
        self._dispatcher.capacity_changed = True
        request.failures += 1
        if request.began:
            assert request.replica_id is not None
            self._abort(request.request_id, request.replica_id)
            self.requests.close(request, now)
        elif self._failed_too_often(request):
            self._give_up(request, now)
        else:
            self.requests.undo_send(request, now)
            self.counts.replayed += 1
            self._dispatcher.enqueue_for_any(request)

    def _give_up(self, request: RoutedRequest, now: float) -> None:
        """Reject a request that has failed too often, or has no replica left to try."""
        self.requests.close(request, now)
        times = request.failures
        if request.failures_computing >= self.limits.most_failures_computing:
            why = f"{request.failures_computing} replicas accepted it and did not answer"
        elif times >= self.limits.most_failures:
            why = f"{times} replicas in turn did not answer"
        else:
            why = f"it was sent to {times} replica{'s' * (times > 1)} and not answered; no other is left"
        self._reject_failed(request.request_id, why)

    def _kv_reported(self, event: routing_events.KvReported, now: float) -> None:
        """Process a replica's report. Programs whose KV it has lost lose their home. Programs that are
        unknown here, as after a restart, get their home there. A request that waits in the engine for room
        may move."""
        replica = self.fleet.get(event.replica_id)
        if replica is None or replica.instance != event.instance:
            return
        there = {
            (one.tenant, one.program_id): one
            for one in event.programs
            if 2 * one.tokens >= one.context_tokens
        }
        waiting = set(event.waiting)
        for program in self.programs.unordered() if event.complete else ():
            is_at = program.home == event.replica_id and program.key not in there
            if (
                is_at
                and (program.key in waiting or not program.in_flight)
                and program.last_s <= now - event.age_s
            ):
                self._dispatcher.kv_dropped(program, event.replica_id, now)
        for key, one in there.items():
            found = self.programs.get(key)
            if found is None:
                last_s = now - one.idle_s
                found = RoutedProgram(key, None, None, last_s, last_s, turns=1)
                self.programs.add(found)
            if found.home is None and found.is_idle and key not in self._ending:
                found.context_tokens = max(found.context_tokens, one.context_tokens)
                self.homes.set_home(found, replica, found.context_tokens, now)
                found.cached = True

    # -- replicas -----------------------------------------------------------------

    def _registered(self, event: routing_events.ReplicaRegistered, now: float) -> None:
        known = self.fleet.get(event.replica_id)
        if known is not None and known.instance != event.instance:
            self._lose(event.replica_id, now)
            known = None
            self.changes += 1
        was_up = known is not None and known.health is ReplicaHealth.UP
        sizes_unlimited = not self.fleet.longest_tokens
        if not self.fleet.register(event, now):
            return
        self.changes += 1
        if sizes_unlimited:
            for request in self.requests.waiting_requests():
                request.context_tokens = self.fleet.fitting(request.context_tokens)
                request.size_tokens = self.fleet.fitting(request.size_tokens)
        self._dispatcher.capacity_changed = True
        self.requests.freed.add(event.replica_id)
        replica = self.fleet.get(event.replica_id)
        assert replica is not None
        if known is None:
            self.requests.adopt(replica, now)
            self.requests.replica_came(replica)
        elif not was_up:
            for request in list(self.requests.anywhere):
                if request.program is not None and request.program.home == event.replica_id:
                    self.requests.anywhere.set_needs_tokens(request, 0)

    def _lose(self, replica_id: str, now: float) -> None:
        replica = self.fleet.get(replica_id)
        assert replica is not None
        for program in self.programs.unordered():
            if program.home == replica_id:
                self.homes.leave(program, now)
        for request_id in list(replica.in_flight):
            request = self.requests.by_id[request_id]
            request.lost_with = replica_id
            self._retry_or_reject(request, now)
        self._clear_queue(replica)
        self.fleet.remove(replica)
        self.requests.replica_gone(replica)
        self._placer.forget(replica_id)

    def _drain_started(self, event: routing_events.ReplicaDrainStarted, now: float) -> None:
        replica = self.fleet.get(event.replica_id)
        if replica is not None:
            replica.health = ReplicaHealth.DRAINING
            self.fleet.changed(replica, now)
            self._clear_queue(replica)

    def _drain_cancelled(self, event: routing_events.ReplicaDrainCancelled, now: float) -> None:
        self.fleet.drained.pop(event.replica_id, None)
        replica = self.fleet.get(event.replica_id)
        if replica is None or replica.health is not ReplicaHealth.DRAINING:
            return
        replica.health = ReplicaHealth.UP if replica.probed_s is None else ReplicaHealth.SUSPECT
        self.fleet.changed(replica, now)
        self.fleet.newly_idle = True
        self.requests.freed.add(replica.replica_id)
        self._dispatcher.capacity_changed = True

    def _clear_queue(self, replica: Replica) -> None:
        """Move the requests that wait for this replica to the queue for any replica."""
        for request in list(self.requests.queues.get(replica.replica_id, ())):
            self.requests.take_out(request)
            self._dispatcher.enqueue_for_any(request)
        self._dispatcher.capacity_changed = True

    def _suspect(self, replica_id: str, now: float) -> None:
        replica = self.fleet.get(replica_id)
        assert replica is not None
        if replica.health is ReplicaHealth.UP:
            replica.health = ReplicaHealth.SUSPECT
        self.fleet.changed(replica, now)
        replica.probed_s = now
        self._probe(replica_id, replica.instance)

    # -- programs -----------------------------------------------------------------

    def _program_ended(self, event: routing_events.ProgramEnded, now: float) -> None:
        self._end_program((event.tenant, event.program_id), now)

    def _end_program(self, key: Key, now: float) -> None:
        """Remove an ended program. If the program has open requests, mark it for removal after the last of
        these requests."""
        program = self.programs.get(key)
        self._ending.pop(key, None)
        if program is not None and not program.is_idle:
            self._ending[key] = None
        elif program is not None:
            self.programs.remove(key)
            self.expected.ended(program, now)
            self.changes += 1  # for a ``Tick`` without actions, ``take`` counts no change
            self.homes.leave(program, now)

    def _size(self, program: RoutedProgram | None, context_tokens: int, *, anew: bool = False) -> int:
        """Return the longest context, in tokens, that a program is expected to reach. If ``program`` is
        ``None``, return ``context_tokens``.

        ``anew``: whether to compute a new estimate. If not, the last estimate is used until the program's
        context exceeds it. The result is at most the longest context that a replica can compute.
        """
        fitting = self.fleet.fitting
        if program is None:
            return fitting(context_tokens)
        context_tokens = fitting(max(context_tokens, program.context_tokens))
        if context_tokens <= program.size_tokens and not anew:
            return fitting(program.size_tokens)
        most = self.fleet.longest_tokens or context_tokens
        return fitting(self.expected.size_tokens(program, context_tokens, most))

    def _reset_capacity_needs(self, program: RoutedProgram) -> None:
        """Mark the program's requests that wait for any replica, so that they are routed again. They need no
        further capacity, because the program has a home now."""
        if not program.waiting:
            return
        for request in self.requests.anywhere.of(program):
            self.requests.anywhere.set_needs_tokens(request, 0)
            self._dispatcher.capacity_changed = True

    # -- time ---------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for request in self.requests.unregistered_since(now - self.limits.lease_s):
            request.lost_with = request.replica_id
            self._retry_or_reject(request, now)
        for request in self.requests.waiting_since(now - self.limits.wait_s, MAX_EXPIRED_PER_TICK):
            self.requests.close(request, now)
            self._reject_timed_out(request.request_id, "replica")
        for key in list(self._ending):
            self._end_program(key, now)
        for program in self.programs.silent_since(now - self.limits.silent_program_s):
            self.programs.remove(program.key)
            self.homes.leave(program, now)
            self.changes += 1
        self.tenants.update_shares(now)
        # Requests become late as time passes, and only a pass over the queue finds them.
        self._dispatcher.capacity_changed = True

    def _dispatch(self, now: float, *, epoch: bool) -> None:
        self._dispatcher.dispatch(now, epoch=epoch)
