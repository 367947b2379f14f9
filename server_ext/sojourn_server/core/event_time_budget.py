"""The part of an engine's time that client events may take."""

from __future__ import annotations

EVENT_SHARE = 0.1
"""Part of the engine's time for events once ``EVENT_BURST_S`` is used up."""
EVENT_BURST_S = 0.02
"""Engine time that events may take at once after a quiet second."""
MAX_WAIT_S = 1.0
"""Longest wait after one call: a slow call must not keep events out for long."""


class EventTimeBudget:
    """Tells the API servers of one engine how long to wait before they send events again.

    The engine keeps it, because all API servers share the engine's time. Times in seconds.
    """

    def __init__(self, now: float) -> None:
        self._credit_s = EVENT_BURST_S
        self._credited_at = now

    def spend(self, busy_s: float, now: float) -> float:
        """Charge a call that took ``busy_s`` and ended at ``now``; seconds to wait before the next."""
        earned_s = max(now - self._credited_at, 0.0) * EVENT_SHARE
        self._credited_at = now
        credit_s = min(self._credit_s + earned_s, EVENT_BURST_S) - busy_s
        self._credit_s = max(credit_s, -MAX_WAIT_S * EVENT_SHARE)
        return max(-self._credit_s / EVENT_SHARE, 0.0)
