"""How long to wait before trying again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Exponential delays: ``base_s``, then ``factor`` times more each time, at most ``cap_s``."""

    base_s: float = 0.2
    factor: float = 2.0
    cap_s: float = 2.0
    attempts: int = 4

    def __post_init__(self) -> None:
        if self.base_s <= 0 or self.factor < 1 or self.attempts < 1:
            raise ValueError(f"{self} never makes progress")

    def delays(self) -> Iterator[float]:
        """Seconds to wait after each failed attempt; one fewer than there are attempts."""
        for attempt in range(1, self.attempts):
            yield min(self.cap_s, self.base_s * self.factor**attempt)

    @property
    def longest_s(self) -> float:
        """Seconds spent waiting if every attempt fails."""
        return sum(self.delays())
