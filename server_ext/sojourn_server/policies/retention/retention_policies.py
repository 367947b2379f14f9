"""Baseline retention policies: no leases, or leases of fixed length."""

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

    ``ttl_s`` is only an upper bound. The KV of a program without activity for ``idle_program_s`` is dropped
    anyway.
    """

    ttl_s: float = 1800.0
