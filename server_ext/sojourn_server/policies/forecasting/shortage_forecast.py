"""The question ``forecast``: when will running requests run out of blocks (Tetris §2.3)?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .kv_demand import first_shortage_step


class KvDemandView(NamedTuple):
    """Expected demand of the running requests."""

    needed_blocks: Sequence[float]
    """Demand at each of ``kv_demand.STEP_POINTS``."""
    available_blocks: int
    """Free blocks plus all blocks of the running requests. A shared block counts once for each request that
    uses it."""


class ShortageForecastPolicy(Protocol):
    """Predicts in how many steps running requests run out of blocks; ``None``: not soon enough to act.

    After a prediction, the engine copies a likely victim's KV to host memory in advance, but preempts
    nothing. ``is_used``: whether the policy is asked. If not, no KV is copied in advance.
    """

    is_used: bool

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoShortageForecast:
    """No forecast: a shortage is handled when it occurs."""

    is_used: bool = False

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDemandForecast:
    """Predicts the number of engine steps until expected demand exceeds the available blocks.

    Looks ``steps`` steps ahead. Raises ``ValueError`` for less than one step.
    """

    steps: int = 128
    is_used: bool = True

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps is {self.steps}; expected ≥ 1")

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None:
        return first_shortage_step(demand.needed_blocks, demand.available_blocks, self.steps)
