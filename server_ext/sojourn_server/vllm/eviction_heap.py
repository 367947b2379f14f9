"""Heap of buckets by eviction score, lowest first.

A bucket stands for the free cached blocks that one program last used in the same turn. One more bucket stands
for all free cached blocks with several owners.
"""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from sojourn.ids import ProgramId

from ..policies.policy_views import AbandonedBranch

Score = tuple[float, ...]
"""Eviction score of a bucket. Scores are compared as tuples; the lowest is evicted first."""
NEWEST_TURN = math.inf
"""Time in a bucket's key that marks the blocks of the program's newest turn."""
Bucket = tuple[ProgramId, float]
"""Key of a bucket: (program, time at which it last used the blocks). The time is in seconds on the engine's
clock, or ``NEWEST_TURN`` for blocks of the program's newest turn."""
Standing = tuple[float, ...] | None
"""The inputs from which the policy computes a bucket's score; ``None`` for an unknown program. They do not
depend on the score's scale."""
HeapPosition = tuple[Score, bool, int]
"""Sort key in the heap: (score, whether the bucket is a newest turn, insertion number). Among equal scores,
abandoned branches come first, then the bucket added first."""

SHARED_BUCKET: Bucket = (ProgramId(""), NEWEST_TURN)
"""Bucket of blocks with several owners, evicted last. Its program id is empty, which no client can send."""
NO_SCORE: Score = (-math.inf,)
"""Score of a bucket that the scorer could not score. Such buckets are evicted before all others, in the order
in which they were added: by least recent use, as in stock vLLM."""


class BucketScorer(Protocol):
    """Scores the buckets of programs. The bucket with the lowest score is evicted first."""

    def standing(self, program_id: ProgramId, left: AbandonedBranch | None) -> Standing:
        """Return the present standing (the inputs of the score) of the abandoned branch ``left``, or of the
        program's newest turn if ``left`` is ``None``."""

    def score(self, standing: Standing) -> Score:
        """Return the score of a standing. Equal standings have equal scores until the scale changes."""

    def score_failed(self, error: Exception) -> None:
        """Report that one of the two methods above has raised ``error``."""


class EvictionHeap:
    """Heap of buckets by score, lowest first. Adding a bucket takes O(log buckets). After a change of the
    scale of scores (``rescaled``), the next read computes all scores again, in O(buckets)."""

    def __init__(self, scorer: BucketScorer) -> None:
        self._scorer = scorer
        self.standings: dict[Bucket, Standing] = {}
        self.places: dict[Bucket, HeapPosition] = {}
        """Bucket → position in its valid heap entry. Heap entries with another position are stale."""
        self.heap: list[tuple[HeapPosition, Bucket]] = []
        self.rescaled = False
        """Whether the scale of scores has changed since the last read. Set by the caller."""
        self._pushes = 0

    def push(self, name: Bucket, blocks: int) -> None:
        """Insert a bucket, or score it again if it is in the heap. ``blocks``: its number of blocks."""
        self._pushes += 1
        program_id, used_s = name
        if name != SHARED_BUCKET:
            left = AbandonedBranch(used_s, blocks) if used_s != NEWEST_TURN else None
            self.standings[name] = None
            try:
                self.standings[name] = self._scorer.standing(program_id, left)
            except Exception as error:
                self._scorer.score_failed(error)
        place = self.places[name] = (self._score(name), used_s == NEWEST_TURN, self._pushes)
        heapq.heappush(self.heap, (place, name))
        if len(self.heap) > 4 * len(self.places) + 64:
            self._rebuild_heap()

    def forget(self, name: Bucket) -> None:
        """Remove a bucket, if it is in the heap."""
        self.places.pop(name, None)
        self.standings.pop(name, None)

    def first(self) -> tuple[Bucket, Score]:
        """Return the bucket to evict first, and its score. Raises ``IndexError`` without buckets."""
        if self.rescaled:
            self._rescore_all()
        while True:
            place, name = self.heap[0]
            if self.places.get(name) == place:
                return name, place[0]
            heapq.heappop(self.heap)

    def ordered(self) -> list[Bucket]:
        """Return all buckets in eviction order."""
        if self.rescaled:
            self._rescore_all()
        return sorted(self.places, key=self.places.__getitem__)

    def clear(self) -> None:
        """Remove all buckets."""
        self.places.clear()
        self.standings.clear()
        self.heap.clear()

    def _rescore_all(self) -> None:
        """Compute the score of every bucket again, about 1 µs each."""
        self.rescaled = False
        for name, (_, is_newest_turn, number) in self.places.items():
            self.places[name] = (self._score(name), is_newest_turn, number)
        self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self.heap = [(place, name) for name, place in self.places.items()]
        heapq.heapify(self.heap)

    def _score(self, name: Bucket) -> Score:
        if name == SHARED_BUCKET:
            return (math.inf,)
        try:
            return self._scorer.score(self.standings[name])
        except Exception as error:
            self._scorer.score_failed(error)
            return NO_SCORE
