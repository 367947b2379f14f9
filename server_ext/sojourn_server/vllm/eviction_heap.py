"""Buckets of free cached blocks, in a heap by eviction score, lowest first."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from sojourn.ids import ProgramId

from ..policies.policy_views import AbandonedBranch
from .compat import KVCacheBlock

Score = tuple[float, ...]
"""Eviction score of a bucket. Scores are compared as tuples; the lowest is evicted first."""
NEWEST_TURN = math.inf
"""``Bucket.used_s`` of the blocks of a program's newest turn."""
NO_SCORE: Score = (-math.inf,)
"""Score of a bucket that the scorer could not score. Such buckets are evicted before all others, in the order
in which they were added: by least recent use, as in stock vLLM."""
Standing = tuple[float, ...] | None
"""The inputs from which the policy computes a bucket's score; ``None`` for an unknown program. They do not
depend on the score's scale."""


class Bucket:
    """Free cached blocks that one program last used in the same turn, in eviction order."""

    __slots__ = ("blocks", "place", "program_id", "standing", "used_s")

    def __init__(self, program_id: ProgramId, used_s: float = NEWEST_TURN) -> None:
        self.program_id = program_id
        self.used_s = used_s
        """Time at which the program last used the blocks, in seconds on the engine's clock."""
        self.blocks: OrderedDict[int, KVCacheBlock] = OrderedDict()
        """Block id → block. Popping the first blocks of a plain dict takes ever longer."""
        self.standing: Standing = None
        self.place: tuple[Score, bool, int] | None = None
        """Sort key in the heap: (score, whether the bucket is a newest turn, insertion number). Among equal
        scores, abandoned branches come first, then the bucket added first. ``None``: not in the heap."""


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
        self.scorer = scorer
        self._heap: list[tuple[tuple[Score, bool, int], Bucket]] = []
        """Entries whose place is not the bucket's present one are stale."""
        self._live = 0
        """Number of buckets."""
        self._pushes = 0
        self.rescaled = False
        """Whether the scale of scores has changed since the last read. Set by the caller."""

    def push(self, bucket: Bucket) -> None:
        """Insert a bucket, or score it again if it is in the heap."""
        self._pushes += 1
        self._live += bucket.place is None
        is_newest = bucket.used_s == NEWEST_TURN
        bucket.standing = None
        try:
            left = None if is_newest else AbandonedBranch(bucket.used_s, len(bucket.blocks))
            bucket.standing = self.scorer.standing(bucket.program_id, left)
        except Exception as error:
            self.scorer.score_failed(error)
        bucket.place = self._score(bucket), is_newest, self._pushes
        heapq.heappush(self._heap, (bucket.place, bucket))
        if len(self._heap) > 4 * self._live + 64:
            self._heap = sorted(self._valid())

    def forget(self, bucket: Bucket) -> None:
        """Remove a bucket, if it is in the heap."""
        self._live -= bucket.place is not None
        bucket.place = None

    def first(self) -> tuple[Bucket, Score] | None:
        """Return the bucket to evict first, and its score; ``None`` without buckets."""
        self._rescore_all()
        while self._heap:
            place, bucket = self._heap[0]
            if bucket.place is place:
                return bucket, place[0]
            heapq.heappop(self._heap)
        return None

    def ordered(self) -> list[Bucket]:
        """Return all buckets in eviction order."""
        self._rescore_all()
        return [bucket for _, bucket in sorted(self._valid())]

    def _valid(self) -> Iterator[tuple[tuple[Score, bool, int], Bucket]]:
        return (entry for entry in self._heap if entry[1].place is entry[0])

    def _rescore_all(self) -> None:
        """Compute the score of every bucket again, about 1 µs each, if the scale has changed."""
        if self.rescaled:
            self.rescaled = False
            entries = []
            for (_, is_newest, number), bucket in self._valid():
                bucket.place = self._score(bucket), is_newest, number
                entries.append((bucket.place, bucket))
            heapq.heapify(entries)
            self._heap = entries

    def _score(self, bucket: Bucket) -> Score:
        try:
            return self.scorer.score(bucket.standing)
        except Exception as error:
            self.scorer.score_failed(error)
            return NO_SCORE
