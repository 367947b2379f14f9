"""Limits repeated log messages, so that a lasting fault does not fill the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

LOG_INTERVAL_S = 10.0
"""Minimum seconds between two lines with the same message."""


class RateLimitedLog:
    """Logs the same message at most once per ``LOG_INTERVAL_S``, with the number of suppressed repetitions.

    Two messages are the same if their format strings are equal, whatever their arguments.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lines: dict[str, tuple[float, int]] = {}
        """Message → (time of its last line, number of suppressed repetitions since then)."""

    def log(
        self, level: int, message: str, *arguments: object, exc_info: bool | BaseException = False
    ) -> None:
        """Log a message, unless the same message was logged less than ``LOG_INTERVAL_S`` ago. The arguments
        are those of ``logging.log``."""
        now = self._clock()
        logged_s, suppressed = self._lines.get(message, (-math.inf, 0))
        if now - logged_s < LOG_INTERVAL_S:
            self._lines[message] = (logged_s, suppressed + 1)
            return
        self._lines[message] = (now, 0)
        more = f" ({suppressed} more since the last one)" if suppressed else ""
        self._logger.log(level, message + more, *arguments, exc_info=exc_info, stacklevel=2)
