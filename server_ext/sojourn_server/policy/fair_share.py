"""Whose turn it is among tenants: shares of capacity by how urgent their agents' work is (SAGA §6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TaskView(NamedTuple):
    """A program that runs, for the question of shares."""

    work_s: float
    """Seconds of one replica's time that it is expected to need yet (``work_remain``)."""
    deadline_s: float
    """On the clock of ``now``."""


class TenantView(NamedTuple):
    """A tenant: who is charged, as the gateway's keys tell it."""

    tenant: str
    tasks: Sequence[TaskView]


class TurnOf(NamedTuple):
    """A tenant somebody of which waits, for the question whose turn it is."""

    tenant: str
    used: float
    """Share that it has now of what is waited for, of 1."""
    since_s: float
    """When the first of those who wait came."""


class SharePolicy(Protocol):
    """How capacity is divided among tenants."""

    epoch_s: float
    """Shares hold so long; ``inf``: they never change."""
    shares_out: bool
    """False: everybody's turn comes as they came, and shares need not be asked."""

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        """Of each tenant its share of capacity; together 1."""
        ...

    def order(self, turns: Iterable[TurnOf], shares: Mapping[str, float]) -> list[str]:
        """Tenants of whom somebody waits: whose request goes first, whose next, and so on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    """First come, first served, whoever it is."""

    epoch_s: float = math.inf
    shares_out: bool = False

    def shares(self, tenants: Iterable[TenantView], now: float) -> Mapping[str, float]:
        return {}

    def order(self, turns: Iterable[TurnOf], shares: Mapping[str, float]) -> list[str]:
        return [turn.tenant for turn in sorted(turns, key=lambda turn: (turn.since_s, turn.tenant))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFairShare:
    """Capacity in proportion to Σ work left ÷ time left until the deadline, each ``epoch_s`` (SAGA §6.1–6.2).

    A deadline that is near or past counts as ``least_slack_s`` away: the formula has a pole there. Nobody
    gets less than ``least_share`` of an equal share: a tenant whose programs have all the time in the world
    still has some. Capacity that nobody entitled asks for goes to whoever asks. Raises ``ValueError`` for an
    epoch or slack that is not above 0, or a share outside 0 to 1.
    """

    epoch_s: float = 0.1
    least_slack_s: float = 1.0
    least_share: float = 0.1
    shares_out: bool = True

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

    def score(self, tasks: Iterable[TaskView], now: float) -> float:
        """AFS of a tenant, equation 8: replicas it would need to be in time."""
        least_s = self.least_slack_s
        due_s = now + least_s
        # Ten thousand tasks are scored ten times a second: hence no calls in here.
        return math.fsum(
            [
                work_s / (deadline_s - now if deadline_s > due_s else least_s)
                for work_s, deadline_s in tasks
                if work_s > 0
            ]
        )

    def order(self, turns: Iterable[TurnOf], shares: Mapping[str, float]) -> list[str]:
        """Who uses least of its share; of two, who has waited longer."""

        def used(turn: TurnOf) -> tuple[float, float, str]:
            share = shares.get(turn.tenant, 0.0)
            return (turn.used / share if share else math.inf, turn.since_s, turn.tenant)

        return [turn.tenant for turn in sorted(turns, key=used)]
