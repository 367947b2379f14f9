"""A node's storage NIC: reads one after the other, whole requests, and what it has read when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..event_queue import Event

WINDOW_S = 10.0
"""Bytes are counted in windows of that length, for how evenly NICs are used over time."""


class StorageNic:
    """First come first served; writes go the other way and are only counted."""

    __slots__ = (
        "_window", "_window_from_s", "_window_to_s", "blocks", "blocks_in", "busy_until_s", "line", "node",
        "rate_blocks_per_s", "written_tokens",
    )  # fmt: skip

    def __init__(self, node: int, rate_blocks_per_s: float) -> None:
        self.node = node
        self.rate_blocks_per_s = rate_blocks_per_s
        self.busy_until_s = 0.0
        self.blocks = 0
        """Read so far, or about to be: in Full Blocks."""
        self.blocks_in: list[float] = [0.0]
        """By window; a read that spans several is shared out."""
        self.written_tokens = 0
        self.line: deque[Event] = deque()
        """Events of the simulation at the ends of queued reads."""
        self._window, self._window_from_s, self._window_to_s = 0, 0.0, WINDOW_S

    def read(self, blocks: int, now: float) -> float:
        """When a read that is handed over now will be done."""
        begin = self.busy_until_s
        if begin < now:
            begin = now
        end = begin + blocks / self.rate_blocks_per_s
        self.busy_until_s = end
        self.blocks += blocks
        if end < self._window_to_s and begin >= self._window_from_s:
            self.blocks_in[self._window] += blocks
        else:
            self._add_to_window(blocks, begin, end)
        return end

    def _add_to_window(self, blocks: int, begin: float, end: float) -> None:
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
        self._window, self._window_from_s, self._window_to_s = last, last * WINDOW_S, (last + 1) * WINDOW_S
