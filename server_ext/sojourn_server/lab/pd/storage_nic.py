"""A node's storage NIC: reads one after the other, whole requests, and what it has read when."""

from __future__ import annotations

WINDOW_S = 10.0
"""Bytes are counted in windows of that length, for how evenly NICs are used over time."""


class StorageNic:
    """First come first served; writes go the other way and are only counted."""

    __slots__ = ("blocks", "blocks_in", "busy_until_s", "node", "rate_blocks_per_s", "written_tokens")

    def __init__(self, node: int, rate_blocks_per_s: float) -> None:
        self.node = node
        self.rate_blocks_per_s = rate_blocks_per_s
        self.busy_until_s = 0.0
        self.blocks = 0
        """Read so far, or about to be: in Full Blocks."""
        self.blocks_in: list[float] = []
        """By window; a read that spans several is shared out."""
        self.written_tokens = 0

    def read(self, blocks: int, now: float) -> float:
        """When a read that is handed over now will be done."""
        begin = self.busy_until_s
        if begin < now:
            begin = now
        end = begin + blocks / self.rate_blocks_per_s
        self.busy_until_s = end
        self.blocks += blocks
        first, last = int(begin / WINDOW_S), int(end / WINDOW_S)
        counted = self.blocks_in
        if len(counted) <= last:
            counted.extend([0.0] * (last + 1 - len(counted)))
        if first == last:
            counted[first] += blocks
        else:
            for window in range(first, last + 1):
                inside = min(end, (window + 1) * WINDOW_S) - max(begin, window * WINDOW_S)
                counted[window] += inside * self.rate_blocks_per_s
        return end
