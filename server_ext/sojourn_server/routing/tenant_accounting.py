"""Accounting of tenants: the capacity that each tenant uses, its share of the capacity, and the order in
which tenants are served."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice

from ..policies.fairness.fair_share import RunningTaskView, SharePolicy, TenantView, WaitingTenantView
from .bounded_program_table import Key
from .replica_fleet import DEFAULT_MAX_RUNNING, ReplicaFleet
from .routed_programs import ProgramEstimator, RoutedProgram
from .routing_limits import RoutingCounters
from .routing_queue import TenantQueue

MAX_NEW_ESTIMATES = 256
"""Maximum number of programs with new requests whose remaining work is estimated per epoch. An epoch is the
time between two computations of the shares. Further programs keep their last estimate for now."""
MIN_REFRESHED_ESTIMATES = 64
"""Minimum number of programs whose remaining work is estimated per epoch. If fewer programs have new
requests, the oldest estimates are renewed. With epochs of 0.1 s, renewing 10,000 estimates takes about 16
s."""


class TenantAccounting:
    """Used capacity and share of capacity of each tenant.

    A program without a stated deadline is due after ``slo_factor`` times the mean duration of its agent type.
    If no program has ended, it is due after ``slo_factor`` times ``usual_life_s`` seconds.

    Two rules limit how urgent a client can make its programs. First, a stated deadline that is earlier than
    ``now`` plus the work left counts as ``now`` plus the work left. Second, only a limited number of a
    tenant's programs count, the oldest ones. The limit is the number of requests that all replicas together
    can run at once.
    """

    def __init__(
        self,
        policy: SharePolicy,
        fleet: ReplicaFleet,
        expected: ProgramEstimator,
        slo_factor: float,
        usual_life_s: float,
        counts: RoutingCounters,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._expected = expected
        self._slo_factor = slo_factor
        self._usual_life_s = usual_life_s
        self._counts = counts
        self.in_flight_tokens: dict[str, int] = {}
        """Total context length of requests in flight, by tenant; only tenants with such requests."""
        self.homed_tokens: dict[str, int] = {}
        """Total expected size of programs with a home, by tenant; only tenants with such programs."""
        self._open: dict[str, int] = {}
        """Number of requests in progress, by tenant."""
        self._working: OrderedDict[Key, RoutedProgram] = OrderedDict()
        """Programs with requests in progress, least recently estimated first."""
        self._needs_estimate: dict[Key, RoutedProgram] = {}
        """Programs of ``_working`` that had a request since their last estimate."""
        self._tasks: dict[str, dict[Key, tuple[RunningTaskView, bool]]] = {}
        """Estimated work and deadline of each program, by tenant. The flag is True if the client stated the
        deadline."""
        self.shares: Mapping[str, float] = {}
        """Fraction of all capacity that each tenant may use, as last computed; empty: not computed yet, or
        tenants do not share capacity."""
        self._shares_due_s = -math.inf
        """Time of the next computation of the shares."""

    @property
    def shares_capacity(self) -> bool:
        """Whether tenants are served in turn, by their shares of capacity. If not, requests are served in
        order of arrival."""
        return self._policy.divides_capacity

    # -- usage ------------------------------------------------------------------

    def add_request(self, tenant: str, program: RoutedProgram | None) -> None:
        """Record that a request of the tenant, and of ``program`` if it has one, arrived."""
        self._open[tenant] = self._open.get(tenant, 0) + 1
        if program is not None and self._policy.divides_capacity:
            self._working[program.key] = program
            self._needs_estimate[program.key] = program

    def remove_request(self, tenant: str, program: RoutedProgram | None) -> None:
        """Record that a request of the tenant, and of ``program`` if it has one, ended."""
        left = self._open[tenant] - 1
        if left:
            self._open[tenant] = left
        else:
            del self._open[tenant]
        if program is None or not program.is_idle:
            return
        if self._working.get(program.key) is program:
            del self._working[program.key]
            self._needs_estimate.pop(program.key, None)
            tasks = self._tasks.get(program.tenant)
            if tasks is not None and tasks.pop(program.key, None) is not None and not tasks:
                del self._tasks[program.tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """Add ``tokens``, which may be negative, to the tenant's tokens in flight."""
        _add(self.in_flight_tokens, tenant, tokens)

    def add_homed_tokens(self, tenant: str, tokens: int) -> None:
        """Add ``tokens``, which may be negative, to the total size of the tenant's programs with a home."""
        _add(self.homed_tokens, tenant, tokens)

    # -- shares -----------------------------------------------------------------

    def update_shares(self, now: float) -> None:
        """Compute the tenants' shares from the work left in their programs, once per ``SharePolicy.epoch_s``
        seconds. A call that comes too early does nothing. If the policy fails, the error is counted and the
        shares stay unchanged."""
        epoch_s = self._policy.epoch_s
        if not self._policy.divides_capacity or 0 < self._shares_due_s - now <= epoch_s:
            return  # not due yet; a due time beyond one epoch means that the clock stepped back
        self._shares_due_s = now + epoch_s
        fresh = list(islice(self._needs_estimate.values(), MAX_NEW_ESTIMATES))
        for program in [
            *fresh,
            *islice(self._working.values(), max(0, MIN_REFRESHED_ESTIMATES - len(fresh))),
        ]:
            self._needs_estimate.pop(program.key, None)
            if self._working.get(program.key) is program:
                self._estimate(program)
        # A tenant whose requests have no program has unknown work, so it gets the least share.
        views = [TenantView(tenant, self._counted_tasks(tenant, now)) for tenant in self._open]
        try:
            self.shares = dict(self._policy.shares(views, now))
        except Exception as error:
            self._counts.policy_failed(error)  # shares stay as they were

    def _counted_tasks(self, tenant: str, now: float) -> list[RunningTaskView]:
        """Return the tenant's programs that count for its share, each with its work and deadline.

        If the client stated a deadline that is earlier than ``now`` plus the work left, the program counts
        with ``now`` plus the work left as its deadline. This depends on ``now``, so it is not stored.
        """
        tasks = islice(self._tasks.get(tenant, {}).values(), self._fleet.max_running or DEFAULT_MAX_RUNNING)
        return [
            RunningTaskView(task.work_s, now + task.work_s)
            if given and task.deadline_s < now + task.work_s
            else task
            for task, given in tasks
        ]

    def used(self, tenant: str, *, room: bool = False) -> float:
        """Return the fraction of all devices' KV capacity that a tenant's requests in flight use.

        With ``room``, return the larger of this and a second fraction: expected size of the tenant's
        programs with a home ÷ KV capacity of device and host memory.
        """
        fleet = self._fleet
        used = self.in_flight_tokens.get(tenant, 0) / fleet.capacity_tokens if fleet.capacity_tokens else 0.0
        if room and fleet.total_kv_tokens:
            used = max(used, self.homed_tokens.get(tenant, 0) / fleet.total_kv_tokens)
        return used

    def order(self, queues: Collection[tuple[str, TenantQueue]], *, room: bool) -> list[str]:
        """Return the tenants of ``queues``, in the order in which they are served. If the policy fails,
        tenants are ordered by the arrival of their oldest request.

        ``queues``: each tenant with its waiting requests. ``room``: True if the requests wait for KV
        capacity, False if they wait for a full replica.
        """
        if len(queues) == 1:
            return [tenant for tenant, _ in queues]
        waiting = [
            WaitingTenantView(tenant, self.used(tenant, room=room), queue.oldest.since_s)
            for tenant, queue in queues
        ]
        try:
            return self._policy.order(waiting, self.shares)
        except Exception as error:
            self._counts.policy_failed(error)
            return [one.tenant for one in sorted(waiting, key=lambda one: (one.since_s, one.tenant))]

    def _estimate(self, program: RoutedProgram) -> None:
        """Store a new estimate of a program's work left and deadline."""
        task = RunningTaskView(self._expected.work_s(program), self._deadline_s(program))
        self._tasks.setdefault(program.tenant, {})[program.key] = task, program.deadline_s is not None
        self._working.move_to_end(program.key)

    def _deadline_s(self, program: RoutedProgram) -> float:
        """Return the deadline that the client stated, or else the assumed deadline (see the class), on the
        core's clock."""
        if program.deadline_s is not None:
            return program.deadline_s
        life_s = self._expected.life_s(program)
        usual_s = self._usual_life_s if life_s is None else life_s
        return program.began_s + self._slo_factor * usual_s


def _add(sums: dict[str, int], tenant: str, tokens: int) -> None:
    """Add ``tokens`` to a tenant's sum, and delete the entry if the sum is 0."""
    left = sums.get(tenant, 0) + tokens
    if left:
        sums[tenant] = left
    else:
        sums.pop(tenant, None)
