"""Break-even retention: keep a program's context as long as it would take to restore it.

This is the break-even rule of the ski-rental problem. However long a tool runs, the time for which the
context is kept in vain is at most the time that its loss would cost. The rule needs no history.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Retention policy: TTL = ``factor`` · (seconds to recompute the context + mean queueing delay T̄)."""

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
