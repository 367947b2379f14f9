"""The decision log: an engine's latest scheduling decisions with time and reason, in bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from msgspec import Meta


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the program scheduler. ``at_s`` is in seconds on the engine's monotonic clock."""

    seq: int
    at_s: float
    kind: str
    """What was decided, for example ``keep``, ``release``, ``preempt``, ``prefetch`` or ``to_host``."""
    program_id: str | None
    reason: str
    numbers: dict[str, float]
    """Inputs and results of the decision, e.g. ``ttl_s``, ``blocks``."""

    def as_dict(self) -> DecisionRecord:
        """Return the decision as a flat JSON object."""
        return {
            "seq": self.seq,
            "at_s": round(self.at_s, 6),
            "kind": self.kind,
            "program_id": self.program_id,
            "reason": self.reason,
            **self.numbers,
        }


_FIELDS: dict[str, Any] = {
    "seq": {"type": "integer", "description": "Number of the decision in its engine's log."},
    "at_s": {"type": "number", "description": "Seconds on the engine's monotonic clock."},
    "kind": {"type": "string", "description": "What was decided, for example keep, release or preempt."},
    "program_id": {"type": ["string", "null"]},
    "reason": {"type": "string"},
}
_TERMS = {"description": "A term of the decision, for example ttl_s or blocks.", "type": "number"}

# Plain dictionaries, since each kind of decision has terms of its own.
DecisionRecord = Annotated[
    dict[str, Any],
    Meta(
        description="A scheduling decision.",
        extra_json_schema={
            "properties": _FIELDS,
            "required": sorted(_FIELDS),
            "additionalProperties": _TERMS,
        },
    ),
]
"""Result of ``Decision.as_dict()``."""


class DecisionLog:
    """The last ``capacity`` decisions. ``SchedulerState`` sets the capacity of an engine's log."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring: deque[Decision] = deque(maxlen=capacity)
        self._next = 0

    def add(self, at_s: float, kind: str, program_id: str | None, reason: str, **numbers: float) -> Decision:
        """Append a decision and return it."""
        decision = Decision(self._next, at_s, kind, program_id, reason, numbers)
        self._next += 1
        self._ring.append(decision)
        return decision

    def of_program(self, program_id: str, limit: int = 200) -> list[Decision]:
        """Return the last ``limit`` kept decisions on a program, oldest first."""
        found = islice((one for one in reversed(self._ring) if one.program_id == program_id), limit)
        return list(found)[::-1]

    @property
    def oldest_s(self) -> float | None:
        """Time of the oldest kept decision; ``None`` if the log has dropped no decision yet."""
        return self._ring[0].at_s if self._ring and self._ring[0].seq else None

    def since(self, seq: int, limit: int) -> tuple[list[Decision], int]:
        """Return at most ``limit`` decisions from number ``seq`` on, oldest first, and the ``seq`` to ask for
        next.

        If ``seq`` is above the newest number, as after a restart of the engine, the list is empty. The
        returned ``seq`` is then the number that the next decision will have.
        """
        # From the newest end: a recording asks after every event for the few that are new.
        chosen = list(islice(reversed(self._ring), max(0, self._next - seq)))[::-1][:limit]
        return chosen, (chosen[-1].seq + 1 if chosen else self._next)
