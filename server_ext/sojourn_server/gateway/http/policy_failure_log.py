"""Logs failures of routing policies."""

from __future__ import annotations

import logging
import math

from ...metrics.rate_limited_log import LOG_INTERVAL_S
from ...routing.routing_limits import RoutingCounters

logger = logging.getLogger(__name__)


class PolicyFailureLog:
    """Logs the failures of one core's policies, since the core itself writes no log."""

    def __init__(self, counts: RoutingCounters) -> None:
        self._counts = counts
        self._logged = 0
        """Number of failures that have been logged."""
        self._last_line_s = -math.inf
        """Time of the last log line, on the clock of ``now``."""

    def log_new_failures(self, now: float) -> None:
        """Log the failures since the last log line, in one line, at most once per ``LOG_INTERVAL_S``.
        ``now``: present time of a monotonic clock, in seconds."""
        new = self._counts.policy_failures - self._logged
        if new <= 0 or now - self._last_line_s < LOG_INTERVAL_S:
            return
        self._logged, self._last_line_s = self._counts.policy_failures, now
        logger.error(
            "the routing policy failed in %d call%s, the last time with %s; please report this",
            new,
            "" if new == 1 else "s",
            self._counts.newest_policy_failure or "no text",
        )
