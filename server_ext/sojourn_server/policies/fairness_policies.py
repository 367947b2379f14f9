"""Fairness between tenants, for the gateway: whose request is sent next (``sharing`` in cluster presets; SAGA
§6.1), and which requests make way for a more urgent tenant (``tenant_preemption``; SAGA §6.2)?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

LEAST_SLACK_S = 1.0
LEAST_SHARE = 0.1
"""Numbers of ``AgentFairShare``."""


class RunningTaskView(NamedTuple):
    """A running program, as input to the computation of shares."""

    work_s: float
    """Expected remaining seconds of work on one replica (SAGA's ``work_remain``)."""
    deadline_s: float
    """Deadline, on the same clock as ``now``."""


class WaitingTenantView(NamedTuple):
    """A tenant with waiting requests."""

    tenant: str
    used: float
    """Share of the cluster's KV capacity that the tenant uses now, 0 to 1."""
    since_s: float
    """Arrival time of the tenant's first waiting request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePolicy:
    """Divides capacity among tenants, and orders their requests. The base does not divide: first come, first
    served, over all tenants."""

    epoch_s = math.inf
    """Seconds between two computations of the shares; ``inf``: the shares never change."""
    divides_capacity = False
    """Whether shares are computed; false: requests are sent in order of arrival."""

    def shares(self, tenants: Mapping[str, Sequence[RunningTaskView]], now: float) -> Mapping[str, float]:
        """Return tenant → share of capacity. The shares add up to 1. Empty if shares are not computed.
        ``tenants``: tenant (the owner of an API key) → its running programs."""
        return {}

    def order(self, waiting: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Return the names of the tenants in ``waiting``, in the order in which their requests are sent."""
        return [one.tenant for one in sorted(waiting, key=lambda one: (one.since_s, one.tenant))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFairShare(SharePolicy):
    """Divides capacity by urgency: Σ remaining work ÷ time until the deadline (SAGA §6.1–6.2).

    The time until a deadline counts as at least ``LEAST_SLACK_S``. Every tenant gets at least ``LEAST_SHARE``
    of an equal share, even without urgent work. Capacity that a tenant does not use goes to the others.
    """

    epoch_s = 0.1
    divides_capacity = True

    def shares(self, tenants: Mapping[str, Sequence[RunningTaskView]], now: float) -> Mapping[str, float]:
        scores = {tenant: self.score(tasks, now) for tenant, tasks in tenants.items()}
        total = math.fsum(scores.values())
        if not total:
            return {tenant: 1.0 / len(scores) for tenant in scores}
        least = LEAST_SHARE / len(scores)
        return {tenant: least + (1.0 - LEAST_SHARE) * (score / total) for tenant, score in scores.items()}

    def score(self, tasks: Iterable[RunningTaskView], now: float) -> float:
        """Return a tenant's agent fair share (equation 8): the number of replicas needed to meet its
        deadlines."""
        return math.fsum(
            work_s / max(LEAST_SLACK_S, deadline_s - now) for work_s, deadline_s in tasks if work_s > 0
        )

    def order(self, waiting: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Sort tenants by the used fraction of their share, lowest first; ties go to the longest wait."""

        def used_fraction(one: WaitingTenantView) -> tuple[float, float, str]:
            share = shares.get(one.tenant, 0.0)
            return (one.used / share if share else math.inf, one.since_s, one.tenant)

        return [one.tenant for one in sorted(waiting, key=used_fraction)]


class TenantStanding(NamedTuple):
    """The share of the cluster's KV capacity that a tenant is entitled to, and the share that it uses."""

    share: float
    """The tenant's share by urgency, as the ``SharePolicy`` computed it."""
    used: float
    """Share that the tenant uses now."""


class BlockedRequestView(NamedTuple):
    """A tenant's first waiting request at the gateway."""

    request_id: str
    tenant: str
    waited_s: float
    used: float
    """Share of capacity that the request will use."""
    missing_tokens: int
    """Tokens to free on the replica so that the request fits."""
    missing_requests: int = 0
    """Requests to remove from the replica so that the request fits."""


class PreemptibleRequestView(NamedTuple):
    """A request without output that was sent to a replica, or waits for it at the gateway. It may be recalled
    once, in favour of a more urgent request."""

    request_id: str
    tenant: str
    tokens: int
    """Tokens that are freed if the request makes way."""
    used: float
    """Share of capacity that the request's tenant loses if the request makes way."""
    sent_s: float | None
    """Time at which the request was sent to the replica; ``None``: the request still waits at the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPreemptionPolicy:
    """Chooses requests that make way for a request of a more urgent tenant. A recalled request moves to
    another replica with capacity, or waits; it is never dropped. Under the base, no request makes way."""

    is_used = False
    blocked_s = math.inf
    """Seconds for which a request must be blocked before other requests may make way for it."""

    def preempt_less_urgent(
        self,
        blocked: BlockedRequestView,
        others: Sequence[PreemptibleRequestView],
        standings: Mapping[str, TenantStanding],
    ) -> Sequence[str]:
        """Return the ids of the requests that make way. Empty if even all allowed requests together would
        free too little. ``others``: requests of the replica that could make way. ``standings``: tenant →
        its standing, for the tenants of all these requests."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyPreemption(TenantPreemptionPolicy):
    """Requests of less urgent tenants make way for a request that was blocked for at least ``blocked_s``
    seconds (SAGA §6.2).

    Another tenant's request makes way only if its tenant's share is below the blocked tenant's, and if this
    tenant afterwards still uses at least as large a fraction of its share. So two tenants never displace each
    other's requests alternately. Requests that wait at the gateway are recalled first, then the last sent.
    """

    blocked_s: Annotated[float, Meta(ge=0)] = 0.5
    is_used = True

    def preempt_less_urgent(
        self,
        blocked: BlockedRequestView,
        others: Sequence[PreemptibleRequestView],
        standings: Mapping[str, TenantStanding],
    ) -> Sequence[str]:
        mine = standings.get(blocked.tenant)
        if mine is None or not mine.share > 0 or blocked.waited_s < self.blocked_s:
            return ()
        after = (mine.used + blocked.used) / mine.share
        used = {tenant: standing.used for tenant, standing in standings.items()}
        chosen: list[PreemptibleRequestView] = []
        for other in sorted(others, key=_preemption_order):
            theirs = standings.get(other.tenant)
            if theirs is None or not theirs.share < mine.share:
                continue
            left = used[other.tenant] - other.used
            if left < after * theirs.share:
                continue
            used[other.tenant] = left
            chosen.append(other)
            if _frees_enough(chosen, blocked):
                break
        if not _frees_enough(chosen, blocked):
            return ()
        for other in sorted(chosen, key=_preemption_order, reverse=True):
            rest = [one for one in chosen if one is not other]
            if rest and _frees_enough(rest, blocked):
                chosen = rest
        return [other.request_id for other in chosen]


def _preemption_order(other: PreemptibleRequestView) -> tuple[float, str]:
    return (-math.inf if other.sent_s is None else -other.sent_s, other.request_id)


def _frees_enough(chosen: Sequence[PreemptibleRequestView], blocked: BlockedRequestView) -> bool:
    tokens = sum(other.tokens for other in chosen)
    return bool(chosen) and tokens >= blocked.missing_tokens and len(chosen) >= blocked.missing_requests
