"""Tenant preemption: requests of a less urgent tenant make way for a more urgent tenant (SAGA §6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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
    """A request without output that may be recalled from a replica, in favour of a more urgent request. A
    request that still waits at the gateway for this replica may be recalled too. No request is recalled
    twice."""

    request_id: str
    tenant: str
    tokens: int
    """Tokens that are freed if the request makes way."""
    used: float
    """Share of capacity that the request's tenant loses if the request makes way."""
    sent_s: float | None
    """Time at which the request was sent to the replica; ``None``: the request still waits at the gateway."""


class TenantPreemptionPolicy(Protocol):
    """Chooses requests that make way for a request of a more urgent tenant. A recalled request moves to
    another replica with capacity, or waits. It is not recalled again, and never dropped."""

    is_used: bool
    """Whether the policy is used; false: no request ever makes way."""
    blocked_s: float
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
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTenantPreemption:
    """No request makes way."""

    is_used: bool = False
    blocked_s: float = math.inf

    def preempt_less_urgent(
        self,
        blocked: BlockedRequestView,
        others: Sequence[PreemptibleRequestView],
        standings: Mapping[str, TenantStanding],
    ) -> Sequence[str]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyPreemption:
    """Requests of less urgent tenants make way for a request that was blocked for at least ``blocked_s``
    seconds (SAGA §6.2).

    A request of another tenant makes way only if both conditions hold:

    - The other tenant's share is below 1 / ``share_ratio`` of the blocked tenant's share.
    - Afterwards, the other tenant still uses at least as large a fraction of its share as the blocked tenant
      does. So two tenants never displace each other's requests alternately.

    Requests that wait at the gateway are recalled before requests that were sent to the replica. Of the
    sent requests, the last sent is recalled first. Raises ``ValueError`` for a negative time, or a ratio
    below 1.
    """

    blocked_s: float = 0.5
    share_ratio: float = 1.0
    is_used: bool = True

    def __post_init__(self) -> None:
        if not (self.blocked_s >= 0 and self.share_ratio >= 1):
            raise ValueError(f"blocked_s {self.blocked_s}, share_ratio {self.share_ratio}; expected ≥ 0, ≥ 1")

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
            if theirs is None or not theirs.share * self.share_ratio < mine.share:
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
