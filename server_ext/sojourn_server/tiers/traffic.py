"""How much was moved between the tiers so far, how long that took, and how much of it was waited for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .jobs import TierResults

LANES = ("to_host", "to_device", "to_disk", "from_disk")
"""Every direction of copying, by its lane's name."""


class Traffic:
    """Sums of what movers report."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(LANES, 0.0)
        self._bytes: Counter[str] = Counter()
        self._waited_s = 0.0

    def add(self, results: TierResults) -> None:
        """Take in one report."""
        for lane, seconds in results.seconds.items():
            self._seconds[lane] = self._seconds.get(lane, 0.0) + seconds
        self._bytes.update(results.moved_bytes)
        self._waited_s += results.waited_s

    def seconds_a_byte(self, lane: str) -> float | None:
        """What a byte has taken in that direction so far; ``None`` before the first."""
        moved = self._bytes[lane]
        return self._seconds[lane] / moved if moved and self._seconds[lane] > 0 else None

    def totals(self) -> dict[str, Any]:
        """Since the engine started: ``moved_bytes`` and busy ``seconds`` by lane; ``waited_s``, seconds for
        which forward passes waited for copies between device and host memory; ``overlapped``, the share of
        those copies' time in which nobody waited, ``None`` before the first."""
        copied_s = self._seconds["to_host"] + self._seconds["to_device"]
        return {
            "moved_bytes": {lane: self._bytes[lane] for lane in LANES},
            "seconds": {lane: round(self._seconds[lane], 6) for lane in LANES},
            "waited_s": round(self._waited_s, 6),
            "overlapped": round(1.0 - min(1.0, self._waited_s / copied_s), 4) if copied_s else None,
        }
