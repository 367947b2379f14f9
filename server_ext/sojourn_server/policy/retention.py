"""How long to keep a turn's KV: never, a fixed time, or Continuum's time-to-live."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .base import Keep, Reason
from .retention_continuum import ContinuumTtl, TtlBasis
from .views import TurnView

_REASON_OF_BASIS = {
    TtlBasis.COLD_START: Reason.COLD_START,
    TtlBasis.ALL_TOOLS: Reason.ALL_TOOLS,
    TtlBasis.THIS_TOOL: Reason.THIS_TOOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRetention:
    """Keep nothing: stock vLLM's behaviour."""

    def keep(self, turn: TurnView, now: float) -> Keep:
        return Keep(0.0, Reason.POLICY_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRetention:
    """The same time for every tool call.

    Raises ``ValueError`` for a time that is not finite seconds ≥ 0.
    """

    ttl_s: float = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttl_s) and self.ttl_s >= 0):
            raise ValueError(f"ttl_s is {self.ttl_s}; expected finite seconds ≥ 0")

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        return Keep(self.ttl_s, Reason.FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilTheEnd:
    """Keep every turn's KV until the program is over: half of what the baseline ``admit`` does.

    ``ttl_s`` only bounds it: a program that is not heard of for so long is given
    up anyway (``idle_program_s``). Raises ``ValueError`` as ``FixedRetention`` does.
    """

    ttl_s: float = 1800.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttl_s) and self.ttl_s >= 0):
            raise ValueError(f"ttl_s is {self.ttl_s}; expected finite seconds ≥ 0")

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        return Keep(self.ttl_s, Reason.FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuumRetention:
    """Continuum's cost-benefit time-to-live (C4, C5; paper §4.1–4.2).

    A turn that calls no tool is not kept. A time the client asked for replaces
    the computed one: it is bounded, budgeted and given up under pressure alike.
    """

    min_samples: int = 100
    """K: below this many records the estimate falls back to a wider set, then to the cold start."""
    max_ttl_s: float = 300.0
    _rule: ContinuumTtl = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_rule", ContinuumTtl(min_samples=self.min_samples, max_ttl_s=self.max_ttl_s)
        )

    def keep(self, turn: TurnView, now: float) -> Keep:
        if turn.hinted_ttl_s is not None:
            return Keep(min(turn.hinted_ttl_s, self.max_ttl_s), Reason.HINTED)
        if turn.tool is None:
            return Keep(0.0, Reason.NO_TOOL_CALL)
        choice = self._rule.ttl(
            tool=turn.tool,
            history=turn.history,
            reload_s=turn.reload_s,
            mean_evicted_wait_s=turn.mean_evicted_wait_s,
            memoryfulness=turn.memoryfulness,
        )
        if choice.ttl_s <= 0.0:
            return Keep(0.0, Reason.NOT_WORTH_IT)
        return Keep(choice.ttl_s, _REASON_OF_BASIS[choice.basis])
