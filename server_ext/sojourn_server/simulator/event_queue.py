"""Virtual time: the clock and queue of events behind every simulation, and transfers that take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .latency.latency_models import LatencyModel


class EventQueue:
    """Virtual clock, and callbacks with due times in virtual seconds since the start of the simulation.
    Callbacks with equal due times run in the order of scheduling. Calling the queue returns ``now_s``, as
    with ``time.monotonic``: the due time of the event that ran last, or the argument of ``run_due_events``
    after it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...], bool]] = []
        """(Due time in virtual seconds, sequence number, callback, its arguments, whether in background)."""
        self._count = 0
        self._foreground_events = 0

    def __call__(self) -> float:
        return self.now_s

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


class TransferLane:
    """Transfers in one direction, one after the other, like a DMA engine."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """``seconds``: function that returns the duration of a transfer of so many bytes."""
        self._seconds = seconds
        self._free_s = 0.0
        self.running: deque[tuple[float, Any]] = deque()
        """(End time, content) of the transfers that have not been taken, in order."""
        self.moved_bytes = 0
        """Bytes of all transfers so far, queued ones included."""

    def begin(self, content: Any, size: int, now: float) -> None:
        """Queue a transfer of ``size`` bytes. It begins at ``now`` at the earliest."""
        self._free_s = max(now, self._free_s) + self.took_s(size)
        self.running.append((self._free_s, content))

    def took_s(self, size: int) -> float:
        """Count a transfer of ``size`` bytes, and return its seconds."""
        self.moved_bytes += size
        return self._seconds(size)

    def take_done(self, now: float) -> Iterator[Any]:
        """Yield the content of the transfers that have ended by ``now``, in order, each once."""
        while self.running and self.running[0][0] <= now:
            yield self.running.popleft()[1]


class HostTransfers:
    """Simulated copies between the tiers of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.to_host = TransferLane(lambda size: latency.copy_s(size, to_host=True))
        self.to_device = TransferLane(lambda size: latency.copy_s(size, to_host=False))
        self.to_disk = TransferLane(lambda size: latency.disk_s(size, to_disk=True))
        self.from_disk = TransferLane(lambda size: latency.disk_s(size, to_disk=False))

    def next_done_s(self) -> float:
        """Time at which the next transfer ends; ``inf`` if none is running."""
        lanes = (self.to_host, self.to_device, self.to_disk, self.from_disk)
        return min((lane.running[0][0] for lane in lanes if lane.running), default=float("inf"))

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is running or queued."""
        return self.next_done_s() != float("inf")
