"""Continuum's time-to-live (TTL): how long to keep a program's KV while its tool runs (§4.2, eq. 2).

    τ* = argmax over τ ∈ {0} ∪ recorded durations of  P(τ, f)·(T̄·η + PrefillReload(r)) − τ

P(τ, f) is the share of tool f's recorded durations up to τ. T̄, η and PrefillReload(r) are
``mean_evicted_wait_s``, ``memoryfulness`` and ``restore_s`` of ``FinishedTurnView``. Between two recorded
durations, P is constant and the cost τ grows. So only recorded durations are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..policy_protocols import DecisionReason, RetentionDecision
from ..policy_views import FinishedTurnView

MAX_CANDIDATES = 1000
"""Maximum number of durations that are compared. Of a longer list, evenly spaced durations are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumRetention:
    """Continuum's cost-benefit time-to-live (Continuum §4.1–4.2; mechanisms C4 and C5).

    A TTL that the client asked for replaces the computed one, up to ``max_ttl_s``. Without a hinted TTL, a
    turn without tool call gets no lease. If a tool has at most ``min_samples`` recorded calls, the durations
    of all tools are used. If all tools together have too few as well, the TTL is that of the cold start:
    ln(T̄ + PrefillReload) seconds (§4.2). Raises ``ValueError`` for negative numbers.
    """

    reads_hinted_ttl: ClassVar[bool] = True
    min_samples: int = 100
    """K: a tool's own durations are used only if there are more than K of them."""
    max_ttl_s: float = 300.0
    """Upper bound of the TTL in seconds; not in the paper."""

    def __post_init__(self) -> None:
        if self.min_samples < 0 or not self.max_ttl_s >= 0:
            raise ValueError(f"min_samples {self.min_samples}, max_ttl_s {self.max_ttl_s}; expected ≥ 0 each")

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.hinted_ttl_s is not None:
            return RetentionDecision(min(turn.hinted_ttl_s, self.max_ttl_s), DecisionReason.HINTED)
        if turn.tool is None:
            return RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
        choice = self.ttl(turn)
        return choice if choice.ttl_s > 0.0 else RetentionDecision(0.0, DecisionReason.NOT_WORTH_IT)

    def ttl(self, turn: FinishedTurnView) -> RetentionDecision:
        """Return the TTL by the formula, without regard to a hinted TTL, and the reason. Of equally good
        TTLs, the shortest is chosen."""
        tool, history = turn.tool, turn.history
        if history.count() <= self.min_samples:
            # Exp(1), η = 1: (1 − e^{−τ})·B − τ is greatest at τ = ln B.
            benefit_s = turn.mean_evicted_wait_s + turn.restore_s
            ttl_s = math.log(benefit_s) if benefit_s > 1.0 else 0.0
            return RetentionDecision(min(ttl_s, self.max_ttl_s), DecisionReason.COLD_START)
        if tool is not None and history.count(tool) > self.min_samples:
            durations, reason = history.durations(tool), DecisionReason.THIS_TOOL
        else:
            durations, reason = history.durations(), DecisionReason.ALL_TOOLS
        benefit_s = turn.mean_evicted_wait_s * turn.memoryfulness + turn.restore_s
        return RetentionDecision(self._best(durations, benefit_s), reason)

    def _best(self, durations: Sequence[float], benefit_s: float) -> float:
        """Return the TTL τ, 0 or one of ``durations``, with the largest P(duration ≤ τ) · ``benefit_s`` − τ.

        ``durations``: seconds, ascending."""
        total = len(durations)
        # P(0) may be above 0, because the history includes calls that took less than one clock tick.
        best_ttl_s = 0.0
        best_value = bisect_right(durations, 0.0) / total * benefit_s
        # A TTL above the benefit cannot pay off, so the search ends there.
        end = bisect_right(durations, min(self.max_ttl_s, benefit_s))
        step = max(1, -(-end // MAX_CANDIDATES))
        index = 0
        while index < end:
            duration_s = durations[index]
            # ``within`` counts all equal durations, so that P includes the full step of the CDF.
            within = bisect_right(durations, duration_s, index)
            value = within / total * benefit_s - duration_s
            if value > best_value:
                best_ttl_s, best_value = duration_s, value
            index = max(within, index + step)
        return best_ttl_s
