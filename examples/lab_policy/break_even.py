"""Rent no longer than buying costs: keep a context for as long as it would take to get it back.

The rule for skiers who do not know how long the season lasts. Whatever a tool takes, the time for which a
context was kept in vain is at most what its absence would have cost; nothing has to be learned for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sojourn_server.policy.base import Keep, Reason
from sojourn_server.policy.views import TurnView


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """A retention policy: ``factor`` times recomputing the context and queueing for it once more."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1000:
            raise ValueError(f"factor is {self.factor}; expected a number above 0 and below 1000")

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        return Keep(self.factor * (turn.reload_s + turn.mean_evicted_wait_s), Reason.LEAST_WASTE)
