"""Policies that fail are said in the log: the core writes none, and who asked only hears that it failed."""

from __future__ import annotations

import logging
import math

from ..core.limits import CoreCounts

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""A policy that fails at every request fills no disk."""


class PolicyLog:
    """One for a core."""

    def __init__(self, counts: CoreCounts) -> None:
        self._counts = counts
        self._said = 0
        self._said_s = -math.inf

    def look(self, now: float) -> None:
        """Say what is new since the last line."""
        new = self._counts.policy_failures - self._said
        if new <= 0 or now - self._said_s < EVERY_S:
            return
        self._said, self._said_s = self._counts.policy_failures, now
        logger.error(
            "the policy that routes failed at %d question%s, the last time with %s; please report this",
            new,
            "" if new == 1 else "s",
            self._counts.newest_policy_failure or "nothing said",
        )
