"""What goes wrong again and again, said now and then: a fault that stays fills no disk."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

EVERY_S = 10.0


class Seldom:
    """A logger that says the same message once in ``every_s``, and then how often it came meanwhile.

    Messages are the same whose text before arguments are put in is the same.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._every_s = every_s
        self._said_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def say(self, level: int, message: str, *arguments: object, exc_info: bool = False) -> None:
        """At a level of ``logging``; ``exc_info``: with the exception that is being handled."""
        now = self._clock()
        if now - self._said_s.get(message, -math.inf) < self._every_s:
            self._unsaid[message] = self._unsaid.get(message, 0) + 1
            return
        self._said_s[message] = now
        unsaid = self._unsaid.pop(message, 0)
        more = f" ({unsaid} more since this was last said)" if unsaid else ""
        self._logger.log(level, message + more, *arguments, exc_info=exc_info, stacklevel=2)
