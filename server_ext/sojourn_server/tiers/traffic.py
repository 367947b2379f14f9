"""How much was moved between the tiers so far, how long that took, and how much of it was waited for."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from .jobs import TierResults

LANES = ("to_host", "to_device", "to_disk", "from_disk")
"""Every direction of copying, by its lane's name."""

SPEED_REPORTS = 16
"""The newest reports of a direction, from which its speed is told: that a link has slowed is noticed after a
few copies, and one that was slow by chance is one of many."""

SPEED_HOLDS_S = 30.0
"""Seconds for which a report counts. Over a link that is found slow little is copied, so that nobody would
notice when it is fast again: after that it is taken for what links are, and found out anew."""


class Traffic:
    """Sums of what movers report."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(LANES, 0.0)
        self._bytes: Counter[str] = Counter()
        self._waited_s = 0.0
        self._newest: dict[str, deque[tuple[float, float, int]]] = {
            lane: deque(maxlen=SPEED_REPORTS) for lane in LANES
        }
        """Of each direction, when it was reported, seconds and bytes."""

    def add(self, results: TierResults, now: float) -> None:
        """Take in one report."""
        for lane, seconds in results.seconds.items():
            self._seconds[lane] = self._seconds.get(lane, 0.0) + seconds
            self._newest[lane].append((now, seconds, results.moved_bytes.get(lane, 0)))
        self._bytes.update(results.moved_bytes)
        self._waited_s += results.waited_s

    def seconds_a_byte(self, lane: str, now: float) -> float | None:
        """What a byte has taken in that direction of late; ``None``: nothing was copied of late."""
        newest = self._newest[lane]
        while newest and now - newest[0][0] > SPEED_HOLDS_S:
            newest.popleft()
        took_s, moved = sum(seconds for _, seconds, _ in newest), sum(size for _, _, size in newest)
        return took_s / moved if moved and took_s > 0 else None

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
