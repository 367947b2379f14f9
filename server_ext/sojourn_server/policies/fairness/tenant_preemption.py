"""Tenant preemption: requests of less urgent tenants yield to more urgent ones (SAGA §6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TenantStanding(NamedTuple):
    """A tenant's entitlement and use."""

    share: float
    """Share of capacity by urgency."""
    used: float
    """Its present share of the contended capacity."""


class BlockedRequestView(NamedTuple):
    """A tenant's first waiting request at the gateway."""

    request_id: str
    tenant: str
    waited_s: float
    used: float
    """Share of capacity that the request will use."""
    missing_tokens: int
    """Tokens to free on the replica until the request fits."""
    missing_requests: int = 0
    """Requests to remove there until it fits."""


class PreemptibleRequestView(NamedTuple):
    """A request that may yield: its answer has not begun, and it has not yielded before."""

    request_id: str
    tenant: str
    tokens: int
    """Tokens that it frees."""
    used: float
    """Share of capacity that its tenant gives up."""
    sent_s: float | None
    """Time at which it was sent; ``None``: it waits for the replica at the gateway."""


class TenantPreemptionPolicy(Protocol):
    """Which requests yield. They move to another replica with room, or wait; none is lost or yields twice."""

    yields: bool
    """False: the policy is never asked."""
    blocked_s: float
    """Minimum wait of a blocked request before the policy is asked."""

    def preempt_less_urgent(
        self,
        blocked: BlockedRequestView,
        others: Sequence[PreemptibleRequestView],
        standings: Mapping[str, TenantStanding],
    ) -> Sequence[str]:
        """Ids of the requests that yield; empty if all of them would not be enough."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTenantPreemption:
    """Sent requests stay."""

    yields: bool = False
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
    """A request blocked for ``blocked_s`` makes requests of less urgent tenants yield (SAGA §6.2).

    A tenant is less urgent if its share is below 1 / ``share_ratio`` of the other's, and if after yielding it
    still uses no less of its share than the other then uses of its own. So a tenant that uses its full share
    takes nothing from others, and two tenants never yield to each other in turns. Waiting requests yield
    before sent ones, and the last sent yields first. Raises ``ValueError`` for a negative time or a ratio
    below 1.
    """

    blocked_s: float = 0.5
    share_ratio: float = 1.0
    yields: bool = True

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
        for other in sorted(others, key=_last_sent_first_key):
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
        for other in sorted(chosen, key=_last_sent_first_key, reverse=True):
            rest = [one for one in chosen if one is not other]
            if rest and _frees_enough(rest, blocked):
                chosen = rest
        return [other.request_id for other in chosen]


def _last_sent_first_key(other: PreemptibleRequestView) -> tuple[float, str]:
    return (-math.inf if other.sent_s is None else -other.sent_s, other.request_id)


def _frees_enough(chosen: Sequence[PreemptibleRequestView], blocked: BlockedRequestView) -> bool:
    tokens = sum(other.tokens for other in chosen)
    return bool(chosen) and tokens >= blocked.missing_tokens and len(chosen) >= blocked.missing_requests
