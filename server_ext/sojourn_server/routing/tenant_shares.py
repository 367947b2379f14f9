"""Shares of tenants: the capacity that each tenant uses and may use, and the order in which tenants are
served (SAGA §6)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import islice

from ..policies.fairness_policies import RunningTaskView, SharePolicy, WaitingTenantView
from .routing_core import RoutingCore
from .routing_records import DEFAULT_MAX_RUNNING, Key, RoutedProgram, RoutedRequest
from .waiting_queues import TenantQueue


class TenantShares:
    """Used capacity and share of capacity of each tenant.

    A program without a stated deadline is due after ``RoutingLimits.slo_factor`` times the mean duration
    of its agent type. A stated deadline that is earlier than ``now`` plus the work left counts as ``now``
    plus the work left. Only the oldest of a tenant's programs count: as many as all replicas together run
    at once.
    """

    def __init__(self, policy: SharePolicy, core: RoutingCore) -> None:
        self._policy = policy
        self._core = core
        self._fleet = core.fleet
        self.in_flight_tokens: dict[str, int] = {}
        """Total context length of requests in flight, by tenant; only tenants with such requests."""
        self.homed_tokens: dict[str, int] = {}
        """Total expected size of programs with a home, by tenant; only tenants with such programs."""
        self.shares: Mapping[str, float] = {}
        """Fraction of all capacity that each tenant may use, as last computed; empty: not computed yet."""
        self._due_s = -math.inf
        """Time of the next computation of the shares."""

    def used(self, tenant: str, *, room: bool = False) -> float:
        """Return the fraction of all devices' KV capacity that a tenant's requests in flight use.

        With ``room``, return the larger of this and a second fraction: expected size of the tenant's programs
        with a home ÷ KV capacity of device and host memory."""
        fleet = self._fleet
        used = self.in_flight_tokens.get(tenant, 0) / fleet.capacity_tokens if fleet.capacity_tokens else 0.0
        if room and fleet.memory_tokens:
            used = max(used, self.homed_tokens.get(tenant, 0) / fleet.memory_tokens)
        return used

    def count(self, request: RoutedRequest, sign: int = 1) -> None:
        """Count a request as in flight; with ``sign`` -1, stop counting it."""
        add_to_sum(self.in_flight_tokens, request.tenant, sign * request.context_tokens)

    def rejects_excess(self, tenant: str) -> bool:
        """Whether a new request is rejected while ``RoutingLimits.most_waiting`` requests wait: with as many
        as its share of them, or if twice as many wait."""
        waiting, most = self._core.waiting, self._core.limits.most_waiting
        tenants = [one.tenant for one in waiting.values()]
        return len(waiting) >= 2 * most or tenants.count(tenant) >= most / len({*tenants, tenant})

    def used_fractions(self) -> dict[str, float]:
        """Return used ÷ share of each tenant with a share."""
        return {name: self.used(name) / share for name, share in self.shares.items() if share > 0}

    # -- shares -----------------------------------------------------------------

    def update(self, now: float) -> None:
        """Compute the tenants' shares from the work left in their programs, once per ``SharePolicy.epoch_s``
        seconds. If the policy fails, the error is counted and the shares stay unchanged."""
        epoch_s = self._policy.epoch_s
        if 0 < self._due_s - now <= epoch_s:
            return  # not due yet; a due time beyond one epoch means that the clock stepped back
        self._due_s = now + epoch_s
        # A tenant whose requests have no program has unknown work, so it gets the least share.
        working: dict[str, dict[Key, RoutedProgram]] = {}
        for request in self._core.requests.values():
            programs = working.setdefault(request.tenant, {})
            if request.program is not None:
                programs[request.program.key] = request.program
        views = {tenant: self._tasks(programs, now) for tenant, programs in working.items()}
        try:
            self.shares = dict(self._policy.shares(views, now))
        except Exception as error:
            self._core.counts.policy_failed(error)

    def _tasks(self, programs: Mapping[Key, RoutedProgram], now: float) -> list[RunningTaskView]:
        """Return the tenant's programs that count for its share, each with its work and deadline."""
        tasks = []
        for program in islice(programs.values(), self._fleet.max_running or DEFAULT_MAX_RUNNING):
            task = program.task
            if task is None:
                work_s = self._core.estimator.work_s(program)
                task = program.task = RunningTaskView(work_s, self._deadline_s(program))
            if program.deadline_s is not None and task.deadline_s < now + task.work_s:
                task = RunningTaskView(task.work_s, now + task.work_s)
            tasks.append(task)
        return tasks

    def _deadline_s(self, program: RoutedProgram) -> float:
        if program.deadline_s is not None:
            return program.deadline_s
        life_s = self._core.estimator.life_s(program)
        usual_s = self._core.limits.usual_life_s if life_s is None else life_s
        return program.began_s + self._core.limits.slo_factor * usual_s

    def order(self, queues: Collection[tuple[str, TenantQueue]], *, room: bool) -> list[str]:
        """Return the tenants of ``queues``, in the order in which they are served. If the policy fails,
        tenants are ordered by the arrival of their oldest request. ``room``: True if the requests wait for
        KV capacity, False if they wait for a full replica."""
        waiting = [
            WaitingTenantView(tenant, self.used(tenant, room=room), queue.oldest.since_s)
            for tenant, queue in queues
        ]
        try:
            return self._policy.order(waiting, self.shares)
        except Exception as error:
            self._core.counts.policy_failed(error)
            return [one.tenant for one in sorted(waiting, key=lambda one: (one.since_s, one.tenant))]


def add_to_sum(sums: dict[str, int], tenant: str, more: int) -> None:
    """Add ``more`` to a tenant's sum, and delete the entry if the sum is 0."""
    left = sums.get(tenant, 0) + more
    if left:
        sums[tenant] = left
    else:
        sums.pop(tenant, None)
