"""Adds up the time in which a program's tools ran between two turns."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

MAX_INTERVALS = 32
"""Maximum number of separate intervals that are kept for one gap. Of older ones only the sum is kept, and a
call that is reported later than they are counts only from their end on."""


class GapToolTime:
    """The seconds of one gap in which reported tool calls ran: the length of the union of their intervals. So
    the time of calls at once counts once, and the time between calls does not count. Reports may come in any
    order. Times are seconds on the engine's clock."""

    __slots__ = ("_counted_s", "_counted_until_s", "_intervals", "last_started_s", "last_tool")

    def __init__(self, gap_started_s: float = -math.inf) -> None:
        """``gap_started_s``: time at which the gap began. What a call ran before it does not count."""
        self.last_tool = ""
        """History key of the call that began last."""
        self.last_started_s = -math.inf
        """Time at which this call began; it may lie before the gap."""
        self._intervals: list[tuple[float, float]] = []
        """Disjoint intervals (start, end), in order."""
        self._counted_s = 0.0
        """Seconds of the older intervals, which are no longer kept."""
        self._counted_until_s = gap_started_s
        """End of the last of these older intervals, or else the gap's start. Nothing before it is added."""

    @property
    def seconds(self) -> float:
        """The seconds in which at least one call ran."""
        return self._counted_s + sum(end_s - start_s for start_s, end_s in self._intervals)

    @property
    def intervals(self) -> Sequence[tuple[float, float]]:
        """The intervals that are kept."""
        return self._intervals

    def add(self, tool: str, start_s: float, end_s: float) -> None:
        """Add the interval of one call. ``tool``: its history key."""
        if start_s >= self.last_started_s:
            self.last_tool, self.last_started_s = tool, start_s
        start_s = max(start_s, self._counted_until_s)
        if end_s <= start_s:
            return
        apart = []
        for one in self._intervals:
            if one[1] < start_s or one[0] > end_s:
                apart.append(one)
            else:
                start_s, end_s = min(one[0], start_s), max(one[1], end_s)
        insort(apart, (start_s, end_s))
        if len(apart) > MAX_INTERVALS:
            first_s, self._counted_until_s = apart.pop(0)
            self._counted_s += self._counted_until_s - first_s
        self._intervals = apart
