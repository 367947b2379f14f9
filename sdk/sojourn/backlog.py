"""Events not sent yet: one bounded queue, in rows by program. No lock, no clock: the emitter has both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from .events import Event
from .wire import encode


class Pending(NamedTuple):
    """An event that happened at ``at_s`` and is not sent yet."""

    program_id: str
    kind: type[Event]
    seq: int
    at_s: float
    fields: dict[str, Any]

    def encode(self, now: float) -> bytes:
        """JSON as of ``now``, which fixes ``age_s``. Raises ``WireError``."""
        age_s = round(max(0.0, now - self.at_s), 6)
        return encode(self.kind(program_id=self.program_id, seq=self.seq, age_s=age_s, **self.fields))


class Backlog:
    """At most ``limit`` events, oldest first within each program."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, deque[Pending]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def full(self) -> bool:
        """No further event has room."""
        return self._size >= self._limit

    def append(self, pending: Pending) -> None:
        """Add the newest event of its program; the caller has looked at ``full``."""
        self._rows.setdefault(pending.program_id, deque()).append(pending)
        self._size += 1

    def put_back(self, taken: Iterable[Pending]) -> int:
        """Put events, in their order, before all others of their programs. How many had no room."""
        left = list(taken)
        while left and not self.full:
            pending = left.pop()
            self._rows.setdefault(pending.program_id, deque()).appendleft(pending)
            self._size += 1
        return len(left)

    def take(
        self, program_id: str, now: float, *, max_events: int, max_bytes: int
    ) -> tuple[list[Pending], int]:
        """Remove the oldest events of one program: at most ``max_events``, of at most ``max_bytes`` of JSON
        with one byte each for the comma. They, and how many were thrown away because JSON cannot say them.
        """
        taken: list[Pending] = []
        unsayable = 0
        row = self._rows.get(program_id)
        used = 0
        while row and len(taken) < max_events:
            try:
                used += len(row[0].encode(now)) + 1
            except Exception:
                row.popleft()
                unsayable += 1
                continue
            if used > max_bytes:
                break
            taken.append(row.popleft())
        if row is not None and not row:
            self._rows.pop(program_id, None)
        self._size -= len(taken) + unsayable
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
        self._size = sum(map(len, self._rows.values()))
        return batch

    def clear(self) -> int:
        """Forget all. How many there were."""
        size, self._size = self._size, 0
        self._rows.clear()
        return size
