"""SAGA's time-to-live: a percentile of the tool's earlier durations (SAGA §4.2; mechanism S4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from ..policy_protocols import DecisionReason, RetentionDecision
from ..policy_views import FinishedTurnView

MIN_TTL_S = 1e-3
"""Minimum duration in the log-normal fit. Shorter durations count as this minimum, because log 0 is
infinite."""
PERCENTILE = 0.95
"""Share of the tool's durations that the TTL covers."""
PRESSURE_LOW = 0.7
PRESSURE_HIGH = 0.9
"""Shares of the KV memory in use between which memory pressure rises from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTypeRetention:
    """Grants a TTL from ``PERCENTILE`` of the tool's earlier durations, shortened under memory pressure.

    The TTL is the percentile times 1 − 0.5·m, at most ``max_ttl_s``. The pressure m, limited to 0 to 1, is
    (used share of KV memory − ``PRESSURE_LOW``) / (``PRESSURE_HIGH`` − ``PRESSURE_LOW``).

    With fewer than ``min_samples`` calls of this tool, the calls of all tools are used. If all tools have too
    few calls as well, there is no lease. With fewer than ``enough`` calls, the percentile is that of a
    log-normal distribution fitted to the calls. There is no lease for a program without workflow prediction
    ("cold" in SAGA §3.3), after a turn without a tool call, or if the probability of another turn is 0. A TTL
    that the client asked for, up to ``max_ttl_s``, replaces all these rules. Raises ``ValueError`` for
    numbers out of range.
    """

    reads_hinted_ttl: ClassVar[bool] = True
    max_ttl_s: float = 300.0
    min_samples: int = 3
    enough: int = 20

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_ttl_s) and self.max_ttl_s >= 0):
            raise ValueError(f"max_ttl_s is {self.max_ttl_s}; expected finite seconds ≥ 0")
        if self.min_samples < 1 or self.enough < self.min_samples:
            raise ValueError(
                f"min_samples {self.min_samples}, enough {self.enough}; expected 1 ≤ min ≤ enough"
            )

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.hinted_ttl_s is not None:
            return RetentionDecision(min(turn.hinted_ttl_s, self.max_ttl_s), DecisionReason.HINTED)
        if turn.tool is None:
            return RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
        if turn.continuation_probability is None:
            return RetentionDecision(0.0, DecisionReason.COLD_START)
        if turn.continuation_probability == 0.0:
            return RetentionDecision(0.0, DecisionReason.NOT_WORTH_IT)
        durations, reason = turn.history.durations(turn.tool), DecisionReason.THIS_TOOL
        if len(durations) < self.min_samples:
            durations, reason = turn.history.durations(), DecisionReason.ALL_TOOLS
        if len(durations) < self.min_samples:
            return RetentionDecision(0.0, DecisionReason.COLD_START)
        ttl_s = self._percentile_s(durations) * (1.0 - 0.5 * self._pressure(turn.used_share))
        return RetentionDecision(min(ttl_s, self.max_ttl_s), reason)

    def _percentile_s(self, ordered: Sequence[float]) -> float:
        if len(ordered) >= self.enough:
            return ordered[min(len(ordered) - 1, math.ceil(PERCENTILE * len(ordered)) - 1)]
        logs = [math.log(max(MIN_TTL_S, value)) for value in ordered]
        mean = math.fsum(logs) / len(logs)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / max(1, len(logs) - 1))
        # Limited to max_ttl_s before exp(), since the tail of extreme samples would overflow a float.
        longest = math.log(max(MIN_TTL_S, self.max_ttl_s))
        return math.exp(min(longest, mean + NormalDist().inv_cdf(PERCENTILE) * spread))

    def _pressure(self, used_share: float | None) -> float:
        if used_share is None:
            return 0.0
        return min(1.0, max(0.0, (used_share - PRESSURE_LOW) / (PRESSURE_HIGH - PRESSURE_LOW)))
