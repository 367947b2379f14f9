"""Virtual time: the clock, and the queue of events behind every simulation."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Any


class VirtualClock:
    """Virtual seconds since the start of the simulation. Calling the clock returns the time, as with
    ``time.monotonic``."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, at_s: float) -> None:
        """Set the time to ``at_s``. Raises ``ValueError`` for a time in the past."""
        if at_s < self.now_s:
            raise ValueError(f"time cannot go back from {self.now_s} s to {at_s} s")
        self.now_s = at_s


Event = tuple[float, int, Callable[..., None], tuple[Any, ...], "deque[Event] | None", bool]
"""A scheduled callback: (due time in virtual seconds, sequence number, callback, arguments of the callback,
the FIFO that contains the event or ``None``, whether this is a background event). See ``EventQueue``."""


class EventQueue:
    """Callbacks with due times in virtual seconds. Callbacks with equal due times run in the order of
    scheduling. ``now_s`` is the due time of the event that ran last. After ``run_due_events``, it is the
    argument of that call."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[Event] = []
        self._count = 0
        self._foreground_events = 0

    def schedule_at(
        self, at_s: float, call: Callable[..., None], *args: Any, background: bool = False
    ) -> None:
        """Schedule ``call(*args)`` for ``at_s``. Background events (ticks, samples) do not keep a simulation
        running."""
        self._count = count = self._count + 1
        heappush(self._events, (at_s, count, call, args, None, background))
        self._foreground_events += not background

    def schedule_in_fifo(
        self, line: deque[Event], at_s: float, call: Callable[..., None], *args: Any
    ) -> None:
        """Schedule ``call(*args)`` for ``at_s``, at the end of the FIFO ``line``. No event in ``line`` may be
        due after ``at_s``.

        The heap holds only the first event of each FIFO, so it is small and stays in the processor's cache.
        """
        self._count = count = self._count + 1
        event = (at_s, count, call, args, line, False)
        if not line:
            heappush(self._events, event)
        line.append(event)
        self._foreground_events += 1

    def run_until(self, limit_s: float, max_events: int = sys.maxsize) -> int:
        """Run the events that are due at ``limit_s`` or before, at most ``max_events``. Returns how many were
        run."""
        events, ran = self._events, 0
        while events and ran < max_events:
            at_s, _, call, args, line, background = events[0]
            if at_s > limit_s:
                break
            if line is None:
                heappop(events)
            else:
                line.popleft()
                if line:
                    heapreplace(events, line[0])
                else:
                    heappop(events)
            self._foreground_events -= not background
            self.now_s = at_s
            ran += 1
            call(*args)
        return ran

    def run_due_events(self, now: float) -> None:
        """Run every event that is due at ``now`` or before, including events that a running event schedules.
        Then set the time to ``now``."""
        self.run_until(now)
        self.now_s = now

    def next_s(self) -> float:
        """Due time of the next event; ``inf`` for an empty queue."""
        return self._events[0][0] if self._events else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether only background events are left."""
        return not self._foreground_events
