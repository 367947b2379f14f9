"""What the cache remembers about one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Entry:
    """A value, its size, and the moment from which it counts as spoiled."""

    value: Any
    size: int
    expires_s: float
    reads: int = 0

    def fresh(self, now_s: float) -> bool:
        """Whether the value may still be handed out."""
        return now_s < self.expires_s

    def touch(self, now_s: float, ttl_s: float) -> None:
        """Count a read."""
        self.reads += 1
        self.expires_s = now_s + ttl_s
