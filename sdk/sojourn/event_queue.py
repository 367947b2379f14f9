"""The bounded queue of unsent events, grouped by program. The queue has no lock and no clock of its own; its
owner, the event sender, provides both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from .wire_codec import encode
from .wire_events import Event


class PendingEvent:
    """An event that is not sent yet. ``at_s`` is the time when it happened, in monotonic seconds. ``seq`` is
    -1 until the event sender, or ``EventQueue.take_in``, numbers the event."""

    # Not a msgspec struct, since making the first one with cold caches takes an agent microseconds.
    __slots__ = ("at_s", "fields", "kind", "program_id", "seq")

    def __init__(
        self, program_id: str, kind: type[Event], seq: int, at_s: float, fields: dict[str, Any]
    ) -> None:
        self.program_id = program_id
        self.kind = kind
        self.seq = seq
        self.at_s = at_s
        self.fields = fields

    def event(self, now: float) -> Event:
        """Return the event as a wire message, with its age at the time ``now``. Raises ``TypeError`` for
        unknown fields."""
        age_s = now - self.at_s
        age_s = round(age_s, 6) if age_s > 0.0 else 0.0
        return self.kind(program_id=self.program_id, seq=self.seq, age_s=age_s, **self.fields)

    def encode(self, now: float) -> bytes:
        """Return the event as JSON, with its age at the time ``now``. Raises ``TypeError`` for an unknown
        field, and ``WireError`` for a value that JSON cannot express."""
        return encode(self.event(now))


class EventQueue:
    """Unsent events, oldest first within each program. From ``limit`` events on, the queue is ``full``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, deque[PendingEvent]] = {}
        self.size = 0
        """Number of events. For reading only."""

    @property
    def full(self) -> bool:
        """Whether the queue is at its limit."""
        return self.size >= self._limit

    def take_in(self, inbox: deque[PendingEvent], numbers: Iterator[int]) -> int:
        """Move all events from ``inbox`` to the queue, number them with ``numbers``, and return their count.
        Does not check the queue's limit."""
        rows = self._rows
        count = 0
        while inbox:
            pending = inbox.popleft()
            pending.seq = next(numbers)
            row = rows.get(pending.program_id)
            if row is None:
                row = rows[pending.program_id] = deque()
            row.append(pending)
            count += 1
        self.size += count
        return count

    def put_back(self, taken: Iterable[PendingEvent]) -> int:
        """Put events back, in order, before the other events of their programs. If the queue becomes full,
        the oldest of the returning events are dropped. Returns the number of dropped events."""
        left = list(taken)
        while left and not self.full:
            pending = left.pop()
            self._rows.setdefault(pending.program_id, deque()).appendleft(pending)
            self.size += 1
        return len(left)

    def take(self, program_id: str, max_events: int) -> list[PendingEvent]:
        """Remove and return the oldest events of one program."""
        row = self._rows.get(program_id, deque())
        taken = [row.popleft() for _ in range(min(len(row), max_events))]
        if not row:
            self._rows.pop(program_id, None)
        self.size -= len(taken)
        return taken

    def batch(self, max_events: int) -> list[PendingEvent]:
        """Remove and return up to ``max_events`` events, program by program, in the order in which the
        programs were queued."""
        batch: list[PendingEvent] = []
        while self._rows and len(batch) < max_events:
            program_id, row = next(iter(self._rows.items()))
            while row and len(batch) < max_events:
                batch.append(row.popleft())
            if not row:
                del self._rows[program_id]
        # Recounted, since garbage collection may end a program and so append an event between any two lines.
        # A wrong count would keep the sender awake for ever.
        self.size = sum(map(len, self._rows.values()))
        return batch

    def clear(self) -> int:
        """Remove all events and return their number."""
        size, self.size = self.size, 0
        self._rows.clear()
        return size
