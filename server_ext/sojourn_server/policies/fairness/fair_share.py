"""Fair share: which tenant's request goes next, by the urgency of its agents' work (SAGA §6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class RunningTaskView(NamedTuple):
    """A running program, as input of the shares."""

    work_s: float
    """Expected remaining seconds of one replica (``work_remain``)."""
    deadline_s: float
    """Same clock as ``now``."""


class TenantView(NamedTuple):
    """A tenant, as identified by the gateway's keys."""

    tenant: str
    tasks: Sequence[RunningTaskView]


class WaitingTenantView(NamedTuple):
    """A tenant with waiting requests."""

    tenant: str
    used: float
    """Its present share of the contended capacity, of 1."""
    since_s: float
    """Arrival of its first waiting request."""


class SharePolicy(Protocol):
    """How capacity is divided among tenants."""

    epoch_s: float
    """Seconds for which shares hold; ``inf``: they never change."""
    divides_capacity: bool
    """False: requests go in order of arrival, and shares are never computed."""

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        """Tenant → its share of capacity; the sum is 1."""
        ...

    def order(self, turns: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Tenants with waiting requests, in the order in which their requests go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FcfsSharing:
    """First come, first served, over all tenants."""

    epoch_s: float = math.inf
    divides_capacity: bool = False

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        return {}

    def order(self, turns: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        return [turn.tenant for turn in sorted(turns, key=lambda turn: (turn.since_s, turn.tenant))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFairShare:
    """Capacity in proportion to Σ remaining work ÷ time until the deadline, each ``epoch_s`` (SAGA §6.1–6.2).

    A deadline that is near or past counts as ``least_slack_s`` away, because the formula has a pole there.
    Every tenant gets at least ``least_share`` of an equal share, even without urgent work. Capacity that its
    tenant does not use goes to the others. Raises ``ValueError`` for an epoch or slack that is not above 0,
    or a share outside 0 to 1.
    """

    epoch_s: float = 0.1
    least_slack_s: float = 1.0
    least_share: float = 0.1
    divides_capacity: bool = True

    def __post_init__(self) -> None:
        if not (self.epoch_s > 0 and self.least_slack_s > 0 and 0 <= self.least_share <= 1):
            raise ValueError(
                f"epoch_s {self.epoch_s}, least_slack_s {self.least_slack_s}, "
                f"least_share {self.least_share}; expected > 0, > 0, 0 to 1"
            )

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        scores = {view.tenant: self.score(view.tasks, now) for view in tenants}
        if not scores:
            return {}
        equal = 1.0 / len(scores)
        total = math.fsum(scores.values())
        least = self.least_share * equal
        if not total:
            return dict.fromkeys(scores, equal)
        return {
            tenant: least + (1.0 - self.least_share) * (score / total) for tenant, score in scores.items()
        }

    def score(self, tasks: Iterable[RunningTaskView], now: float) -> float:
        """AFS of a tenant, equation 8: the number of replicas it needs to meet its deadlines."""
        least_s = self.least_slack_s
        due_s = now + least_s
        # No calls in here: ten thousand tasks are scored ten times a second.
        return math.fsum(
            [
                work_s / (deadline_s - now if deadline_s > due_s else least_s)
                for work_s, deadline_s in tasks
                if work_s > 0
            ]
        )

    def order(self, turns: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Least used share first; ties by the longest wait."""

        def used(turn: WaitingTenantView) -> tuple[float, float, str]:
            share = shares.get(turn.tenant, 0.0)
            return (turn.used / share if share else math.inf, turn.since_s, turn.tenant)

        return [turn.tenant for turn in sorted(turns, key=used)]
