"""Who makes way for a tenant whose work is more urgent: preemption by Agent Fair Share (SAGA §6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Standing(NamedTuple):
    """A tenant, for the question who makes way."""

    share: float
    """Of capacity, as its urgency makes it."""
    used: float
    """Share that it has now of what is waited for."""


class BlockedView(NamedTuple):
    """A request that waits at the gateway: the first of its tenant's, there."""

    request_id: str
    tenant: str
    waited_s: float
    used: float
    """Share that it will have."""
    missing_tokens: int
    """So much has to go from the replica in question before it is its turn there."""
    missing_requests: int = 0
    """And so many requests."""


class MayYieldView(NamedTuple):
    """A request that could make way there: its answer has not begun, and it has not made way before."""

    request_id: str
    tenant: str
    tokens: int
    """So much less is there without it."""
    used: float
    """Share that its tenant no longer has then."""
    sent_s: float | None
    """When it was sent; ``None``: it waits for that replica at the gateway."""


class YieldPolicy(Protocol):
    """Who makes way. Those who do are moved to another replica with room, or wait their turn; none is lost,
    and none makes way twice."""

    yields: bool
    """False: it need not be asked."""
    blocked_s: float
    """Whoever has waited less is not asked about."""

    def make_way(
        self, blocked: BlockedView, others: Sequence[MayYieldView], standings: Mapping[str, Standing]
    ) -> Sequence[str]:
        """Which of the others make way; none, where that would not be enough."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoYielding:
    """Whoever was sent stays."""

    yields: bool = False
    blocked_s: float = math.inf

    def make_way(
        self, blocked: BlockedView, others: Sequence[MayYieldView], standings: Mapping[str, Standing]
    ) -> Sequence[str]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldToUrgent:
    """Who has waited for ``blocked_s`` has those make way whose tenants are less urgent (SAGA §6.2).

    Less urgent is a tenant whose share is less than 1 / ``share_ratio`` of the other's, and which, when it
    has made way, still has no less of its share than the other then has of its own. So a tenant with all
    that its urgency entitles it to takes nothing from anybody, and the same two never make way for
    each other in turns. Who still waits makes way before who was sent, the last sent first. Raises
    ``ValueError`` for a negative time or a ratio below 1.
    """

    blocked_s: float = 0.5
    share_ratio: float = 1.0
    yields: bool = True

    def __post_init__(self) -> None:
        if not (self.blocked_s >= 0 and self.share_ratio >= 1):
            raise ValueError(f"blocked_s {self.blocked_s}, share_ratio {self.share_ratio}; expected ≥ 0, ≥ 1")

    def make_way(
        self, blocked: BlockedView, others: Sequence[MayYieldView], standings: Mapping[str, Standing]
    ) -> Sequence[str]:
        mine = standings.get(blocked.tenant)
        if mine is None or not mine.share > 0 or blocked.waited_s < self.blocked_s:
            return ()
        after = (mine.used + blocked.used) / mine.share
        used = {tenant: standing.used for tenant, standing in standings.items()}
        chosen: list[MayYieldView] = []
        for other in sorted(others, key=_last_sent_first):
            theirs = standings.get(other.tenant)
            if theirs is None or not theirs.share * self.share_ratio < mine.share:
                continue
            left = used[other.tenant] - other.used
            if left < after * theirs.share:
                continue
            used[other.tenant] = left
            chosen.append(other)
            if _enough(chosen, blocked):
                break
        if not _enough(chosen, blocked):
            return ()
        for other in sorted(chosen, key=_last_sent_first, reverse=True):
            rest = [one for one in chosen if one is not other]
            if rest and _enough(rest, blocked):
                chosen = rest
        return [other.request_id for other in chosen]


def _last_sent_first(other: MayYieldView) -> tuple[float, str]:
    return (-math.inf if other.sent_s is None else -other.sent_s, other.request_id)


def _enough(chosen: Sequence[MayYieldView], blocked: BlockedView) -> bool:
    tokens = sum(other.tokens for other in chosen)
    return bool(chosen) and tokens >= blocked.missing_tokens and len(chosen) >= blocked.missing_requests
