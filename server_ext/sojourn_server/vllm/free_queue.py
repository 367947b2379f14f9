"""The engine's queue of free blocks, with an order that knows programs.

``BlockPool.free_block_queue`` *is* vLLM's eviction order: blocks are reused from
its front. This queue stands in its place. Blocks of no program keep the
engine's own linked list and thus the engine's own order; with an order by
program, cached blocks of programs live in buckets and are reused by ascending
score: one bucket for what a program's newest turn used, and one for what that
did without (an abandoned branch, a context that was compacted). O(1) a block;
O(log programs) when a program's score changes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

Score = tuple[float, ...]
Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""One program; the set of several; or ``MANY``."""
Evicted = Callable[[KVCacheBlock, Owner, "Score | None"], None]
"""Block, owner, and the score by which it was chosen; ``None``: by the engine's own order."""

Bucket = tuple[ProgramId, bool]
"""A program, and whether its newest turn did without these blocks."""
ScoreOf = Callable[[ProgramId, bool], Score]
"""The place of a bucket, lowest first."""
Place = tuple[Score, bool, int]
"""Of the same score, what a turn did without goes first, then what was filed or scored first."""

SHARED: Bucket = (ProgramId(""), False)
"""Of blocks that several programs own; an empty id cannot come over the wire."""

MAX_OWNERS = 16
"""Owners of a block who are known by name. More would cost memory and tell nothing."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block of more programs than that. It stays shared, whoever ends, until it is reused or reset."""


class ProgramFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool.

    ``score`` gives a bucket's place in the order, lowest first; None keeps the
    engine's order for all. ``evicted`` hears of every owned, cached block that
    is reused, while it still has its hash.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        score: ScoreOf | None = None,
    ) -> None:
        super().__init__([])
        self._score = score
        self._evicted = evicted
        self._owner: dict[int, Owner] = {}
        self._owned: dict[ProgramId, dict[int, None]] = {}
        """Of each program the blocks it is named as an owner of, in the order of its context."""
        self.left_reused = 0
        """Blocks that a turn did without and somebody then used for what they hold."""
        self.left_evicted = 0
        """The same that were taken for something else instead."""
        self._left_used_s: dict[ProgramId, float] = {}
        """Of each bucket of what a turn did without, when the oldest of it was last used."""
        self._buckets: dict[Bucket, OrderedDict[int, KVCacheBlock]] = {}
        """Only such as have blocks in them."""
        self._bucket_of: dict[int, Bucket] = {}
        self._place: dict[Bucket, Place] = {}
        """Of each bucket the one entry of the heap that counts; others are left over from earlier scores."""
        self._heap: list[tuple[Place, Bucket]] = []
        self._pushes = 0
        super().append_n(_taken_from(replaced))

    # -- ownership ------------------------------------------------------------

    def own(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> None:
        """Note that the program's context is (also) in these cached blocks. Call before they are freed.

        O(1) a block, however many programs share it.
        """
        owned = self._owned.setdefault(program_id, {})
        for block in blocks:
            block_id = block.block_id
            owner = self._owner.get(block_id)
            if owner is None:
                self._owner[block_id] = program_id
            elif isinstance(owner, str):
                if owner == program_id:
                    continue
                self._owner[block_id] = {owner, program_id}
                self._refile(block_id)
            elif isinstance(owner, frozenset) or program_id in owner:
                continue
            elif len(owner) < MAX_OWNERS:
                owner.add(program_id)
            else:
                self._forget_names(block_id, owner)
                self._owner[block_id] = MANY
                continue
            owned[block_id] = None
        if not owned:
            del self._owned[program_id]

    def disown(self, program_id: ProgramId) -> list[int]:
        """The program is no owner any more; returns the ids of blocks that nobody owns now.

        Free ones among them go where blocks of no program are: uncached to the
        front, cached to the end. Blocks of ``MANY`` are not among them.
        """
        orphans: list[int] = []
        # Against the order of the context: of what moves, tails are to be reused first.
        for block_id in reversed(self._owned.pop(program_id, {})):
            owner = self._owner[block_id]
            if isinstance(owner, set):
                owner.discard(program_id)
                if len(owner) == 1:
                    self._owner[block_id] = owner.pop()
                    self._refile(block_id)
            else:
                del self._owner[block_id]
                orphans.append(block_id)
        # Whatever is in its buckets it owned alone.
        for left in (True, False):
            self._to_list(self._empty_bucket((program_id, left)))
        return orphans

    def forget_all(self) -> None:
        """Nobody owns anything any more: the cache was reset. No block is lost or gained."""
        bucketed = [block for name in self._order() for block in self._empty_bucket(name)]
        self._heap.clear()
        self._owner.clear()
        self._owned.clear()
        self._to_list(bucketed)

    def owners(self, block_id: int) -> frozenset[ProgramId]:
        """Programs whose context is in the block; none where they are too ``MANY`` to be named."""
        owner = self._owner.get(block_id, MANY)
        return frozenset((owner,)) if isinstance(owner, str) else frozenset(owner)

    def owned_blocks(self) -> int:
        """How many blocks have an owner."""
        return len(self._owner)

    def rescore(self, program_id: ProgramId) -> None:
        """The program's score may have changed."""
        for left in (False, True):
            if (program_id, left) in self._buckets:
                self._push((program_id, left))

    def leave_behind(self, program_id: ProgramId, used_s: float) -> None:
        """What is free of the program now, its newest turn does without; it was last used at ``used_s``.

        Call when the turn has got its blocks.
        """
        bucket = self._buckets.get((program_id, False))
        if bucket is None:
            return
        left = self._buckets.get((program_id, True))
        if left is None:
            left = self._buckets[program_id, True] = OrderedDict()
            self._left_used_s[program_id] = used_s
        left.update(bucket)
        self._bucket_of.update(dict.fromkeys(bucket, (program_id, True)))
        self._forget_bucket((program_id, False))
        self._push((program_id, True))

    def left(self, program_id: ProgramId) -> tuple[float, int]:
        """(when the oldest of it was last used, blocks) of what the program's newest turn did without."""
        return self._left_used_s[program_id], len(self._buckets[program_id, True])

    def programs(self) -> list[ProgramId]:
        """Those that have free cached blocks of their own."""
        return list(dict.fromkeys(program_id for program_id, _ in self._buckets if program_id))

    def discard_to_front(self, block: KVCacheBlock) -> None:
        """Make a free block, whose hash has just been taken away, the first to be reused."""
        self._take_out(block)
        super().prepend_n([block])

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if self._score is None or not self._owner:
            super().append_n(blocks)
            return
        owners, bucket_of = self._owner, self._bucket_of
        for block in blocks:
            owner = owners.get(block.block_id)
            if owner is None or block.block_hash is None:
                super().append(block)
                continue
            name = (owner, False) if isinstance(owner, str) else SHARED
            bucket = self._buckets.get(name)
            if bucket is None:
                bucket = self._bucket(name)
            bucket[block.block_id] = block
            bucket_of[block.block_id] = name
            self.num_free_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Of the engine: somebody has found what the block holds."""
        self.left_reused += self._bucket_of.get(block.block_id, SHARED)[1]
        self._take_out(block)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        # The list's own way takes n blocks from the list unseen, so all free ones must be there.
        if not self._bucket_of:
            blocks = super().popleft_n(n)
            if self._owner:
                for block in blocks:
                    self._reused(block, None)
            return blocks
        popped = self._first_of_list(n)
        scored: list[tuple[KVCacheBlock, Score | None]] = [(block, None) for block in popped]
        while len(popped) < n:
            blocks, score = self._first_of_buckets(n - len(popped))
            popped += blocks
            scored += [(block, score) for block in blocks]
        for block, score in scored:
            self._reused(block, score)
        return popped

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Blocks in the order of their reuse. Lazy: the queue must not change between two of one bucket."""
        within = self._bucket_of.get(cursor.block_id) if cursor is not None else None
        if within is None:
            yield from super().iter_blocks_after(cursor)
            if cursor is not None and cursor.next_free_block is None:
                return  # not free, so nothing comes after it
            names = self._order()
        else:
            assert cursor is not None
            rest = iter(self._buckets[within])
            for block_id in rest:
                if block_id == cursor.block_id:
                    break
            yield from map(self._buckets[within].__getitem__, rest)
            names = self._order()
            names = names[names.index(within) + 1 :]
        for name in names:
            yield from self._buckets[name].values()

    # -- inside -----------------------------------------------------------------

    def _take_out(self, block: KVCacheBlock) -> None:
        name = self._bucket_of.pop(block.block_id, None)
        if name is None:
            super().remove(block)
            return
        bucket = self._buckets[name]
        del bucket[block.block_id]
        if not bucket:
            self._forget_bucket(name)
        self.num_free_blocks -= 1

    def _forget_bucket(self, name: Bucket) -> None:
        del self._buckets[name], self._place[name]
        if name[1]:
            del self._left_used_s[name[0]]

    def _bucket(self, name: Bucket) -> OrderedDict[int, KVCacheBlock]:
        bucket = self._buckets.get(name)
        if bucket is None:
            self._push(name)
            bucket = self._buckets[name] = OrderedDict()
        return bucket

    def _refile(self, block_id: int) -> None:
        """The owner of a block has changed: if it is in a bucket, to the one where it belongs now."""
        name = self._bucket_of.get(block_id)
        if name is None:
            return
        block = self._buckets[name][block_id]
        self._take_out(block)
        if block.block_hash is None:
            self._to_list([block])
        else:
            self.append(block)

    def _to_list(self, blocks: list[KVCacheBlock]) -> None:
        """Uncached blocks to the front, which is where vLLM frees them to, and cached ones to the end."""
        super().prepend_n([block for block in blocks if block.block_hash is None])
        super().append_n([block for block in blocks if block.block_hash is not None])

    def _empty_bucket(self, name: Bucket) -> list[KVCacheBlock]:
        """The blocks of the bucket, in order; they are nowhere now."""
        bucket = self._buckets.get(name)
        if bucket is None:
            return []
        self._forget_bucket(name)
        for block_id in bucket:
            del self._bucket_of[block_id]
        self.num_free_blocks -= len(bucket)
        return list(bucket.values())

    def _first_of_list(self, most: int) -> list[KVCacheBlock]:
        """Uncached blocks, then blocks of no program: as many as there are, at most ``most``."""
        return super().popleft_n(min(most, self.num_free_blocks - len(self._bucket_of)))

    def _first_of_buckets(self, most: int) -> tuple[list[KVCacheBlock], Score]:
        """Of the bucket whose turn it is, at most ``most``; shared blocks come last."""
        while True:
            place, name = self._heap[0]
            if self._place.get(name) == place:
                break
            heapq.heappop(self._heap)
        bucket = self._buckets[name]
        blocks = list(islice(bucket.values(), most))
        for block in blocks:
            del bucket[block.block_id], self._bucket_of[block.block_id]
        if not bucket:
            self._forget_bucket(name)
        self.num_free_blocks -= len(blocks)
        if name[1]:
            self.left_evicted += len(blocks)
        return blocks, place[0]

    def _reused(self, block: KVCacheBlock, score: Score | None) -> None:
        owner = self._owner.pop(block.block_id, None)
        if owner is None:
            return
        self._forget_names(block.block_id, (owner,) if isinstance(owner, str) else owner)
        if block.block_hash is not None:
            self._evicted(block, owner, score)

    def _forget_names(self, block_id: int, owners: Iterable[ProgramId]) -> None:
        for program_id in owners:
            owned = self._owned[program_id]
            del owned[block_id]
            if not owned:
                del self._owned[program_id]

    def _push(self, name: Bucket) -> None:
        self._pushes += 1
        place = self._place[name] = (self._score_of(name), not name[1], self._pushes)
        heapq.heappush(self._heap, (place, name))
        if len(self._heap) > 4 * len(self._place) + 64:
            self._heap = [(place, name) for name, place in self._place.items()]
            heapq.heapify(self._heap)

    def _order(self) -> list[Bucket]:
        return sorted(self._place, key=self._place.__getitem__)

    def _score_of(self, name: Bucket) -> Score:
        if name == SHARED:
            return (float("inf"),)
        assert self._score is not None
        return self._score(*name)


def _taken_from(queue: FreeKVCacheBlockQueue) -> list[KVCacheBlock]:
    """All blocks of ``queue`` in its order; it is empty afterwards."""
    return queue.popleft_n(queue.num_free_blocks)
