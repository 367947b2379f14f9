"""When to bring a program's prefix back before it is asked for (S5; SAGA §4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .views import PrefetchView


class Prefetch(NamedTuple):
    """Begin at ``at_s``, so that it is there by ``by_s``; engine clock."""

    at_s: float
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPrefetch:
    """Bring nothing back ahead of time."""

    plans: bool = False

    def plan(self, view: PrefetchView, now: float) -> Prefetch | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeliestSuccessor:
    """Once a tool runs whose likeliest successor is known, have its prefix back when the tool may end.

    The paper begins at once (``early_share`` 0). We wait until ``early_share`` of such calls have ended, less
    the time of the copy: what is brought back sooner only takes the place of others. Raises ``ValueError``
    for a share outside 0 to 1.
    """

    early_share: float = 0.25
    min_goes_on: float = 0.5
    """No prefetch for a program that is less likely to go on."""
    plans: bool = True

    def __post_init__(self) -> None:
        for name, value in (("early_share", self.early_share), ("min_goes_on", self.min_goes_on)):
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is {value}; expected 0 to 1")

    def plan(self, view: PrefetchView, now: float) -> Prefetch | None:
        if view.goes_on < self.min_goes_on:
            return None
        by_s = now
        if view.tool_durations_s:
            durations = view.tool_durations_s
            by_s = now + durations[min(len(durations) - 1, int(self.early_share * len(durations)))]
        return Prefetch(max(now, by_s - view.reload_s), by_s)
