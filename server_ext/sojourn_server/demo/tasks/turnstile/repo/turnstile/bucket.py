"""A token bucket: a request costs tokens, time brings them back."""

from __future__ import annotations

import time
from collections.abc import Callable


class Bucket:
    """Starts full with ``capacity`` tokens and gains ``rate`` of them per second."""

    def __init__(self, capacity: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity <= 0 or rate <= 0:
            raise ValueError(f"capacity {capacity} and rate {rate} must be positive")
        self.capacity = capacity
        self.rate = rate
        self._clock = clock
        self._tokens = capacity
        self._filled_s = clock()

    @property
    def tokens(self) -> float:
        """Tokens there are right now."""
        self._fill()
        return self._tokens

    def take(self, cost: float = 1.0) -> bool:
        """Pay ``cost`` if the bucket holds that much; otherwise nothing changes."""
        self._fill()
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def wait_s(self, cost: float = 1.0) -> float:
        """Seconds until ``cost`` could be paid. Raises ``ValueError`` if that never happens."""
        if cost > self.capacity:
            raise ValueError(f"a cost of {cost} exceeds the capacity {self.capacity}")
        self._fill()
        return max(0.0, (cost - self._tokens) / self.rate)

    def _fill(self) -> None:
        now_s = self._clock()
        self._tokens = self._tokens + (now_s - self._filled_s) * self.rate
        self._filled_s = now_s
