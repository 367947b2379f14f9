"""Prefetch: load a program's prefix back before its next request (S5; SAGA §4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..policy_views import PrefetchView


class PrefetchTiming(NamedTuple):
    """Planned times of a prefetch, in engine time: the copy starts at ``at_s`` and should end by ``by_s``."""

    at_s: float
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPrefetch:
    """Never prefetches."""

    plans: bool = False

    def plan(self, view: PrefetchView, now: float) -> PrefetchTiming | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeliestSuccessorPrefetch:
    """Loads a program's prefix shortly before its tool may end, if another turn is likely.

    The copy ends when the tool has run for the ``early_share`` quantile of its earlier durations. Loading KV
    earlier would only take blocks from other programs. If the view has no durations, the prefix is loaded at
    once. The paper always loads at once. Raises ``ValueError`` for a share or probability outside 0 to 1.
    """

    early_share: float = 0.25
    min_goes_on: float = 0.5
    """Minimum probability of another turn for a prefetch."""
    plans: bool = True

    def __post_init__(self) -> None:
        for name, value in (("early_share", self.early_share), ("min_goes_on", self.min_goes_on)):
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is {value}; expected 0 to 1")

    def plan(self, view: PrefetchView, now: float) -> PrefetchTiming | None:
        if view.goes_on < self.min_goes_on:
            return None
        by_s = now
        if view.tool_durations_s:
            durations = view.tool_durations_s
            by_s = now + durations[min(len(durations) - 1, int(self.early_share * len(durations)))]
        return PrefetchTiming(max(now, by_s - view.reload_s), by_s)
