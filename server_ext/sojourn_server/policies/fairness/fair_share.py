"""Fair share: which tenant's request is sent next, by the urgency of the tenants' programs (SAGA §6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class RunningTaskView(NamedTuple):
    """A running program, as input to the computation of shares."""

    work_s: float
    """Expected remaining seconds of work on one replica (SAGA's ``work_remain``)."""
    deadline_s: float
    """Deadline, on the same clock as ``now``."""


class TenantView(NamedTuple):
    """A tenant (the owner of an API key) and its running programs."""

    tenant: str
    tasks: Sequence[RunningTaskView]


class WaitingTenantView(NamedTuple):
    """A tenant with waiting requests."""

    tenant: str
    used: float
    """Share of the cluster's KV capacity that the tenant uses now, 0 to 1."""
    since_s: float
    """Arrival time of the tenant's first waiting request."""


class SharePolicy(Protocol):
    """Divides capacity among tenants, and orders their requests."""

    epoch_s: float
    """Seconds between two computations of the shares; ``inf``: the shares never change."""
    divides_capacity: bool
    """Whether shares are computed; false: requests are sent in order of arrival."""

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        """Return tenant → share of capacity. The shares add up to 1. Empty if shares are not computed."""
        ...

    def order(self, waiting: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Return the names of the tenants in ``waiting``, in the order in which their requests are sent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FcfsSharing:
    """First come, first served, over all tenants."""

    epoch_s: float = math.inf
    divides_capacity: bool = False

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        return {}

    def order(self, waiting: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        return [one.tenant for one in sorted(waiting, key=lambda one: (one.since_s, one.tenant))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFairShare:
    """Divides capacity by urgency: Σ remaining work ÷ time until the deadline (SAGA §6.1–6.2).

    The shares are computed every ``epoch_s``. The time until a deadline counts as at least ``least_slack_s``,
    because the formula divides by it. Every tenant gets at least ``least_share`` times an equal share (1 ÷
    number of tenants), even without urgent work. Capacity that a tenant does not use goes to the others.
    Raises ``ValueError`` for an epoch or slack that is not above 0, or a share outside 0 to 1.
    """

    epoch_s: float = 0.1
    least_slack_s: float = 1.0
    least_share: float = 0.1
    divides_capacity: bool = True

    def __post_init__(self) -> None:
        if not (self.epoch_s > 0 and self.least_slack_s > 0 and 0 <= self.least_share <= 1):
            raise ValueError(
                f"epoch_s is {self.epoch_s}, expected seconds > 0; least_slack_s is {self.least_slack_s}, "
                f"expected seconds > 0; least_share is {self.least_share}, expected 0 to 1"
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
        """Return a tenant's agent fair share (equation 8): the number of replicas needed to meet its
        deadlines."""
        least_s = self.least_slack_s
        due_s = now + least_s
        # The loop calls no function, because it scores ten thousand tasks ten times a second.
        return math.fsum(
            [
                work_s / (deadline_s - now if deadline_s > due_s else least_s)
                for work_s, deadline_s in tasks
                if work_s > 0
            ]
        )

    def order(self, waiting: Iterable[WaitingTenantView], shares: Mapping[str, float]) -> list[str]:
        """Sort tenants by the used fraction of their share, lowest first; ties go to the longest wait."""

        def used_fraction(one: WaitingTenantView) -> tuple[float, float, str]:
            share = shares.get(one.tenant, 0.0)
            return (one.used / share if share else math.inf, one.since_s, one.tenant)

        return [one.tenant for one in sorted(waiting, key=used_fraction)]
