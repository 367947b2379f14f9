"""Virtual time: the clock, and the queue of events behind every simulation."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
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


Event = tuple[float, int, Callable[..., None], tuple[Any, ...], bool]
"""A scheduled callback: (due time in virtual seconds, sequence number, callback, arguments of the callback,
whether this is a background event)."""


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
        heappush(self._events, (at_s, count, call, args, background))
        self._foreground_events += not background

    def run_until(self, limit_s: float) -> None:
        """Run the events that are due at ``limit_s`` or before, including events that a running event
        schedules."""
        events = self._events
        while events and events[0][0] <= limit_s:
            at_s, _, call, args, background = heappop(events)
            self._foreground_events -= not background
            self.now_s = at_s
            call(*args)

    def run_due_events(self, now: float) -> None:
        """Run every event that is due at ``now`` or before. Then set the time to ``now``."""
        self.run_until(now)
        self.now_s = now

    def next_s(self) -> float:
        """Due time of the next event; ``inf`` for an empty queue."""
        return self._events[0][0] if self._events else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether only background events are left."""
        return not self._foreground_events
