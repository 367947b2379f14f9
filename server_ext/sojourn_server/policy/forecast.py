"""Whether running requests will run out of blocks, and how soon: when to copy one ahead (Tetris §2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .demand import shortage_in


class DemandView(NamedTuple):
    """What running requests are expected to need, for the forecast question."""

    needed_blocks: Sequence[float]
    """At each of ``demand.POINTS``."""
    room_blocks: int
    """Blocks that they may have in all, with what they share counted for each."""


class ForecastPolicy(Protocol):
    """How many steps until running requests run short; ``None``: not so soon that anything had to be done.

    ``looks`` False: never asked, and no victim is copied ahead. An answer moves data and never preempts.
    """

    looks: bool

    def short_in(self, demand: DemandView, now: float) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoForecast:
    """A shortage is met when it comes."""

    looks: bool = False

    def short_in(self, demand: DemandView, now: float) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedNeed:
    """Where more is expected to be needed than there is, within ``steps`` steps. Raises ``ValueError``
    for less than one."""

    steps: int = 128
    looks: bool = True

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps is {self.steps}; expected ≥ 1")

    def short_in(self, demand: DemandView, now: float) -> int | None:
        return shortage_in(demand.needed_blocks, demand.room_blocks, self.steps)
