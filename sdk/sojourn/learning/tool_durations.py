"""Median and 95th percentile of tool durations, by tool and by tool class.

Calls with the status ``ok``, ``nonzero`` or ``error`` count with their duration, because the agent waits for
failed calls too. A ``timeout`` counts as *at least* its duration (Kaplan and Meier 1958), because the tool
would have run longer. A ``cancelled`` call does not count, because the caller stopped the tool.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

ENOUGH_SAMPLES = 5
"""Minimum number of samples for an estimate."""
MAX_SAMPLES = 500
"""Maximum number of samples kept per key. The oldest are dropped first."""
MAX_KEYS = 1024
COUNTED = frozenset({"ok", "nonzero", "error", "timeout"})
"""Statuses of the calls that count as samples."""

Key = tuple[str, str | None]
"""Tool and tool class. The class ``None`` stands for all calls of the tool."""


class DurationEstimate(NamedTuple):
    """Estimated duration of a tool call, in seconds."""

    median_s: float
    p95_s: float


class Durations:
    """Duration samples by tool and tool class. One thread writes; any thread may read ``estimates``."""

    def __init__(self) -> None:
        self._samples: OrderedDict[Key, deque[tuple[float, bool]]] = OrderedDict()
        self.estimates: dict[Key, DurationEstimate] = {}
        """The current estimates. Only keys with at least ``ENOUGH_SAMPLES`` samples have an estimate. For
        reading only."""
        self._stale: dict[Key, None] = {}

    def add(self, tool: str, tool_class: str | None, duration_s: float, status: str) -> bool:
        """Add a sample. Returns False if ``status`` is not in ``COUNTED`` or the duration is invalid. The
        estimates change only at the next call of ``update_estimates``."""
        if status not in COUNTED or not (math.isfinite(duration_s) and duration_s >= 0):
            return False
        for key in ((tool, None),) if tool_class is None else ((tool, tool_class), (tool, None)):
            samples = self._samples.get(key)
            if samples is None:
                samples = self._samples[key] = deque(maxlen=MAX_SAMPLES)
            self._samples.move_to_end(key)
            samples.append((duration_s, status == "timeout"))
            self._stale[key] = None
        while len(self._samples) > MAX_KEYS:
            forgotten, _ = self._samples.popitem(last=False)
            self.estimates.pop(forgotten, None)
            self._stale.pop(forgotten, None)
        return True

    def update_estimates(self) -> None:
        """Recompute the estimates of the keys that changed."""
        stale, self._stale = self._stale, {}
        for key in stale:
            samples = self._samples.get(key)
            if samples is not None and len(samples) >= ENOUGH_SAMPLES:
                self.estimates[key] = estimate(samples)


def estimate(samples: Iterable[tuple[float, bool]]) -> DurationEstimate:
    """Return the Kaplan–Meier median and 95th percentile of samples ``(seconds, is_lower_bound)``.

    If too many samples are lower bounds, a quantile is unknown, and the longest sample is returned instead.
    ``samples`` must not be empty.
    """
    # A lower bound sorts after an exact sample of the same length, since that call lasted longer.
    ordered = sorted(samples)
    alive = 1.0
    median_s: float | None = None
    for position, (duration_s, at_least) in enumerate(ordered):
        if at_least:
            continue
        alive *= 1 - 1 / (len(ordered) - position)
        if median_s is None and alive <= 0.5 + 1e-9:
            median_s = duration_s
        if alive <= 0.05 + 1e-9:
            assert median_s is not None
            return DurationEstimate(median_s, duration_s)
    longest_s = ordered[-1][0]
    return DurationEstimate(longest_s if median_s is None else median_s, longest_s)
