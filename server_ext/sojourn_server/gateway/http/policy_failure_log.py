"""Logs failures of routing policies: the core writes no log, and clients only see that it failed."""

from __future__ import annotations

import logging
import math

from ...routing.routing_limits import RoutingCounters

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""Limits the log if a policy fails at every request."""


class PolicyFailureLog:
    """Log of one core's failures."""

    def __init__(self, counts: RoutingCounters) -> None:
        self._counts = counts
        self._said = 0
        self._said_s = -math.inf

    def look(self, now: float) -> None:
        """Log new failures since the last line."""
        new = self._counts.policy_failures - self._said
        if new <= 0 or now - self._said_s < LOG_INTERVAL_S:
            return
        self._said, self._said_s = self._counts.policy_failures, now
        logger.error(
            "the policy that routes failed at %d question%s, the last time with %s; please report this",
            new,
            "" if new == 1 else "s",
            self._counts.newest_policy_failure or "nothing said",
        )
