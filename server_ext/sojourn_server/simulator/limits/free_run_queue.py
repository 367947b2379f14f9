"""A queue of free places that takes them in runs and lets any be taken out again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class FreeRunQueue:
    """Places, first in first out. What is taken out of the middle stays in its run, unseen, until its turn.

    O(1) a place. A third of the time of an ``OrderedDict``, which has a node for each.
    """

    __slots__ = ("_run_of", "_runs")

    def __init__(self, run_of: dict[int, int]) -> None:
        """``run_of`` may be shared by several queues, if a place is in one of them only."""
        self._run_of = run_of
        """Of each free place the run that holds it; other runs have it from earlier."""
        self._runs: deque[tuple[int, list[int]]] = deque()
        """(number, places not yet given, the next one last)."""

    def append(self, places: Sequence[int], number: int) -> None:
        """``number`` must be new to ``run_of``."""
        if places:
            self._run_of.update(dict.fromkeys(places, number))
            self._runs.append((number, list(reversed(places))))

    def pop(self, count: int) -> list[int]:
        """The next ``count`` places, or all there are."""
        runs, run_of = self._runs, self._run_of
        given: list[int] = []
        while count and runs:
            number, run = runs[0]
            while count and run:
                place = run.pop()
                if run_of.get(place) == number:
                    del run_of[place]
                    given.append(place)
                    count -= 1
            if not run:
                runs.popleft()
        return given

    def __bool__(self) -> bool:
        """False: surely empty."""
        return bool(self._runs)
