"""What is still to happen on the clients' side, in order of virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Agenda:
    """Things due at a time. While one happens, ``now_s`` is when it was due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None], bool]] = []
        self._tie = itertools.count()
        self._awaited = 0

    def at(self, at_s: float, happens: Callable[[], None], *, background: bool = False) -> None:
        """``happens`` at ``at_s``, after what was put down for that time earlier. A simulation does not go on
        for the sake of ``background`` things: ticks and looks have no end."""
        heapq.heappush(self._due, (at_s, next(self._tie), happens, background))
        self._awaited += not background

    def happen_until(self, now: float) -> None:
        """Let all that is due by ``now`` happen, and what that puts down until then."""
        due = self._due
        while due and due[0][0] <= now:
            self.now_s, _, happens, background = heapq.heappop(due)
            self._awaited -= not background
            happens()
        self.now_s = now

    def next_s(self) -> float:
        """When the next thing is due; ``inf`` where none is."""
        return self._due[0][0] if self._due else float("inf")

    @property
    def is_over(self) -> bool:
        """Whether only background things are left."""
        return not self._awaited
