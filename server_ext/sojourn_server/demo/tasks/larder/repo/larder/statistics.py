"""Counters, and the one number people ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """What happened since the cache was made."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among all reads; 0 before the first read."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 0.0

    def line(self) -> str:
        """One line for a log."""
        return (
            f"hits={self.hits} misses={self.misses} expired={self.expired} "
            f"evicted={self.evicted} rate={self.hit_rate:.0%}"
        )
