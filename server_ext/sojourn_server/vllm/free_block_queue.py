"""vLLM's queue of free blocks, in an eviction order by program.

``BlockPool.free_block_queue`` is vLLM's eviction order, because the pool reuses blocks from its front. This
queue replaces it. Blocks without a program stay in vLLM's linked list and keep vLLM's order. If the policy
orders blocks by program, cached blocks of programs are in buckets, and the bucket with the lowest score is
evicted first. A program has one bucket for the blocks of its newest turn, and one for each earlier turn with
blocks that no later turn used (an abandoned branch, a compacted context).

Cost: O(1) per block, O(log buckets) per rescored bucket, O(buckets) after a change of the scale of scores.

Blocks that only an ended program has used stay cached, but are evicted early (``_ended``). If any other
request has used such a block, also after the program's end, it is part of a common prefix and counts as a
block without a program.

The order of eviction is:

1. uncached blocks at the front of vLLM's list
2. blocks of ended programs and unused blocks loaded ahead of need, in order of insertion
3. the rest of vLLM's list
4. the buckets of programs, lowest score first
5. blocks with several owners

vLLM calls this queue in places where no hook can catch an error of sojourn. The queue therefore catches its
own errors, also of the policy that scores. After an error it forgets all programs and keeps vLLM's order for
good.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from functools import wraps
from itertools import dropwhile, islice
from typing import Any, TypeVar

from sojourn.ids import ProgramId

from ..core.block_owners import BlockOwners
from ..core.program_scheduler import ProgramScheduler
from ..policies.policy_views import AbandonedBranch
from ..programs.windowed_history import BranchReuseRate
from .compat import FreeKVCacheBlockQueue, KVCacheBlock

Method = TypeVar("Method", bound=Callable[..., Any])

BeforeReuse = Callable[[list[KVCacheBlock], BlockOwners], None]
"""Called with (blocks about to be reused, cached or not; the table, which still has their owners)."""
OnEvicted = Callable[[list[KVCacheBlock], "Score | None"], None]
"""Called with (evicted blocks that a program owns or an ended program has used alone, score of their bucket,
if any). It must remove their owners."""

MAX_ABANDONED_BUCKETS = 16
"""Maximum number of abandoned branches of a program, which are all scored anew with the program. If there are
more, the oldest two are merged."""

Score = tuple[float, ...]
"""Eviction score of a bucket; the lowest is evicted first."""
NEWEST_TURN = math.inf
"""``Bucket.used_s`` of the blocks of a program's newest turn."""
Place = tuple[Score, bool, int]
"""(Score, whether it is a newest turn, insertion number). Among equal scores, abandoned branches come first,
then the bucket added first."""
Standing = tuple[float, ...] | None
"""The inputs of a bucket's score, apart from its scale; ``None`` for an unknown program."""


class Bucket:
    """Free cached blocks that one program last used in the same turn, in eviction order."""

    __slots__ = ("blocks", "place", "program_id", "standing", "used_s")

    def __init__(self, program_id: ProgramId, used_s: float = NEWEST_TURN) -> None:
        self.program_id = program_id
        self.used_s = used_s
        """In seconds on the engine's clock."""
        self.blocks: OrderedDict[int, KVCacheBlock] = OrderedDict()
        """Block id → block. Popping the first blocks of a plain dict takes ever longer."""
        self.standing: Standing = None
        self.place: Place | None = None
        """Its place in the ``EvictionOrder``, if it has one."""


class EvictionScorer:
    """Scores buckets by the preset's eviction policy, and keeps a queue's scores up to date."""

    def __init__(self, program_scheduler: ProgramScheduler) -> None:
        self._program_scheduler = program_scheduler
        self._branches = BranchReuseRate()
        self._scale_changes = 0

    def before_step(self, queue: ProgramFreeBlockQueue) -> None:
        """Update the scores of programs whose state has changed; all scores if their scale has changed."""
        predictor, branches = self._program_scheduler.predictor, self._branches
        branches.observe(queue.abandoned_reused, queue.abandoned_evicted)
        for program_id in predictor.take_changed():
            queue.rescore(program_id)
        scale_changes = predictor.scale_changes + branches.changes
        if scale_changes != self._scale_changes:
            self._scale_changes = scale_changes
            queue.rescale()

    def after_step(self, queue: ProgramFreeBlockQueue) -> None:
        """Mark as abandoned the free blocks of a turn whose program has a newly admitted turn."""
        for program_id, used_s in self._program_scheduler.predictor.take_begun().items():
            queue.mark_abandoned(program_id, used_s)

    def standing(self, program_id: ProgramId, left: AbandonedBranch | None) -> Standing:
        """Return the present standing of the abandoned branch ``left``, or else of the newest turn."""
        return self._program_scheduler.owner_standing(program_id, left)

    def score(self, standing: Standing) -> Score:
        """Return the score of a standing. Equal standings have equal scores until the scale changes."""
        return self._program_scheduler.owner_score(standing, self._branches.share)


class EvictionOrder:
    """Buckets by score, lowest first."""

    def __init__(self, scorer: EvictionScorer) -> None:
        self.scorer = scorer
        self._entries: list[tuple[Place, Bucket]] = []
        """Sorted: with hundreds of buckets an insertion moves few pointers."""
        self._pushes = 0

    def push(self, bucket: Bucket) -> None:
        """Add a bucket, or score it anew."""
        self.forget(bucket)
        self._pushes += 1
        is_newest = bucket.used_s == NEWEST_TURN
        left = None if is_newest else AbandonedBranch(bucket.used_s, len(bucket.blocks))
        bucket.standing = self.scorer.standing(bucket.program_id, left)
        place = self._score(bucket.standing), is_newest, self._pushes
        insort(self._entries, (place, bucket))
        bucket.place = place

    def forget(self, bucket: Bucket) -> None:
        if bucket.place is not None:
            _, found = self._entries.pop(bisect_left(self._entries, (bucket.place,)))
            assert found is bucket, "scores do not compare"
            bucket.place = None

    def first(self) -> tuple[Bucket, Score] | None:
        return (self._entries[0][1], self._entries[0][0][0]) if self._entries else None

    def ordered(self) -> list[Bucket]:
        return [bucket for _, bucket in self._entries]

    def rescale(self) -> None:
        """Compute all scores again."""
        for (_, is_newest, number), bucket in self._entries:
            bucket.place = self._score(bucket.standing), is_newest, number
        self._entries = sorted((bucket.place, bucket) for _, bucket in self._entries if bucket.place)

    def _score(self, standing: Standing) -> Score:
        score = self.scorer.score(standing)
        if any(map(math.isnan, score)):  # it does not compare with others
            raise ValueError(f"the eviction policy scores {standing} with {score}; expected numbers")
        return score


def _or_stock(stock: Callable[..., Any] | None = None) -> Callable[[Method], Method]:
    """Decorate a method of the queue: after an error, all calls do what vLLM's ``stock`` does, or nothing."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def guarded(self: ProgramFreeBlockQueue, /, *args: Any) -> Any:
            if not self.broken:
                try:
                    return method(self, *args)
                except Exception as error:
                    self._fall_back(error)
                    if stock is FreeKVCacheBlockQueue.append_n:
                        return None  # the blocks are free, so they are in the rebuilt list
            return stock(self, *args) if stock is not None else None

        return guarded  # type: ignore[return-value]

    return decorate


class ProgramFreeBlockQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool in eviction order. The constructor takes the blocks out of vLLM's queue
    ``replaced``, which must have all blocks of the pool.

    ``owners`` has the owners of cached blocks. After their owners have changed, call ``place``. Without a
    ``scorer``, blocks keep vLLM's order, except that cached blocks of ended programs come before others.
    ``before_reuse`` gets all blocks that are about to be reused, with their hashes and owners; then
    ``evicted`` gets its part. If this queue fails, it turns ``owners`` off and calls ``failed``, which may
    raise.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        owners: BlockOwners,
        evicted: OnEvicted,
        scorer: EvictionScorer | None = None,
        failed: Callable[[Exception], None],
        before_reuse: BeforeReuse | None = None,
    ) -> None:
        super().__init__([])
        self.owners = owners
        self.abandoned_reused = 0
        """Blocks of abandoned branches: whose content a request used again, and reused for other content."""
        self.abandoned_evicted = 0
        self.broken = False
        self._evicted = evicted
        self._failed = failed
        self._before_reuse = before_reuse
        self._order = EvictionOrder(scorer) if scorer is not None else None
        self._all: list[KVCacheBlock] = replaced.popleft_n(replaced.num_free_blocks)
        self._by_id = {block.block_id: block for block in self._all}
        self._forget_programs()
        super().append_n(self._all)

    def _forget_programs(self) -> None:
        self.owners.ahead.clear()
        self._buckets: dict[ProgramId, dict[float, Bucket]] = {}
        """Program → time of last use → bucket, oldest first, but for ``NEWEST_TURN``. None is empty."""
        self._shared = Bucket(ProgramId(""))
        """Blocks with several owners, evicted last. Not in the ``EvictionOrder``."""
        self._ended = Bucket(ProgramId(""), -math.inf)
        """Blocks whose only program has ended, and unused blocks loaded ahead of need."""
        self._bucket_of: dict[int, Bucket] = {}
        if self._order is not None:
            self._order = EvictionOrder(self._order.scorer)

    # -- programs ---------------------------------------------------------------

    @_or_stock()
    def place(self, block_ids: Iterable[int]) -> None:
        """Move the free ones of these blocks, whose owners have changed, to where they belong now; in vLLM's
        list uncached blocks to its front, cached blocks to its end."""
        for block_id in block_ids:
            block = self._by_id[block_id]
            if block.block_hash is None:
                self.owners.orphans.pop(block_id, None)  # no request can find it again
            bucket = self._bucket_of.get(block_id)
            is_free = bucket is not None or block.next_free_block is not None
            if is_free and self._bucket_for(block) is not bucket:
                self._move(block)

    def spare_blocks(self, most: int, keep: Container[int]) -> int:
        """Return the number of spare blocks at the front of the eviction order, at most ``most``: uncached
        ones, and those that only ended programs have used. Blocks in ``keep`` or loaded ahead of need are not
        spare."""
        if self.broken:
            return 0
        spare = 0
        for block in islice(self.iter_blocks_after(None), most):
            block_id = block.block_id
            is_ended = self._bucket_of.get(block_id) is self._ended
            if block_id in keep or block_id in self.owners.ahead or (block.block_hash and not is_ended):
                break
            spare += 1
        return spare

    @_or_stock()
    def uncache(self, block_ids: Iterable[int]) -> None:
        """Move blocks loaded ahead of need, which have lost their hashes and are still unused, to the
        front."""
        for block_id in block_ids:
            if self.owners.ahead.pop(block_id, None) is not None and block_id in self._ended.blocks:
                self._move(self._ended.blocks[block_id])

    @_or_stock()
    def clear_owners(self) -> None:
        """Empty all buckets into vLLM's list, after a reset of the cache, which removes all owners."""
        bucketed = [block for bucket in (self._ended, *self._ordered()) for block in bucket.blocks.values()]
        self._forget_programs()
        self.num_free_blocks -= len(bucketed)
        super().prepend_n([block for block in bucketed if block.block_hash is None])
        super().append_n([block for block in bucketed if block.block_hash is not None])

    @_or_stock()
    def rescore(self, program_id: ProgramId) -> None:
        if self._order is not None:
            for bucket in self._buckets.get(program_id, {}).values():
                self._order.push(bucket)

    @_or_stock()
    def rescale(self) -> None:
        if self._order is not None:
            self._order.rescale()

    @_or_stock()
    def mark_abandoned(self, program_id: ProgramId, used_s: float) -> None:
        """Move the free blocks of a program's previous turn, last used at ``used_s``, to a bucket of their
        own, once the new turn has all its blocks."""
        buckets = self._buckets.get(program_id, {})
        newest = buckets.pop(NEWEST_TURN, None)
        if newest is None or self._order is None:
            return
        if used_s in buckets:
            self._merge(buckets[used_s], newest)
        else:
            buckets[used_s], newest.used_s = newest, used_s
            self._order.push(newest)
        if len(buckets) > MAX_ABANDONED_BUCKETS:
            # The second-oldest branch joins the oldest, so each block moves at most once.
            oldest, second = list(buckets)[:2]
            self._merge(buckets[oldest], buckets.pop(second))

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    @_or_stock(FreeKVCacheBlockQueue.append_n)
    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        owners = self.owners
        if not (owners.orphans or owners.ahead or (self._order is not None and owners.of)):
            super().append_n(blocks)
            return
        for block in blocks:
            bucket = self._bucket_for(block)
            if bucket is None:
                super().append(block)
                continue
            bucket.blocks[block.block_id] = block
            self._bucket_of[block.block_id] = bucket
            self.num_free_blocks += 1
            if self._order is not None and bucket.program_id and bucket.place is None:
                self._order.push(bucket)

    @_or_stock(FreeKVCacheBlockQueue.remove)
    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block whose content a request reuses."""
        bucket = self._take_out(block)
        self.abandoned_reused += bucket is not None and math.isfinite(bucket.used_s)
        # The first user of a block loaded ahead makes it no common block.
        if self.owners.ahead.pop(block.block_id, None) is None:
            self.owners.record_hit(block.block_id)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        blocks: list[KVCacheBlock] = self._take(n)
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the free blocks after ``cursor`` in eviction order; for ``None`` all. Nothing may change
        meanwhile."""
        if not self._bucket_of:
            return super().iter_blocks_after(cursor)  # type: ignore[no-any-return]
        if cursor is None:
            return self._in_order()
        return islice(dropwhile(lambda block: block is not cursor, self._in_order()), 1, None)

    # -- inside -----------------------------------------------------------------

    def _in_order(self) -> Iterator[KVCacheBlock]:
        ended: Iterable[KVCacheBlock] = self._ended.blocks.values()
        for block in super().iter_blocks_after(None):
            if block.block_hash is not None:
                yield from ended
                ended = ()
            yield block
        yield from ended
        for bucket in self._ordered():
            yield from bucket.blocks.values()

    def _ordered(self) -> list[Bucket]:
        return [*(self._order.ordered() if self._order is not None else ()), self._shared]

    def _bucket_for(self, block: KVCacheBlock) -> Bucket | None:
        """Return the bucket in which a free block belongs; ``None``: it belongs in vLLM's list."""
        if block.block_hash is None:
            return None
        block_id = block.block_id
        owner = self.owners.of.get(block_id)
        if owner is None:
            is_ended = block_id in self.owners.orphans or block_id in self.owners.ahead
            return self._ended if is_ended else None
        if self._order is None:
            return None
        if not isinstance(owner, str):
            return self._shared
        buckets = self._buckets.setdefault(owner, {})
        if NEWEST_TURN not in buckets:
            buckets[NEWEST_TURN] = Bucket(owner)
        return buckets[NEWEST_TURN]

    @_or_stock(FreeKVCacheBlockQueue.popleft_n)
    def _take(self, n: int) -> list[KVCacheBlock]:
        # vLLM's own method is faster, but needs all free blocks in its list.
        if not self._bucket_of:
            popped: list[KVCacheBlock] = super().popleft_n(n)
            self._report(popped, None)
            return popped
        popped = self._pop_from_list(n)
        taken: list[tuple[list[KVCacheBlock], Score | None]] = [(popped.copy(), None)]
        while len(popped) < n:
            first = self._order.first() if self._order is not None else None
            bucket, lowest = first or (self._shared, (math.inf,))
            blocks = self._pop_from_bucket(bucket, n - len(popped))
            if not blocks:
                raise RuntimeError(f"the buckets have fewer than {n} free blocks")
            self.abandoned_evicted += len(blocks) if math.isfinite(bucket.used_s) else 0
            popped += blocks
            taken.append((blocks, lowest))
        for blocks, score in taken:
            self._report(blocks, score)
        return popped

    def _report(self, blocks: list[KVCacheBlock], score: Score | None) -> None:
        if self._before_reuse is not None:
            self._before_reuse(blocks, self.owners)
        if ahead := self.owners.ahead:
            for block in blocks:
                ahead.pop(block.block_id, None)
        owned, orphans = self.owners.of, self.owners.orphans
        if gone := [block for block in blocks if block.block_id in owned or block.block_id in orphans]:
            self._evicted(gone, score)
        if common := self.owners.common:
            common.difference_update(block.block_id for block in blocks)

    def _pop_from_list(self, most: int) -> list[KVCacheBlock]:
        """Take at most ``most`` blocks: uncached ones at the front of vLLM's list, ``_ended``, then its
        rest."""
        blocks: list[KVCacheBlock] = []
        if self._ended.blocks:
            head, tail = self.fake_free_list_head, self.fake_free_list_tail
            while len(blocks) < most:
                first = head.next_free_block
                if first is None or first is tail or first.block_hash is not None:
                    break
                blocks.append(super().popleft())
            blocks += self._pop_from_bucket(self._ended, most - len(blocks))
        in_list = self.num_free_blocks - len(self._bucket_of)
        blocks += super().popleft_n(min(most - len(blocks), in_list))
        return blocks

    def _pop_from_bucket(self, bucket: Bucket, most: int) -> list[KVCacheBlock]:
        blocks = list(islice(bucket.blocks.values(), most))
        for block in blocks:
            del bucket.blocks[block.block_id], self._bucket_of[block.block_id]
        self.num_free_blocks -= len(blocks)
        self._forget_if_empty(bucket)
        return blocks

    def _merge(self, into: Bucket, bucket: Bucket) -> None:
        """Move the blocks of a bucket that ``_buckets`` no longer has to the end of another bucket."""
        assert self._order is not None
        into.blocks.update(bucket.blocks)
        self._bucket_of.update(dict.fromkeys(bucket.blocks, into))
        self._order.forget(bucket)
        self._order.push(into)

    def _move(self, block: KVCacheBlock) -> None:
        self._take_out(block)
        # vLLM puts freed uncached blocks at the front.
        if block.block_hash is None:
            super().prepend_n([block])
        else:
            self.append_n([block])

    def _take_out(self, block: KVCacheBlock) -> Bucket | None:
        """Remove a free block. Return its bucket, or ``None`` if the block was in vLLM's list."""
        bucket = self._bucket_of.pop(block.block_id, None)
        if bucket is None:
            super().remove(block)
            return None
        del bucket.blocks[block.block_id]
        self.num_free_blocks -= 1
        self._forget_if_empty(bucket)
        return bucket

    def _forget_if_empty(self, bucket: Bucket) -> None:
        if bucket.program_id and not bucket.blocks and self._order is not None:
            self._order.forget(bucket)
            buckets = self._buckets[bucket.program_id]
            del buckets[bucket.used_s]
            if not buckets:
                del self._buckets[bucket.program_id]

    def _fall_back(self, error: Exception) -> None:
        """Rebuild vLLM's own queue from all free blocks, uncached ones first. At any error those are the ones
        with ``ref_cnt`` 0: vLLM raises it after taking a block, and lowers it before freeing one."""
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
