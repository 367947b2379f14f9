"""The gate: one bucket for each customer, forgotten when it has long been full."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .bucket import Bucket
from .plan import plan_of


@dataclass(frozen=True)
class Verdict:
    """Whether the request may pass, and when to come back if not."""

    allowed: bool
    retry_after_s: float = 0.0


class Gate:
    """Judges requests of many customers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._plans: dict[str, str] = {}
        self.refused: dict[str, int] = {}

    def enrol(self, customer: str, plan: str) -> None:
        """Give ``customer`` the limits of ``plan``; an old bucket is thrown away."""
        limits = plan_of(plan)
        self._plans[customer] = plan
        self._buckets[customer] = Bucket(limits.burst, limits.per_second, self._clock)

    def judge(self, customer: str, cost: float = 1.0) -> Verdict:
        """May this request pass? Unknown customers are on the free plan."""
        if customer not in self._buckets:
            self.enrol(customer, "free")
        bucket = self._buckets[customer]
        if bucket.take(cost):
            return Verdict(True)
        self.refused[customer] = self.refused.get(customer, 0) + 1
        return Verdict(False, bucket.wait_s(cost))

    def prune(self) -> int:
        """Forget free customers whose bucket is full; returns how many went."""
        idle = [
            customer
            for customer, bucket in self._buckets.items()
            if self._plans[customer] == "free" and bucket.tokens >= bucket.capacity
        ]
        for customer in idle:
            del self._buckets[customer], self._plans[customer]
        return len(idle)
