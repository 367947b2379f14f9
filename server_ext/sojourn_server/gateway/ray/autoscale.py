"""How many engines there should be: as many as the programs that were taken in need room."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleLimits:
    """Bounds, and how slowly to shrink. Raises ``ValueError`` for bounds that make no sense."""

    min_engines: int = 1
    max_engines: int = 1
    target_use: float = 0.8
    """Of an engine's room; above it there is one engine more."""
    shrink_below_use: float = 0.6
    """There is one less only where the rest would be used less than this."""
    shrink_after_s: float = 300.0
    """And that for so long: engines take minutes to start, and take their KV with them."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_engines <= self.max_engines:
            raise ValueError(
                f"min_engines {self.min_engines}, max_engines {self.max_engines}; expected 1 ≤ min ≤ max"
            )
        if not 0 < self.shrink_below_use < self.target_use <= 1:
            raise ValueError(
                f"shrink_below_use {self.shrink_below_use}, target_use {self.target_use}; expected "
                "0 < shrink_below_use < target_use ≤ 1"
            )
        if not self.shrink_after_s >= 0:
            raise ValueError(f"shrink_after_s is {self.shrink_after_s}; expected ≥ 0")


@dataclass(frozen=True, slots=True)
class Need:
    """What programs take, and what one engine has. In tokens of KV."""

    programs_tokens: int
    """Sizes of the programs at home somewhere, and of those that wait for room."""
    engine_tokens: int
    """Room of one engine, all tiers; 0: none is known."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was decided last."""

    engines: int
    low_since_s: float | None = None
    """Since when fewer would do."""


def wanted_engines(need: Need, before: Wanted, limits: AutoscaleLimits, now: float) -> Wanted:
    """More at once, fewer after a while and one at a time."""
    engines = min(max(before.engines, limits.min_engines), limits.max_engines)
    if need.engine_tokens <= 0:
        return Wanted(engines)
    grown = math.ceil(need.programs_tokens / (need.engine_tokens * limits.target_use))
    if grown > engines:
        return Wanted(min(grown, limits.max_engines))
    fewer = engines - 1
    if fewer < limits.min_engines or need.programs_tokens >= (
        fewer * need.engine_tokens * limits.shrink_below_use
    ):
        return Wanted(engines)
    since_s = now if before.low_since_s is None or before.low_since_s > now else before.low_since_s
    if now - since_s >= limits.shrink_after_s:
        return Wanted(fewer, now)
    return Wanted(engines, since_s)
