"""vLLM's queue of free blocks, in an eviction order by program.

``BlockPool.free_block_queue`` is vLLM's eviction order, because the pool reuses blocks from its front. This
queue replaces it. Blocks without a program stay in vLLM's linked list and keep vLLM's order. If the policy
orders blocks by program, cached blocks of programs are in buckets, and the bucket with the lowest score is
evicted first. A program has one bucket for the blocks of its newest turn. It has another bucket for each
earlier turn with blocks that no later turn used (an abandoned branch, a compacted context).

Cost: O(1) per block; O(log buckets) for each rescored bucket; O(buckets) once after the scale of scores has
changed.

Blocks that only an ended program has used stay cached, but are evicted early (``ENDED_BUCKET``). If any other
request has used such a block, the block is part of a common prefix and counts as a block without a program.
The other request may be of another program or of no program, or may have come after the program's end.

The order of eviction is:

1. uncached blocks at the front of vLLM's list
2. ``ENDED_BUCKET``: blocks of ended programs and unused blocks loaded ahead of need, in order of insertion
3. the rest of vLLM's list
4. the buckets of programs, lowest score first
5. ``SHARED_BUCKET``: blocks with several owners

vLLM calls this queue in places where no hook can catch an error of sojourn. The queue therefore catches its
own errors. After an error it forgets all programs and keeps vLLM's order for good. An error of the scorer
reduces only the blocks that it could not score to vLLM's order (``NO_SCORE``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from functools import wraps
from itertools import dropwhile, islice, takewhile
from typing import Concatenate, ParamSpec

from sojourn.ids import ProgramId

from ..core.block_owners import BlockOwners, Owner
from .compat import FreeKVCacheBlockQueue, KVCacheBlock
from .eviction_heap import NEWEST_TURN, SHARED_BUCKET, Bucket, BucketScorer, EvictionHeap, Score

P = ParamSpec("P")

BeforeReuse = Callable[[list[KVCacheBlock], BlockOwners], None]
"""Called with (blocks about to be reused, cached or not; the table, which still has their owners)."""
OnEvicted = Callable[[list[KVCacheBlock], "Score | None"], None]
"""Called with (evicted blocks that a program owns or an ended program has used alone, score of their bucket).
It must remove their owners. The score is ``None`` for blocks that were in vLLM's list or in
``ENDED_BUCKET``."""

ENDED_BUCKET: Bucket = (ProgramId(""), -math.inf)
"""Bucket of blocks whose only program has ended, and of blocks loaded ahead of need that no request has used.
It has no score and is evicted before all other buckets."""

MAX_ABANDONED_BUCKETS = 16
"""Maximum number of abandoned branches of a program. If there are more, the oldest two are merged."""


def _falls_back(
    method: Callable[Concatenate[ProgramFreeBlockQueue, P], None],
) -> Callable[Concatenate[ProgramFreeBlockQueue, P], None]:
    """Wrap a method of the queue. After an error in it, the queue behaves like vLLM's own."""

    @wraps(method)
    def guarded(self: ProgramFreeBlockQueue, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._fall_back(error)

    return guarded


class ProgramFreeBlockQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool in eviction order. The constructor takes all blocks out of vLLM's queue
    ``replaced``, which must contain all blocks of the pool.

    ``owners`` has the owners of cached blocks. After their owners have changed, call ``place``. Without a
    ``scorer``, blocks keep vLLM's order, except that cached blocks of ended programs come before other cached
    blocks. ``before_reuse`` gets all blocks that are about to be reused. Then ``evicted`` gets those with an
    owner, or that only an ended program has used. At that time, they still have their hashes. If this queue
    fails, it turns ``owners`` off, calls ``failed`` with the error and keeps vLLM's order from then on.
    Errors of ``failed`` go to the caller.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        owners: BlockOwners,
        evicted: OnEvicted,
        scorer: BucketScorer | None = None,
        failed: Callable[[Exception], None],
        before_reuse: BeforeReuse | None = None,
    ) -> None:
        super().__init__([])
        self.owners = owners
        self.abandoned_reused = 0
        """Number of blocks of abandoned branches whose content a request used again."""
        self.abandoned_evicted = 0
        """Number of blocks of abandoned branches that were reused for other content."""
        self.loaded_ahead_used = 0
        """Number of blocks loaded ahead of need that a request has used."""
        self.loaded_ahead_lost = 0
        """Number of blocks loaded ahead of need that were uncached or reused before a request used them."""
        self.broken = False
        """Whether an error has occurred. If so, the queue keeps vLLM's order."""
        self._evicted = evicted
        self._failed = failed
        self._before_reuse = before_reuse
        self._order = EvictionHeap(scorer) if scorer is not None else None
        self._bucket_times: dict[ProgramId, dict[float, None]] = {}
        """Program → last use times of its buckets, oldest first; ``NEWEST_TURN`` may be at any position."""
        self._buckets: dict[Bucket, OrderedDict[int, KVCacheBlock]] = {}
        """Key of a bucket → block id → block. Only buckets with blocks, in eviction order within a bucket."""
        self._bucket_of: dict[int, Bucket] = {}
        self._all: list[KVCacheBlock] = replaced.popleft_n(replaced.num_free_blocks)
        self._by_id = {block.block_id: block for block in self._all}
        super().append_n(self._all)

    # -- programs ---------------------------------------------------------------

    @_falls_back
    def place(self, block_ids: Iterable[int]) -> None:
        """Move the free ones of these blocks, whose owners have changed, to where they belong now.

        Cached blocks that only an ended program has used move to the end of ``ENDED_BUCKET``. Other blocks
        without an owner move from their bucket to vLLM's list: uncached blocks to its front, cached blocks to
        its end. If the policy orders by program, blocks with owners move to the bucket of their owners."""
        bucket_of, owner_of = self._bucket_of, self.owners.of
        for block_id in block_ids:
            block = self._by_id[block_id]
            if block.block_hash is None:
                self.owners.orphans.pop(block_id, None)  # no request can find it again
            name = bucket_of.get(block_id)
            is_free = name is not None or block.next_free_block is not None
            if is_free and not self.broken and self._bucket_name(block, owner_of.get(block_id)) != name:
                self._move(block)

    def spare_blocks(self, most: int, keep: Container[int]) -> int:
        """Return the number of spare blocks at the front of the eviction order, at most ``most``.

        Spare blocks are uncached, or only ended programs have used them. Blocks loaded ahead of need, and
        blocks whose id is in ``keep``, are not spare. Counting stops at the first block that is not spare.
        Takes O(``most``)."""
        if self.broken:
            return 0
        spare = 0
        for block in islice(self.iter_blocks_after(None), most):
            block_id = block.block_id
            if block_id in keep or block_id in self.owners.ahead:
                break
            if block.block_hash is not None and self._bucket_of.get(block_id) != ENDED_BUCKET:
                break
            spare += 1
        return spare

    @_falls_back
    def uncache(self, block_ids: Iterable[int]) -> None:
        """Move blocks that were loaded ahead of need to the front of vLLM's list. The blocks must have
        lost their hashes. Skip a block if a request has used it, or the pool has reused it, since it was
        loaded."""
        for block_id in block_ids:
            if self.owners.ahead.pop(block_id, None) is None:
                continue
            self.loaded_ahead_lost += 1
            bucket = self._buckets.get(ENDED_BUCKET)
            if bucket is not None and block_id in bucket:
                self._move(bucket[block_id])

    @_falls_back
    def clear_owners(self) -> None:
        """Empty all buckets after a reset of the cache, which removes all owners. Their blocks move to vLLM's
        list."""
        names = [ENDED_BUCKET, *self._ordered()]
        bucketed = [block for name in names for block in self._buckets.get(name, {}).values()]
        self._forget_programs()
        self.num_free_blocks -= len(bucketed)
        super().prepend_n([block for block in bucketed if block.block_hash is None])
        super().append_n([block for block in bucketed if block.block_hash is not None])

    @_falls_back
    def rescore(self, program_id: ProgramId) -> None:
        """Compute the scores of the program's buckets again, and move the buckets in the eviction order."""
        for used_s in self._bucket_times.get(program_id, ()):
            self._push_bucket((program_id, used_s))

    def rescale(self) -> None:
        """Report that the scale of scores has changed. The next read then computes all scores again."""
        if self._order is not None:
            self._order.rescaled = True

    @_falls_back
    def mark_abandoned(self, program_id: ProgramId, used_s: float) -> None:
        """Move the free blocks of a program's previous turn to a bucket of their own, as an abandoned branch.
        ``used_s``: time at which these blocks were last used, in seconds on the engine's clock.

        Call this once the new turn has all its blocks, so that only blocks that it does not use are free."""
        bucket = self._buckets.get((program_id, NEWEST_TURN))
        if bucket is None:
            return
        self._forget_bucket((program_id, NEWEST_TURN))
        self._add_abandoned((program_id, used_s), bucket)
        before = list(self._bucket_times[program_id])
        if len(before) > MAX_ABANDONED_BUCKETS:
            # The second-oldest branch joins the oldest, so each block moves at most once.
            oldest, moved = ((program_id, then) for then in before[:2])
            blocks = self._buckets[moved]
            self._forget_bucket(moved)
            self._add_abandoned(oldest, blocks)

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if self.broken:
            super().append_n(blocks)
            return
        try:
            self._append_in_order(blocks)
        except Exception as error:
            self._fall_back(error)

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block whose content a request reuses."""
        if self.broken:
            super().remove(block)
            return
        try:
            name = self._take_out(block)
            self.abandoned_reused += name is not None and name[1] != NEWEST_TURN and name != ENDED_BUCKET
            if self.owners.ahead.pop(block.block_id, None) is not None:
                self.loaded_ahead_used += 1  # by its first user, so it is no common block
            else:
                self.owners.record_hit(block.block_id)
        except Exception as error:
            self._fall_back(error)
            super().remove(block)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        if not self.broken:
            try:
                return self._take(n)
            except Exception as error:
                self._fall_back(error)
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the free blocks after ``cursor`` in eviction order. Yield all if ``cursor`` is ``None``, and
        none if ``cursor`` is not free. The queue must not change before the iteration ends."""
        within = self._bucket_of.get(cursor.block_id) if cursor is not None else None
        if within is None:
            if cursor is not None and cursor.next_free_block is None:
                return  # not free: no block comes after it
            yield from self._list_after(cursor)
            names = self._ordered()
        else:
            assert cursor is not None
            rest = iter(self._buckets[within])
            for block_id in rest:
                if block_id == cursor.block_id:
                    break
            yield from map(self._buckets[within].__getitem__, rest)
            if within == ENDED_BUCKET:
                yield from self._list_after_ended()
            names = self._ordered()
            if within != ENDED_BUCKET:
                names = names[names.index(within) + 1 :]
        for name in names:
            yield from self._buckets[name].values()

    # -- inside -----------------------------------------------------------------

    def _append_in_order(self, blocks: list[KVCacheBlock]) -> None:
        owner_of = self.owners.of
        if not self.owners.orphans and not self.owners.ahead and not (self._order is not None and owner_of):
            super().append_n(blocks)
            return
        buckets, bucket_of = self._buckets, self._bucket_of
        for block in blocks:
            block_id = block.block_id
            name = self._bucket_name(block, owner_of.get(block_id))
            if name is None:
                super().append(block)
                continue
            bucket = buckets.get(name)
            if bucket is None:
                bucket = self._begin_bucket(name)
            bucket[block_id] = block
            bucket_of[block_id] = name
            self.num_free_blocks += 1

    def _bucket_name(self, block: KVCacheBlock, owner: Owner | None) -> Bucket | None:
        """Return the bucket in which a free block of this owner belongs; ``None``: in vLLM's list."""
        if block.block_hash is None:
            return None
        if owner is None:
            is_ended = block.block_id in self.owners.orphans or block.block_id in self.owners.ahead
            return ENDED_BUCKET if is_ended else None
        if self._order is None:
            return None
        return SHARED_BUCKET if isinstance(owner, set | frozenset) else (owner, NEWEST_TURN)

    def _take(self, n: int) -> list[KVCacheBlock]:
        # vLLM's own method is faster, but needs all free blocks in its list.
        if not self._bucket_of:
            popped: list[KVCacheBlock] = super().popleft_n(n)
            self._report(popped, None)
            return popped
        popped = self._pop_from_list(n)
        taken: list[tuple[list[KVCacheBlock], Score | None]] = [(popped.copy(), None)]
        while len(popped) < n:
            blocks, bucket_score = self._pop_from_lowest_bucket(n - len(popped))
            popped += blocks
            taken.append((blocks, bucket_score))
        for blocks, score in taken:
            self._report(blocks, score)
        return popped

    def _report(self, blocks: list[KVCacheBlock], score: Score | None) -> None:
        if self._before_reuse is not None:
            self._before_reuse(blocks, self.owners)
        if ahead := self.owners.ahead:
            for block in blocks:
                self.loaded_ahead_lost += ahead.pop(block.block_id, None) is not None
        owned, orphans = self.owners.of, self.owners.orphans
        if gone := [block for block in blocks if block.block_id in owned or block.block_id in orphans]:
            self._evicted(gone, score)
        if common := self.owners.common:
            common.difference_update(block.block_id for block in blocks)

    def _pop_from_list(self, most: int) -> list[KVCacheBlock]:
        """Remove and return at most ``most`` blocks of vLLM's list and ``ENDED_BUCKET``. The uncached blocks
        at the front of the list come first, then ``ENDED_BUCKET``, then the rest of the list."""
        blocks: list[KVCacheBlock] = []
        if ended := self._buckets.get(ENDED_BUCKET):
            head, tail = self.fake_free_list_head, self.fake_free_list_tail
            while len(blocks) < most:
                first = head.next_free_block
                if first is None or first is tail or first.block_hash is not None:
                    break
                blocks.append(super().popleft())
            blocks += self._pop_from_bucket(ENDED_BUCKET, ended, most - len(blocks))
        in_list = self.num_free_blocks - len(self._bucket_of)
        blocks += super().popleft_n(min(most - len(blocks), in_list))
        return blocks

    def _pop_from_lowest_bucket(self, most: int) -> tuple[list[KVCacheBlock], Score]:
        """Remove at most ``most`` blocks of the bucket with the lowest score. Return (these blocks, that
        score)."""
        assert self._order is not None
        name, score = self._order.first()
        blocks = self._pop_from_bucket(name, self._buckets[name], most)
        if name[1] != NEWEST_TURN:
            self.abandoned_evicted += len(blocks)
        return blocks, score

    def _pop_from_bucket(
        self, name: Bucket, bucket: OrderedDict[int, KVCacheBlock], most: int
    ) -> list[KVCacheBlock]:
        bucket_of = self._bucket_of
        if len(bucket) <= most:
            blocks = list(bucket.values())
            self._forget_bucket(name)
            for block_id in bucket:
                del bucket_of[block_id]
        else:
            blocks = list(islice(bucket.values(), most))
            for block in blocks:
                del bucket[block.block_id], bucket_of[block.block_id]
        self.num_free_blocks -= len(blocks)
        return blocks

    def _add_abandoned(self, name: Bucket, blocks: OrderedDict[int, KVCacheBlock]) -> None:
        left = self._buckets.get(name)
        if left is None:
            left = self._buckets[name] = OrderedDict()
            self._bucket_times.setdefault(name[0], {})[name[1]] = None
        left.update(blocks)
        self._bucket_of.update(dict.fromkeys(blocks, name))
        self._push_bucket(name)

    def _list_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the blocks of vLLM's list after ``cursor``, a block of the list; all if ``cursor`` is
        ``None``. Yield the blocks of ``ENDED_BUCKET`` after the uncached blocks at the front of the list."""
        ended = self._buckets.get(ENDED_BUCKET)
        if ended is None or (cursor is not None and not self._among_first(cursor)):
            yield from super().iter_blocks_after(cursor)
            return
        yield from takewhile(lambda block: block.block_hash is None, super().iter_blocks_after(cursor))
        yield from ended.values()
        yield from self._list_after_ended()

    def _list_after_ended(self) -> Iterator[KVCacheBlock]:
        blocks = super().iter_blocks_after(None)
        return dropwhile(lambda block: block.block_hash is None, blocks)

    def _among_first(self, block: KVCacheBlock | None) -> bool:
        """Return whether this block and all before it in the list are uncached."""
        while block is not None and block is not self.fake_free_list_head:
            if block.block_hash is not None:
                return False
            block = block.prev_free_block
        return True

    def _move(self, block: KVCacheBlock) -> None:
        self._take_out(block)
        # vLLM puts freed uncached blocks at the front.
        if block.block_hash is None:
            super().prepend_n([block])
        else:
            self._append_in_order([block])

    def _take_out(self, block: KVCacheBlock) -> Bucket | None:
        """Remove a free block. Return its bucket, or ``None`` if the block was in vLLM's list."""
        name = self._bucket_of.pop(block.block_id, None)
        if name is None:
            super().remove(block)
            return None
        bucket = self._buckets[name]
        del bucket[block.block_id]
        if not bucket:
            self._forget_bucket(name)
        self.num_free_blocks -= 1
        return name

    def _begin_bucket(self, name: Bucket) -> OrderedDict[int, KVCacheBlock]:
        bucket = self._buckets[name] = OrderedDict()
        if name[0]:
            self._bucket_times.setdefault(name[0], {})[name[1]] = None
        if name != ENDED_BUCKET:
            self._push_bucket(name)
        return bucket

    def _forget_bucket(self, name: Bucket) -> None:
        del self._buckets[name]
        if self._order is not None:
            self._order.forget(name)
        program_id, used_s = name
        if program_id:
            times_s = self._bucket_times[program_id]
            del times_s[used_s]
            if not times_s:
                del self._bucket_times[program_id]

    def _push_bucket(self, name: Bucket) -> None:
        assert self._order is not None
        self._order.push(name, len(self._buckets[name]))

    def _ordered(self) -> list[Bucket]:
        return self._order.ordered() if self._order is not None else []

    def _forget_programs(self) -> None:
        if self._order is not None:
            self._order.clear()
        self._bucket_times.clear()
        self._buckets.clear()
        self._bucket_of.clear()
        self.owners.ahead.clear()

    def _fall_back(self, error: Exception) -> None:
        """Rebuild vLLM's own queue from all free blocks, uncached ones first, and call ``failed``. At any
        error, the free blocks are those with ``ref_cnt`` 0: vLLM raises it after taking a block, and lowers
        it before freeing one."""
        self.broken = True
        self.owners.turn_off()
        self._order = None
        self._forget_programs()
        free = [block for block in self._all if block.ref_cnt == 0]
        for block in self._all:
            block.prev_free_block = block.next_free_block = None
        super().__init__([])
        super().append_n([block for block in free if block.block_hash is None])
        super().append_n([block for block in free if block.block_hash is not None])
        self._failed(error)
