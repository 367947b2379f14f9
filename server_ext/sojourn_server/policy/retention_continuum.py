"""How long a program's KV is kept while its tool runs (Continuum §4.2, eq. 2).

    τ* = argmax over τ ∈ {0} ∪ recorded durations of  P(τ, f)·(T̄·η + PrefillReload(r)) − τ

Between two recorded durations P does not grow while the cost does, so no other
τ can be better. A pure function of what it is given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sojourn_server.program.history import ToolHistory

MAX_CANDIDATES = 1000
"""Of more recorded durations, this many evenly spaced order statistics are tried."""


class TtlBasis(str, Enum):
    """What the probability of a tool's return was taken from."""

    COLD_START = "cold_start"
    """Too little is recorded: durations assumed Exp(1), the workload fully memoryful."""
    ALL_TOOLS = "all_tools"
    THIS_TOOL = "this_tool"


class TtlChoice(NamedTuple):
    """A TTL in seconds, 0.0 for "let it go", and what it rests on."""

    ttl_s: float
    basis: TtlBasis


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumTtl:
    """The paper's rule with its thresholds. Raises ``ValueError`` for negative ones."""

    min_samples: int = 100
    """K: at most this many samples are too few to trust (§4.2)."""
    max_ttl_s: float = 300.0
    """Longest TTL ever given, in seconds; ours, the paper has none."""

    def __post_init__(self) -> None:
        if self.min_samples < 0 or not self.max_ttl_s >= 0:
            raise ValueError(f"min_samples {self.min_samples}, max_ttl_s {self.max_ttl_s}; expected ≥ 0 each")

    def ttl(
        self,
        *,
        tool: str | None,
        history: ToolHistory,
        reload_s: float,
        mean_evicted_wait_s: float,
        memoryfulness: float,
    ) -> TtlChoice:
        """The TTL for a program that now calls ``tool`` (a ``ToolCall.key``; ``None``: not known).

        ``reload_s`` is PrefillReload(r), ``mean_evicted_wait_s`` T̄, both in
        seconds; ``memoryfulness`` is η. Of equally good TTLs the shortest is taken.
        """
        if history.count() <= self.min_samples:
            # Exp(1), η = 1: (1 − e^{−τ})·B − τ is greatest at τ = ln B.
            benefit_s = mean_evicted_wait_s + reload_s
            ttl_s = math.log(benefit_s) if benefit_s > 1.0 else 0.0
            return TtlChoice(min(ttl_s, self.max_ttl_s), TtlBasis.COLD_START)
        if tool is not None and history.count(tool) > self.min_samples:
            durations, basis = history.durations(tool), TtlBasis.THIS_TOOL
        else:
            durations, basis = history.durations(), TtlBasis.ALL_TOOLS
        benefit_s = mean_evicted_wait_s * memoryfulness + reload_s
        return TtlChoice(self._best(durations, benefit_s), basis)

    def _best(self, durations: Sequence[float], benefit_s: float) -> float:
        """argmax over ``durations`` (ascending, seconds) of the share within τ · ``benefit_s`` − τ."""
        total = len(durations)
        # P(0) may be above 0: tools faster than the clock's tick are in the history too.
        best_ttl_s = 0.0
        best_value = bisect_right(durations, 0.0) / total * benefit_s
        # No TTL above the whole benefit can pay, so the search ends there.
        end = bisect_right(durations, min(self.max_ttl_s, benefit_s))
        step = max(1, -(-end // MAX_CANDIDATES))
        index = 0
        while index < end:
            duration_s = durations[index]
            # Jump over equal durations: only the last of them sees the full step of the CDF.
            within = bisect_right(durations, duration_s, index)
            value = within / total * benefit_s - duration_s
            if value > best_value:
                best_ttl_s, best_value = duration_s, value
            index = max(within, index + step)
        return best_ttl_s
