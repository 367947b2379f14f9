"""How long to keep a turn's KV: the 95th percentile of its tool, less under pressure (S4; SAGA §4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from .base import Keep, Reason
from .views import TurnView

LEAST_S = 1e-3
"""A shorter duration counts as this: its logarithm would be minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTypeTtl:
    """A percentile of how long the tool took before, scaled down by memory pressure, at most ``max_ttl_s``.

    pressure m = (used − ``pressure_low``) / (``pressure_high`` − ``pressure_low``), within 0 to 1;
    the time-to-live is the percentile times 1 − 0.5·m. A history of fewer than ``enough`` calls has no 95th
    percentile to speak of: a log-normal is fitted to it. Of fewer than ``min_samples`` calls of this tool,
    all tools' history is taken, and of fewer in that nothing is kept. A program of which nothing is known
    (cold, §3.3) is served request by request: not kept either. Raises ``ValueError`` for numbers that make
    no sense.
    """

    percentile: float = 0.95
    pressure_low: float = 0.7
    pressure_high: float = 0.9
    max_ttl_s: float = 300.0
    min_samples: int = 3
    enough: int = 20
    keeps_cold: bool = False
    """True: keep programs of which nothing is known too."""

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 1:
            raise ValueError(f"percentile is {self.percentile}; expected between 0 and 1")
        if not 0 <= self.pressure_low < self.pressure_high <= 1:
            raise ValueError(
                f"pressure_low {self.pressure_low}, pressure_high {self.pressure_high}; "
                "expected 0 ≤ low < high ≤ 1"
            )
        if not (math.isfinite(self.max_ttl_s) and self.max_ttl_s >= 0):
            raise ValueError(f"max_ttl_s is {self.max_ttl_s}; expected finite seconds ≥ 0")
        if self.min_samples < 1 or self.enough < self.min_samples:
            raise ValueError(
                f"min_samples {self.min_samples}, enough {self.enough}; expected 1 ≤ min ≤ enough"
            )

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.hinted_ttl_s is not None:
            return Keep(min(turn.hinted_ttl_s, self.max_ttl_s), Reason.HINTED)
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        if turn.goes_on is None and not self.keeps_cold:
            return Keep(0.0, Reason.COLD_START)
        if turn.goes_on == 0.0:
            return Keep(0.0, Reason.NOT_WORTH_IT)
        durations, reason = turn.history.durations(turn.tool), Reason.THIS_TOOL
        if len(durations) < self.min_samples:
            durations, reason = turn.history.durations(), Reason.ALL_TOOLS
        if len(durations) < self.min_samples:
            return Keep(0.0, Reason.COLD_START)
        ttl_s = self._percentile_s(durations) * (1.0 - 0.5 * self._pressure(turn.used_share))
        return Keep(min(ttl_s, self.max_ttl_s), reason)

    def _percentile_s(self, ordered: Sequence[float]) -> float:
        if len(ordered) >= self.enough:
            return ordered[min(len(ordered) - 1, math.ceil(self.percentile * len(ordered)) - 1)]
        logs = [math.log(max(LEAST_S, value)) for value in ordered]
        mean = math.fsum(logs) / len(logs)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / max(1, len(logs) - 1))
        # No further than the cap: the tail of a few wild samples is beyond what a float can hold.
        longest = math.log(max(LEAST_S, self.max_ttl_s))
        return math.exp(min(longest, mean + NormalDist().inv_cdf(self.percentile) * spread))

    def _pressure(self, used_share: float | None) -> float:
        if used_share is None:
            return 0.0
        return min(1.0, max(0.0, (used_share - self.pressure_low) / (self.pressure_high - self.pressure_low)))
