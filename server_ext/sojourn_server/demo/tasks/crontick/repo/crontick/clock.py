"""Time as the scheduler sees it: the real one, or one that a test moves by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also wait."""

    def now(self) -> float:
        """Seconds since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class RealClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Give the processor away for ``seconds``."""
        time.sleep(max(0.0, seconds))


class ManualClock:
    """Stands still until someone sleeps."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The time reached so far."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move forward at once."""
        self._now_s += max(0.0, seconds)
