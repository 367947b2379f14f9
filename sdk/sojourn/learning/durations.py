"""How long tool calls took, by tool and by class of what the tool ran: medians and 95th percentiles.

``ok``, ``nonzero`` and ``error`` count as they are: a failed call kept the agent
waiting just as long. A ``timeout`` counts as *at least* its duration (Kaplan and
Meier 1958), so that a tool which always runs into its limit is not taken for one
of just that length. ``cancelled`` does not count: it was the caller who stopped.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

ENOUGH_SAMPLES = 5
"""Below this nothing is said."""
MAX_SAMPLES = 500
"""Kept of one key, the newest."""
MAX_KEYS = 1024
COUNTED = frozenset({"ok", "nonzero", "error", "timeout"})

Key = tuple[str, str | None]
"""Tool and class; the class is ``None`` for the tool as a whole."""


class Expectation(NamedTuple):
    """Seconds."""

    median_s: float
    p95_s: float


class Durations:
    """Samples by key. One writer at a time; ``expected`` may be called from any thread meanwhile."""

    def __init__(self) -> None:
        self._samples: OrderedDict[Key, deque[tuple[float, bool]]] = OrderedDict()
        self._expected: dict[Key, Expectation] = {}
        self._stale: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, tool: str, tool_class: str | None, duration_s: float, status: str) -> bool:
        """Take a sample. False where it does not count. ``settle`` makes it tell."""
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
            self._expected.pop(forgotten, None)
            self._stale.pop(forgotten, None)
        return True

    def settle(self) -> None:
        """Work out anew what changed."""
        stale, self._stale = self._stale, {}
        for key in stale:
            samples = self._samples.get(key)
            if samples is not None and len(samples) >= ENOUGH_SAMPLES:
                self._expected[key] = estimate(samples)

    def expected(self, tool: str, tool_class: str | None) -> Expectation | None:
        """For the next such call: of its class where that was seen often enough, else of the tool."""
        found = self._expected.get((tool, tool_class))
        return found if found is not None or tool_class is None else self._expected.get((tool, None))


def estimate(samples: Iterable[tuple[float, bool]]) -> Expectation:
    """Median and 95th percentile of ``(seconds, at least)`` samples; not empty.

    The Kaplan–Meier estimate. Where too many samples are only lower bounds for a quantile to be known, it is
    the longest sample.
    """
    # A lower bound stands behind an exact sample of the same length: it lasted longer.
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
            return Expectation(median_s, duration_s)
    longest_s = ordered[-1][0]
    return Expectation(longest_s if median_s is None else median_s, longest_s)


__all__ = ["ENOUGH_SAMPLES", "Durations", "Expectation"]
