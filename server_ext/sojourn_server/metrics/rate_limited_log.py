"""Limits repeated log messages, so that a lasting fault does not fill the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

LOG_INTERVAL_S = 10.0
"""Default seconds between two lines with the same message."""


class RateLimitedLog:
    """Logs the same message at most once per ``every_s`` seconds, with the number of suppressed repetitions.

    Two messages are the same if their format strings are equal, whatever their arguments.
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
        self._logged_s: dict[str, float] = {}
        """Time of the last line with each message."""
        self._suppressed: dict[str, int] = {}
        """Number of suppressed repetitions of each message since its last line."""

    def log(
        self, level: int, message: str, *arguments: object, exc_info: bool | BaseException = False
    ) -> None:
        """Log a message, unless the same message was logged less than ``every_s`` seconds ago. The arguments
        are those of ``logging.log``."""
        now = self._clock()
        if now - self._logged_s.get(message, -math.inf) < self._every_s:
            self._suppressed[message] = self._suppressed.get(message, 0) + 1
            return
        self._logged_s[message] = now
        suppressed = self._suppressed.pop(message, 0)
        more = f" ({suppressed} more since the last one)" if suppressed else ""
        self._logger.log(level, message + more, *arguments, exc_info=exc_info, stacklevel=2)
