"""Limits the share of an engine's time that client events may use."""

from __future__ import annotations

EVENT_SHARE = 0.04
"""Share of the engine's time that events may use once ``EVENT_BURST_S`` is used up."""
EVENT_BURST_S = 0.02
"""Maximum budget that can be saved up for a burst of events, in seconds of the engine's time."""
MAX_WAIT_S = 1.5
"""Maximum wait after a call in seconds, so that one slow call does not delay events for long. The value is
below the SDK's ``send_timeout_s``."""


class EventTimeBudget:
    """Computes how long an engine's API servers must wait before they send the next client events. There is
    one budget per engine, because its API servers share the engine's time. Times are in seconds."""

    def __init__(self, now: float) -> None:
        self._credit_s = EVENT_BURST_S
        self._credited_at = now

    def spend(self, busy_s: float, now: float) -> float:
        """Charge a call that took ``busy_s`` and ended at ``now``; returns the seconds to wait before the
        next call."""
        earned_s = max(now - self._credited_at, 0.0) * EVENT_SHARE
        self._credited_at = now
        credit_s = min(self._credit_s + earned_s, EVENT_BURST_S) - busy_s
        self._credit_s = max(credit_s, -MAX_WAIT_S * EVENT_SHARE)
        return max(-self._credit_s / EVENT_SHARE, 0.0)
