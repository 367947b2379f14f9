"""Baseline retention policies: no leases, leases of fixed length, and InferCept's rule of least waste.

Continuum's time-to-live (TTL): how long to keep a program's KV while its tool runs (§4.2, eq. 2).

    τ* = argmax over τ ∈ {0} ∪ recorded durations of  P(τ, f)·(T̄·η + PrefillReload(r)) − τ

P(τ, f) is the share of tool f's recorded durations up to τ. T̄, η and PrefillReload(r) are
``mean_evicted_wait_s``, ``memoryfulness`` and ``restore_s`` of ``FinishedTurnView``. Between two recorded
durations, P is constant and the cost τ grows. So only recorded durations are compared.

SAGA's time-to-live: a percentile of the tool's earlier durations (SAGA §4.2; mechanism S4).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from .policy_protocols import DecisionReason, RetentionDecision
from .policy_views import FinishedTurnView


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRetention:
    """Grants no leases: stock vLLM's behaviour."""

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        return RetentionDecision(0.0, DecisionReason.POLICY_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRetention:
    """Grants the same TTL for every tool call. Raises ``ValueError`` unless ``ttl_s`` is finite and ≥ 0."""

    ttl_s: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttl_s) and self.ttl_s >= 0):
            raise ValueError(f"ttl_s is {self.ttl_s}; expected finite seconds ≥ 0")

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.tool is None:
            return RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
        return RetentionDecision(self.ttl_s, DecisionReason.FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilProgramEndRetention(FixedRetention):
    """Keeps the KV of every turn with a tool call until the program ends. Used by preset ``admit``.

    ``ttl_s`` is only an upper bound. The KV of a program without activity for ``idle_program_s`` (a scheduler
    limit) is dropped anyway.
    """

    ttl_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWasteRetention:
    """Keeps a context as long as keeping it wastes less than dropping it: InferCept (arXiv 2402.01869).

    Waste is memory times seconds. C is the number of tokens of the context, C' the number of tokens of the
    other running requests, and M the bytes per token. T_fwd and T_swap are the seconds to compute a number of
    tokens, and to copy their KV back (§3.2, §4.1–4.3):

        choice    waste
        preserve  T · C · M
        discard   T_fwd(C) · C · M / 2  +  n · T_fwd(C / n) · C' · M     recomputed in n chunks
        swap      T_swap(C) · C · M                                      copied back while others compute

    T, the tool's duration, is estimated by the time for which the tool has run so far (§4.4). So every
    context is preserved at first, and dropped when T · C · M exceeds the cheaper alternative. The T at which
    this happens is the time-to-live. C' is read once, at the end of the turn; the paper reads it at every
    step.

    Swap is modelled as a copy that does not block: other requests are not delayed, and the target memory is
    idle during the copy. This follows the paper's pipelining, and Continuum §6.1, which compares InferCept
    with a non-blocking host cache. Swapping is considered only if a host tier stores evicted blocks. A
    context is swapped as a whole. Swapping in parts or with a token budget per step is not modelled.
    ``max_ttl_s`` is our addition; the paper has no bound.
    """

    max_ttl_s: float = 300.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_ttl_s) and self.max_ttl_s >= 0):
            raise ValueError(f"max_ttl_s is {self.max_ttl_s}; expected finite seconds ≥ 0")

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.tool is None:
            return RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
        others = turn.running_tokens / max(1, turn.context_tokens)
        worth_s = turn.reload_s / 2 + turn.chunked_reload_s * others
        if turn.host_reload_s is not None:
            worth_s = min(worth_s, turn.host_reload_s)
        if worth_s <= 0.0:
            return RetentionDecision(0.0, DecisionReason.NOT_WORTH_IT)
        return RetentionDecision(min(worth_s, self.max_ttl_s), DecisionReason.LEAST_WASTE)


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
