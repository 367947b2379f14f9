"""Bytes copied between tiers, how long that took, and how long steps waited for it."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from .offload_jobs import OffloadResults

TRANSFER_DIRECTIONS = ("to_host", "to_device", "to_disk", "from_disk")
"""Every direction of copying, by its lane's name."""

SPEED_SAMPLES = 16
"""Newest reports of a direction from which its speed is computed: enough to average out one slow copy, few
enough to notice a link that has slowed."""

SPEED_MAX_AGE_S = 30.0
"""Seconds for which a report counts. A link found slow is used little, so that its recovery would go
unnoticed: after this time its speed is unknown again and is measured anew."""


class OffloadStats:
    """Sums of the worker's reports."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TRANSFER_DIRECTIONS, 0.0)
        self._bytes: Counter[str] = Counter()
        self._waited_s = 0.0
        self._newest: dict[str, deque[tuple[float, float, int]]] = {
            lane: deque(maxlen=SPEED_SAMPLES) for lane in TRANSFER_DIRECTIONS
        }
        """By direction: time of the report, seconds and bytes."""

    def add(self, results: OffloadResults, now: float) -> None:
        """Add one report."""
        for lane, seconds in results.seconds.items():
            self._seconds[lane] = self._seconds.get(lane, 0.0) + seconds
            self._newest[lane].append((now, seconds, results.moved_bytes.get(lane, 0)))
        self._bytes.update(results.moved_bytes)
        self._waited_s += results.waited_s

    def seconds_a_byte(self, lane: str, now: float) -> float | None:
        """Recent seconds per byte in a direction; ``None``: nothing was copied recently."""
        newest = self._newest[lane]
        while newest and now - newest[0][0] > SPEED_MAX_AGE_S:
            newest.popleft()
        took_s, moved = sum(seconds for _, seconds, _ in newest), sum(size for _, _, size in newest)
        return took_s / moved if moved and took_s > 0 else None

    def totals(self) -> dict[str, Any]:
        """Since the engine started: ``moved_bytes`` and busy ``seconds`` by lane; ``waited_s``, seconds for
        which forward passes waited for copies between device and host memory; ``overlapped``, the share of
        those copies' time without waiting, ``None`` before the first copy."""
        copied_s = self._seconds["to_host"] + self._seconds["to_device"]
        return {
            "moved_bytes": {lane: self._bytes[lane] for lane in TRANSFER_DIRECTIONS},
            "seconds": {lane: round(self._seconds[lane], 6) for lane in TRANSFER_DIRECTIONS},
            "waited_s": round(self._waited_s, 6),
            "overlapped": round(1.0 - min(1.0, self._waited_s / copied_s), 4) if copied_s else None,
        }
