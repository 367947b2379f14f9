"""Rent no longer than buying costs: keep a context for as long as it would take to get it back.

The rule for skiers who do not know how long the season lasts. Whatever a tool takes, the time for which a
context was kept in vain is at most what its absence would have cost; nothing has to be learned for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """A retention policy: ``factor`` times recomputing the context and queueing for it once more."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1000:
            raise ValueError(f"factor is {self.factor}; expected a number above 0 and below 1000")

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.tool is None:
            return RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
        return RetentionDecision(
            self.factor * (turn.reload_s + turn.mean_evicted_wait_s), DecisionReason.LEAST_WASTE
        )
