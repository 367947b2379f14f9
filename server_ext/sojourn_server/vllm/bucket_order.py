"""In what order buckets of cached blocks are reused."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from sojourn.ids import ProgramId

Score = tuple[float, ...]
NEWEST = math.inf
Bucket = tuple[ProgramId, float]
"""A program, and when it last used these blocks; ``NEWEST``: in its newest turn."""
Standing = tuple[float, ...] | None
"""What a bucket's score is made of, whatever the scale."""
Place = tuple[Score, bool, int]
"""Of the same score, what a turn did without goes first, then what was filed or scored first."""

SHARED: Bucket = (ProgramId(""), NEWEST)
"""Of blocks that several programs own, which go last; an empty id cannot come over the wire."""


class Order(Protocol):
    """In what order programs' buckets are reused: ascending ``score``."""

    def standing(self, program_id: ProgramId, left: tuple[float, int] | None) -> Standing:
        """Asked when a bucket is begun and at ``rescore``. ``left``: (when it was last used, blocks) of what
        a turn did without."""

    def score(self, standing: Standing) -> Score:
        """The place of a standing, the same for the same standing until ``rescale``."""


class BucketOrder:
    """A heap of buckets by score. O(log buckets) to file one; O(buckets), once, when the scale has moved."""

    def __init__(self, order: Order) -> None:
        self.by = order
        self.standings: dict[Bucket, Standing] = {}
        self.places: dict[Bucket, Place] = {}
        """Of each bucket the one entry of the heap that counts; others are left over from earlier scores."""
        self.heap: list[tuple[Place, Bucket]] = []
        self.rescaled = False
        """Scores are measured in something else now; they are worked out when they are next looked at."""
        self._filed = 0

    def file(self, name: Bucket, blocks: int) -> None:
        """The bucket of so many blocks is new, or what its score is made of may have changed."""
        self._filed += 1
        program_id, used_s = name
        if name != SHARED:
            left = (used_s, blocks) if used_s != NEWEST else None
            self.standings[name] = self.by.standing(program_id, left)
        place = self.places[name] = (self._score(name), used_s == NEWEST, self._filed)
        heapq.heappush(self.heap, (place, name))
        if len(self.heap) > 4 * len(self.places) + 64:
            self._tidy()

    def forget(self, name: Bucket) -> None:
        """Such a bucket is no more."""
        self.places.pop(name, None)
        self.standings.pop(name, None)

    def first(self) -> tuple[Bucket, Score]:
        """The bucket to be reused first, and its score. Raises ``IndexError`` where there is none."""
        if self.rescaled:
            self._place_anew()
        while True:
            place, name = self.heap[0]
            if self.places.get(name) == place:
                return name, place[0]
            heapq.heappop(self.heap)

    def ordered(self) -> list[Bucket]:
        """All buckets, the first to be reused first."""
        if self.rescaled:
            self._place_anew()
        return sorted(self.places, key=self.places.__getitem__)

    def clear(self) -> None:
        """There are no buckets any more."""
        self.places.clear()
        self.standings.clear()
        self.heap.clear()

    def _place_anew(self) -> None:
        """About a microsecond a bucket."""
        self.rescaled = False
        for name, (_, used, filed) in self.places.items():
            self.places[name] = (self._score(name), used, filed)
        self._tidy()

    def _tidy(self) -> None:
        self.heap = [(place, name) for name, place in self.places.items()]
        heapq.heapify(self.heap)

    def _score(self, name: Bucket) -> Score:
        return (math.inf,) if name == SHARED else self.by.score(self.standings[name])
