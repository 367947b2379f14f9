"""Baseline retention policies: no leases, leases of fixed length, and InferCept's rule of least waste."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..policy_protocols import DecisionReason, RetentionDecision
from ..policy_views import FinishedTurnView


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
