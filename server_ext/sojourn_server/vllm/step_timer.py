"""Measures the duration of engine steps. Several steps may be planned before the first one has results."""

from __future__ import annotations

import math
from collections import deque

MAX_STEPS_IN_FLIGHT = 64
"""Maximum number of planned steps without results; older ones are forgotten."""


class StepTimer:
    """Measures the duration of each step, in seconds. The device runs one step at a time. So a step begins
    when it is planned or when the previous step ends, whichever is later."""

    def __init__(self) -> None:
        self._planned: deque[tuple[object, float]] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        """(Step without results, time when it was planned), oldest first."""
        self._ended_s = -math.inf

    def planned(self, step: object, now: float) -> None:
        """Record that a step was planned. ``step``: any object, which identifies the step in ``ended``. The
        timer keeps a reference until ``ended`` is called with this or a later step."""
        self._planned.append((step, now))

    def ended(self, step: object, now: float) -> float | None:
        """Return the seconds that a step took; ``None`` if it is unknown. Call it when the step's results
        arrive. Forgets this step and earlier ones, because results arrive in the order of planning."""
        if not any(one is step for one, _ in self._planned):
            return None
        planned_s = now
        while self._planned:
            one, planned_s = self._planned.popleft()
            if one is step:
                break
        began_s, self._ended_s = max(planned_s, self._ended_s), now
        return max(0.0, now - began_s)
