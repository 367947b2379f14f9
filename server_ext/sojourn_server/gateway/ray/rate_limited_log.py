"""Limits repeated log messages, so that a lasting fault does not fill the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

LOG_INTERVAL_S = 10.0


class RateLimitedLog:
    """Logs the same message once per ``every_s``, with the number of suppressed ones.

    Messages are the same if they have the same text before formatting.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LOG_INTERVAL_S,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._every_s = every_s
        self._said_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def say(self, level: int, message: str, *arguments: object, exc_info: bool = False) -> None:
        """Log at a level of ``logging``; ``exc_info``: with the current exception."""
        now = self._clock()
        if now - self._said_s.get(message, -math.inf) < self._every_s:
            self._unsaid[message] = self._unsaid.get(message, 0) + 1
            return
        self._said_s[message] = now
        unsaid = self._unsaid.pop(message, 0)
        more = f" ({unsaid} more since the last one)" if unsaid else ""
        self._logger.log(level, message + more, *arguments, exc_info=exc_info, stacklevel=2)
