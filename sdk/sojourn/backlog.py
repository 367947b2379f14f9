"""Events not sent yet: one bounded queue, in rows by program. No lock, no clock: the emitter has both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from .events import Event
from .wire import encode


class Pending(msgspec.Struct, gc=False):
    """An event that happened at ``at_s`` and is not sent yet."""

    program_id: str
    kind: type[Event]
    seq: int
    at_s: float
    fields: dict[str, Any]

    def event(self, now: float) -> Event:
        """As of ``now``, which fixes ``age_s``. Raises ``TypeError`` for fields it has not."""
        age_s = now - self.at_s
        age_s = round(age_s, 6) if age_s > 0.0 else 0.0
        return self.kind(program_id=self.program_id, seq=self.seq, age_s=age_s, **self.fields)

    def encode(self, now: float) -> bytes:
        """``event`` as JSON. Raises ``WireError`` too."""
        return encode(self.event(now))


class Backlog:
    """At most ``limit`` events, oldest first within each program."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, deque[Pending]] = {}
        self.size = 0
        """How many there are. For reading only."""

    @property
    def full(self) -> bool:
        """No further event has room."""
        return self.size >= self._limit

    def take_in(self, inbox: deque[Pending], numbers: Iterator[int]) -> int:
        """Empty ``inbox`` and give each its number. How many they were; the caller has looked at ``full``."""
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

    def put_back(self, taken: Iterable[Pending]) -> int:
        """Put events, in their order, before all others of their programs. How many had no room."""
        left = list(taken)
        while left and not self.full:
            pending = left.pop()
            self._rows.setdefault(pending.program_id, deque()).appendleft(pending)
            self.size += 1
        return len(left)

    def take(
        self, program_id: str, clock: Callable[[], float], *, max_events: int, max_bytes: int | None = None
    ) -> tuple[list[Pending], int]:
        """Remove the oldest events of one program: at most ``max_events``, of at most ``max_bytes`` of JSON
        with one byte each for the comma. They, and how many were thrown away because JSON cannot say them,
        which shows only where the bytes count.
        """
        taken: list[Pending] = []
        row = self._rows.get(program_id)
        if row is None:
            return taken, 0
        if max_bytes is None and len(row) <= max_events:
            row = self._rows.pop(program_id)
            self.size -= len(row)
            return list(row), 0
        unsayable = 0
        used = 0
        now = clock()
        while row and len(taken) < max_events:
            if max_bytes is not None:
                try:
                    used += len(row[0].encode(now)) + 1
                except Exception:
                    row.popleft()
                    unsayable += 1
                    continue
                if used > max_bytes:
                    break
            taken.append(row.popleft())
        if not row:
            self._rows.pop(program_id, None)
        self.size -= len(taken) + unsayable
        return taken, unsayable

    def batch(self, max_events: int) -> list[Pending]:
        """Remove up to ``max_events``: whole programs, longest waiting first, each in its order."""
        batch: list[Pending] = []
        while self._rows and len(batch) < max_events:
            program_id, row = next(iter(self._rows.items()))
            while row and len(batch) < max_events:
                batch.append(row.popleft())
            if not row:
                del self._rows[program_id]
        # Counted afresh: a garbage collection may append between any two lines, and a count that drifted
        # would keep the sender awake for ever.
        self.size = sum(map(len, self._rows.values()))
        return batch

    def clear(self) -> int:
        """Forget all. How many there were."""
        size, self.size = self.size, 0
        self._rows.clear()
        return size
