"""Retention (``retention`` in presets): how long is a finished turn's KV kept?"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta
from sojourn.ids import ProgramId

from .lease_reclaim_policies import eviction_order
from .policy_protocols import DecisionReason, RetentionDecision
from .policy_views import FinishedTurnView, LeaseView

MAX_TTL_S = 300.0
"""Longest computed TTL. The bound is SAGA's TTL_max (Algorithm 1). Continuum and InferCept have none."""
MAX_CANDIDATES = 1000
"""Maximum number of durations that Continuum compares. Of a longer list, evenly spaced ones are compared."""
PERCENTILE = 0.95
"""Share of the tool's durations that SAGA's TTL covers."""
MIN_TOOL_CALLS = 3
"""SAGA grants no lease by fewer calls than these."""
EMPIRICAL_CALLS = 20
"""SAGA's percentile is that of the calls themselves from this many calls, else that of a log-normal fit."""
MIN_TTL_S = 1e-3
"""Shorter durations count as this one in the log-normal fit, because log 0 is infinite."""
PRESSURE_LOW, PRESSURE_HIGH = 0.7, 0.9
"""Shares of the KV memory in use between which SAGA's memory pressure rises from 0 to 1."""

Seconds = Annotated[float, Meta(ge=0, le=1e9)]

NO_TOOL_CALL = RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)
NOT_WORTH_IT = RetentionDecision(0.0, DecisionReason.NOT_WORTH_IT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Decides how long to keep the KV of a turn that has just ended. The base grants no leases.

    A policy that grants the TTL of a client's hint has the class attribute ``reads_hinted_ttl = True``. Under
    other policies such hints are answered ``unsupported``. A policy with a method ``pressed(leases,
    used_blocks, pool_blocks, now)`` is asked before each step while there are leases: it returns the programs
    whose leases end, each with the reason.
    """

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        return RetentionDecision(0.0, DecisionReason.POLICY_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRetention(RetentionPolicy):
    """Grants the same TTL for every tool call. The KV of a program without activity for ``idle_program_s`` (a
    scheduler limit) is dropped anyway, so a long TTL keeps it until the program ends."""

    ttl_s: Seconds = 10.0

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        return NO_TOOL_CALL if turn.tool is None else RetentionDecision(self.ttl_s, DecisionReason.FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWasteRetention(RetentionPolicy):
    """Keeps a context as long as keeping it wastes less than dropping it: InferCept (arXiv 2402.01869).

    Waste is memory times seconds. C and C' are the tokens of the context and of the other running requests, M
    the bytes per token. T_fwd and T_swap are the seconds to compute tokens, and to copy their KV back (§3.2,
    §4.1–4.3):

        choice    waste
        preserve  T · C · M
        discard   T_fwd(C) · C · M / 2  +  n · T_fwd(C / n) · C' · M     recomputed in n chunks
        swap      T_swap(C) · C · M                                      copied back while others compute

    T, the tool's duration, is estimated by the time for which the tool has run so far (§4.4). So every
    context is preserved at first. The T at which T · C · M exceeds the cheaper alternative is the
    time-to-live. C' is read once, at the end of the turn; the paper reads it at every step.

    Swap is a copy that blocks neither other requests nor the target memory: the paper pipelines it. It is
    considered only if a host tier stores evicted blocks, and for the context as a whole. Swapping in parts or
    with a token budget per step is not modelled.
    """

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.tool is None:
            return NO_TOOL_CALL
        others = turn.running_tokens / max(1, turn.context_tokens)
        worth_s = turn.reload_s / 2 + turn.chunked_reload_s * others
        if turn.host_reload_s is not None:
            worth_s = min(worth_s, turn.host_reload_s)
        if worth_s <= 0.0:
            return NOT_WORTH_IT
        return RetentionDecision(min(worth_s, MAX_TTL_S), DecisionReason.LEAST_WASTE)


def _durations(turn: FinishedTurnView, least: int) -> tuple[Sequence[float], DecisionReason]:
    """Return the durations of the turn's tool, ascending, or of all tools if it has fewer than ``least``."""
    durations = turn.history.durations(turn.tool)
    if len(durations) >= least:
        return durations, DecisionReason.THIS_TOOL
    return turn.history.durations(), DecisionReason.ALL_TOOLS


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumRetention(RetentionPolicy):
    """Continuum's cost-benefit time-to-live (Continuum §4.1–4.2, eq. 2; mechanisms C4 and C5).

        τ* = argmax over τ ∈ {0} ∪ recorded durations of  P(τ, f)·(T̄·η + PrefillReload(r)) − τ

    P(τ, f) is the share of tool f's recorded durations up to τ. T̄, η and PrefillReload(r) are
    ``mean_evicted_wait_s``, ``memoryfulness`` and ``restore_s`` of ``FinishedTurnView``. Between two recorded
    durations, P is constant and the cost τ grows. So only recorded durations are compared.

    A TTL that the client asked for replaces the computed one. Without it, a turn without tool call gets no
    lease. If a tool has at most ``min_samples`` recorded calls, the durations of all tools are used. If all
    tools together have too few as well, the TTL is that of the cold start: ln(T̄ + PrefillReload) seconds
    (§4.2). No TTL is longer than ``MAX_TTL_S``.
    """

    reads_hinted_ttl = True
    min_samples: Annotated[int, Meta(ge=0)] = 100
    """K: a tool's own durations are used only if there are more than K of them."""

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.hinted_ttl_s is not None:
            return RetentionDecision(min(turn.hinted_ttl_s, MAX_TTL_S), DecisionReason.HINTED)
        if turn.tool is None:
            return NO_TOOL_CALL
        durations, reason = _durations(turn, self.min_samples + 1)
        if len(durations) > self.min_samples:
            benefit_s = turn.mean_evicted_wait_s * turn.memoryfulness + turn.restore_s
            ttl_s = best_ttl_s(durations, benefit_s)
        else:
            # Exp(1), η = 1: (1 − e^{−τ})·B − τ is greatest at τ = ln B.
            benefit_s, reason = turn.mean_evicted_wait_s + turn.restore_s, DecisionReason.COLD_START
            ttl_s = min(math.log(benefit_s), MAX_TTL_S) if benefit_s > 1.0 else 0.0
        return RetentionDecision(ttl_s, reason) if ttl_s > 0.0 else NOT_WORTH_IT


def best_ttl_s(durations: Sequence[float], benefit_s: float) -> float:
    """Return the TTL τ, 0 or one of ``durations``, with the largest P(duration ≤ τ) · ``benefit_s`` − τ; of
    equally good ones, the shortest.

    ``durations``: seconds, ascending."""
    total = len(durations)
    # P(0) may be above 0, because the history includes calls that took less than one clock tick.
    best_s = 0.0
    best_value = bisect_right(durations, 0.0) / total * benefit_s
    # A TTL above the benefit cannot pay off, so the search ends there.
    end = bisect_right(durations, min(MAX_TTL_S, benefit_s))
    step = max(1, -(-end // MAX_CANDIDATES))
    index = 0
    while index < end:
        duration_s = durations[index]
        # ``within`` counts all equal durations, so that P includes the full step of the CDF.
        within = bisect_right(durations, duration_s, index)
        value = within / total * benefit_s - duration_s
        if value > best_value:
            best_s, best_value = duration_s, value
        index = max(within, index + step)
    return best_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTypeRetention(RetentionPolicy):
    """Grants a TTL from ``PERCENTILE`` of the tool's earlier durations, shortened under memory pressure (SAGA
    §4.2; mechanism S4).

    The TTL is the percentile, at most ``MAX_TTL_S``, times 1 − 0.5·m, with the present pressure m: it moves
    while the lease runs. With fewer than ``MIN_TOOL_CALLS`` calls of this tool, the calls of all tools are
    used. If all tools have too few calls as well, there is no lease. There is no lease either for a program
    without workflow prediction ("cold" in SAGA §3.3), after a turn without a tool call, or if the probability
    of another turn is 0. A TTL that the client asked for, up to ``MAX_TTL_S``, replaces all these rules, and
    pressure does not shorten it.
    """

    reads_hinted_ttl = True
    evicts: bool = False
    """Whether leases also end in the eviction order while more than ``PRESSURE_HIGH`` of the KV memory is
    used, as the paper has it."""

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision:
        if turn.hinted_ttl_s is not None:
            return RetentionDecision(min(turn.hinted_ttl_s, MAX_TTL_S), DecisionReason.HINTED)
        if turn.tool is None:
            return NO_TOOL_CALL
        if turn.continuation_probability is None:
            return RetentionDecision(0.0, DecisionReason.COLD_START)
        if turn.continuation_probability == 0.0:
            return NOT_WORTH_IT
        durations, reason = _durations(turn, MIN_TOOL_CALLS)
        if len(durations) < MIN_TOOL_CALLS:
            return RetentionDecision(0.0, DecisionReason.COLD_START)
        return RetentionDecision(min(_percentile_s(durations), MAX_TTL_S), reason)

    def pressed(
        self, leases: Sequence[LeaseView], used_blocks: int, pool_blocks: int, now: float
    ) -> list[tuple[ProgramId, DecisionReason]]:
        """Return the programs whose leases end under the present memory pressure, each with the reason."""
        # SAGA's memory pressure m (eq. 6), 0 to 1.
        pressure = (used_blocks / pool_blocks - PRESSURE_LOW) / (PRESSURE_HIGH - PRESSURE_LOW)
        pressure = min(1.0, max(0.0, pressure))
        if not pressure:
            return []
        ended: list[tuple[ProgramId, DecisionReason]] = []
        excess = used_blocks - PRESSURE_HIGH * pool_blocks if self.evicts else 0.0
        for lease in sorted(leases, key=eviction_order):
            shortened_s = lease.expires_s - 0.5 * pressure * lease.ttl_s
            if shortened_s <= now and not lease.hinted and not lease.waiting:
                ended.append((lease.program_id, DecisionReason.TTL))
            elif excess > 0:
                ended.append((lease.program_id, DecisionReason.PRESSURE))
            else:
                continue
            excess -= lease.blocks
        return ended


def _percentile_s(ordered: Sequence[float]) -> float:
    if len(ordered) >= EMPIRICAL_CALLS:
        return ordered[min(len(ordered) - 1, math.ceil(PERCENTILE * len(ordered)) - 1)]
    logs = [math.log(max(MIN_TTL_S, value)) for value in ordered]
    mean = math.fsum(logs) / len(logs)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / max(1, len(logs) - 1))
    # Limited before exp(), since the tail of extreme samples would overflow a float.
    return math.exp(min(math.log(MAX_TTL_S), mean + NormalDist().inv_cdf(PERCENTILE) * spread))
