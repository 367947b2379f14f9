"""The engine's queue of free blocks, with an order that knows programs.

``BlockPool.free_block_queue`` *is* vLLM's eviction order: blocks are reused from
its front. This queue stands in its place. Blocks of no program keep the
engine's own linked list and thus the engine's own order; with an order by
program, cached blocks of programs live in buckets and are reused by ascending
score: one bucket for what a program's newest turn used, and one for each turn
before of what no later turn used again (an abandoned branch, a context that was
compacted). O(1) a block; O(log buckets) for each bucket of a program whose score
changes; O(buckets), once, when the scale of scores has moved.

What a program that has ended alone used stays cached, but nobody is known who
will ask for it: it goes before everything that is still somebody's, in the
order in which programs ended. What anybody else has used too is a common
beginning, which the next one may begin with as well: it goes where blocks of no
program are.

The engine calls this where no hook can catch an error of ours. So the queue
does: it forgets programs then, for good, and is vLLM's own from there on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile, islice

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from .block_owners import BlockOwners, Owner
from .bucket_order import NEWEST, SHARED, Bucket, BucketOrder, Order, Score

Leaving = Callable[[list[KVCacheBlock], BlockOwners], None]
"""Blocks about to be reused, cached ones and others, while it is known whose they are."""
Evicted = Callable[[KVCacheBlock, Owner, "Score | None"], None]
"""Block, owner, and the score by which it was chosen; ``None``: by the engine's own order."""

ENDED: Bucket = (ProgramId(""), -math.inf)
"""Of blocks whose only program has ended. It has no place in the order: it goes before any score."""

MAX_LEFT = 16
"""Buckets of one program for what turns did without. Of more, the oldest two become one."""


class ProgramFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool, all of which are free when it takes the place of ``replaced``.

    Without an ``order`` all have the engine's. ``evicted`` hears of every
    cached block that is reused and has an owner, or had one alone to its end,
    while it still has its hash; ``leaving`` before that of all that are reused.
    ``failed`` hears of the error after which this
    queue is as vLLM's; what ``failed`` raises goes to whoever called.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        order: Order | None = None,
        failed: Callable[[Exception], None],
        leaving: Leaving | None = None,
    ) -> None:
        super().__init__([])
        self.owners = BlockOwners()
        self.left_reused = 0
        """Blocks that a turn did without and somebody then used for what they hold."""
        self.left_evicted = 0
        """The same that were taken for something else instead."""
        self.broken = False
        """An error of ours has made this queue vLLM's own."""
        self._evicted = evicted
        self._failed = failed
        self._leaving = leaving
        self._order = BucketOrder(order) if order is not None else None
        self._left: dict[ProgramId, dict[float, None]] = {}
        """Of each program the dates of its buckets, the oldest first but for ``NEWEST``."""
        self._buckets: dict[Bucket, OrderedDict[int, KVCacheBlock]] = {}
        """Only such as have blocks in them."""
        self._bucket_of: dict[int, Bucket] = {}
        self._all = _taken_from(replaced)
        super().append_n(self._all)

    # -- programs ---------------------------------------------------------------

    def own(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> None:
        """Note that the program's context is (also) in these cached blocks. Call before they are freed."""
        if self.broken:
            return
        try:
            for block in self.owners.add(blocks, program_id):
                self._refile(block)
        except Exception as error:
            self._break(error)

    def disown(self, program_id: ProgramId) -> list[int]:
        """The program has ended and is no owner any more; returns the ids of blocks that nobody owns now.

        What nobody else ever used is the next to be reused, after uncached blocks
        and what ended before. Of the others, free ones in buckets go where
        blocks of no program are: uncached to the front, cached to the end.
        Blocks of ``MANY`` are not among them.
        """
        ownerless: list[int] = []
        try:
            owner_of = self.owners.of
            # Against the order of the context: of what moves, tails are to be reused first.
            for block in self.owners.end(program_id):
                if block.block_id in owner_of:
                    self._refile(block)
                else:
                    ownerless.append(block.block_id)
                    self._orphaned(block)
        except Exception as error:
            self._break(error)
        return ownerless

    def forget_all(self) -> None:
        """Nobody owns anything any more: the cache was reset. No block is lost or gained."""
        try:
            names = [ENDED, *self._ordered()]
            bucketed = [block for name in names for block in self._buckets.get(name, {}).values()]
            self._forget_programs()
            self.num_free_blocks -= len(bucketed)
            super().prepend_n([block for block in bucketed if block.block_hash is None])
            super().append_n([block for block in bucketed if block.block_hash is not None])
        except Exception as error:
            self._break(error)

    def rescore(self, program_id: ProgramId) -> None:
        """The program's score may have changed."""
        try:
            for used_s in self._left.get(program_id, ()):
                self._file((program_id, used_s))
        except Exception as error:
            self._break(error)

    def rescale(self) -> None:
        """The same standings may have other scores from now on."""
        if self._order is not None:
            self._order.rescaled = True

    def leave_behind(self, program_id: ProgramId, used_s: float) -> None:
        """What of the program's newest turn before is free now, the turn that has just got its blocks does
        without; it was last used at ``used_s``.
        """
        try:
            self._leave_behind(program_id, used_s)
        except Exception as error:
            self._break(error)

    def left(self, program_id: ProgramId) -> dict[float, int]:
        """Of what turns of the program did without: blocks by when they were last used."""
        dates = self._left.get(program_id, {})
        return {used_s: len(self._buckets[program_id, used_s]) for used_s in dates if used_s != NEWEST}

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if self.broken:
            super().append_n(blocks)
            return
        try:
            self._give_back(blocks)
        except Exception as error:
            self._break(error)

    def remove(self, block: KVCacheBlock) -> None:
        """Of the engine: somebody has found what the block holds."""
        if self.broken:
            super().remove(block)
            return
        try:
            program_id, used_s = self._bucket_of.get(block.block_id, SHARED)
            self.left_reused += used_s != NEWEST and program_id != ""
            self._take_out(block)
            self.owners.found(block.block_id)
        except Exception as error:
            self._break(error)
            super().remove(block)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        if self.broken:
            return super().popleft_n(n)
        try:
            return self._take(n)
        except Exception as error:
            self._break(error)
            return super().popleft_n(n)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Blocks in the order of their reuse. Lazy: the queue must not change between two of one bucket."""
        within = self._bucket_of.get(cursor.block_id) if cursor is not None else None
        if within is None:
            if cursor is not None and cursor.next_free_block is None:
                return  # not free, so nothing comes after it
            yield from self._list_after(cursor)
            names = self._ordered()
        else:
            assert cursor is not None
            rest = iter(self._buckets[within])
            for block_id in rest:
                if block_id == cursor.block_id:
                    break
            yield from map(self._buckets[within].__getitem__, rest)
            if within == ENDED:
                yield from self._list_after_ended()
            names = self._ordered()
            if within != ENDED:
                names = names[names.index(within) + 1 :]
        for name in names:
            yield from self._buckets[name].values()

    # -- inside -----------------------------------------------------------------

    def _give_back(self, blocks: list[KVCacheBlock]) -> None:
        owner_of, orphans = self.owners.of, self.owners.orphans
        by_program = self._order is not None
        if not orphans and not (by_program and owner_of):
            super().append_n(blocks)
            return
        buckets, bucket_of = self._buckets, self._bucket_of
        for block in blocks:
            block_id = block.block_id
            name = None
            if block.block_hash is not None:
                owner = owner_of.get(block_id)
                if owner is None:
                    name = ENDED if block_id in orphans else None
                elif by_program:
                    name = (owner, NEWEST) if isinstance(owner, str) else SHARED
            if name is None:
                super().append(block)
                continue
            bucket = buckets.get(name)
            if bucket is None:
                bucket = self._begin_bucket(name)
            bucket[block_id] = block
            bucket_of[block_id] = name
            self.num_free_blocks += 1

    def _take(self, n: int) -> list[KVCacheBlock]:
        # The list's own way takes n blocks from the list unseen, so all free ones must be there.
        if not self._bucket_of:
            popped = super().popleft_n(n)
            self._report(popped, None)
            return popped
        popped = self._first_of_list(n)
        taken: list[tuple[list[KVCacheBlock], Score | None]] = [(popped.copy(), None)]
        while len(popped) < n:
            blocks, score = self._first_of_buckets(n - len(popped))
            popped += blocks
            taken.append((blocks, score))
        for blocks, score in taken:
            self._report(blocks, score)
        return popped

    def _report(self, blocks: list[KVCacheBlock], score: Score | None) -> None:
        if self._leaving is not None:
            self._leaving(blocks, self.owners)
        for block, owner in self.owners.taken(blocks):
            self._evicted(block, owner, score)

    def _first_of_list(self, most: int) -> list[KVCacheBlock]:
        """Uncached blocks, what ended programs left, then other blocks of no program, at most ``most``."""
        blocks: list[KVCacheBlock] = []
        if ended := self._buckets.get(ENDED):
            head, tail = self.fake_free_list_head, self.fake_free_list_tail
            while len(blocks) < most:
                first = head.next_free_block
                if first is None or first is tail or first.block_hash is not None:
                    break
                blocks.append(super().popleft())
            blocks += self._first_of(ENDED, ended, most - len(blocks))
        in_list = self.num_free_blocks - len(self._bucket_of)
        blocks += super().popleft_n(min(most - len(blocks), in_list))
        return blocks

    def _first_of_buckets(self, most: int) -> tuple[list[KVCacheBlock], Score]:
        """Of the bucket whose turn it is, at most ``most``; shared blocks come last."""
        assert self._order is not None
        name, score = self._order.first()
        blocks = self._first_of(name, self._buckets[name], most)
        if name[1] != NEWEST:
            self.left_evicted += len(blocks)
        return blocks, score

    def _first_of(
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

    def _leave_behind(self, program_id: ProgramId, used_s: float) -> None:
        bucket = self._buckets.get((program_id, NEWEST))
        if bucket is None:
            return
        self._forget_bucket((program_id, NEWEST))
        self._add_left((program_id, used_s), bucket)
        before = list(self._left[program_id])
        if len(before) > MAX_LEFT:
            # The second into the first: so a block is moved once, however many turns leave something.
            oldest, moved = ((program_id, then) for then in before[:2])
            blocks = self._buckets[moved]
            self._forget_bucket(moved)
            self._add_left(oldest, blocks)

    def _add_left(self, name: Bucket, blocks: OrderedDict[int, KVCacheBlock]) -> None:
        left = self._buckets.get(name)
        if left is None:
            left = self._buckets[name] = OrderedDict()
            self._left.setdefault(name[0], {})[name[1]] = None
        left.update(blocks)
        self._bucket_of.update(dict.fromkeys(blocks, name))
        self._file(name)

    def _list_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The rest of the list, with what ended programs left where its turn is."""
        ended = self._buckets.get(ENDED)
        if ended is None or (cursor is not None and not self._among_first(cursor)):
            yield from super().iter_blocks_after(cursor)
            return
        for block in super().iter_blocks_after(cursor):
            if block.block_hash is not None:
                break
            yield block
        yield from ended.values()
        yield from self._list_after_ended()

    def _list_after_ended(self) -> Iterator[KVCacheBlock]:
        blocks = super().iter_blocks_after(None)
        return dropwhile(lambda block: block.block_hash is None, blocks)

    def _among_first(self, block: KVCacheBlock | None) -> bool:
        """Whether this block of the list and all before it are uncached: they go before what was left."""
        while block is not None and block is not self.fake_free_list_head:
            if block.block_hash is not None:
                return False
            block = block.prev_free_block
        return True

    def _orphaned(self, block: KVCacheBlock) -> None:
        """The block has just lost its last owner: if it is free, it goes where it belongs now."""
        block_id = block.block_id
        if block_id in self._bucket_of or (
            block_id in self.owners.orphans and block.next_free_block is not None
        ):
            self._move(block)

    def _refile(self, block: KVCacheBlock) -> None:
        """The owner of a block has changed: if it is in a bucket, to the one where it belongs now."""
        if block.block_id in self._bucket_of:
            self._move(block)

    def _move(self, block: KVCacheBlock) -> None:
        self._take_out(block)
        # Uncached blocks to the front, which is where vLLM frees them to.
        if block.block_hash is None:
            super().prepend_n([block])
        else:
            self._give_back([block])

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

    def _begin_bucket(self, name: Bucket) -> OrderedDict[int, KVCacheBlock]:
        bucket = self._buckets[name] = OrderedDict()
        if name[0]:
            self._left.setdefault(name[0], {})[name[1]] = None
        if name != ENDED:
            self._file(name)
        return bucket

    def _forget_bucket(self, name: Bucket) -> None:
        del self._buckets[name]
        if self._order is not None:
            self._order.forget(name)
        program_id, used_s = name
        if program_id:
            dates = self._left[program_id]
            del dates[used_s]
            if not dates:
                del self._left[program_id]

    def _file(self, name: Bucket) -> None:
        assert self._order is not None
        self._order.file(name, len(self._buckets[name]))

    def _ordered(self) -> list[Bucket]:
        return self._order.ordered() if self._order is not None else []

    def _forget_programs(self) -> None:
        if self._order is not None:
            self._order.clear()
        self._left.clear()
        self._buckets.clear()
        self._bucket_of.clear()
        self.owners.clear()

    def _break(self, error: Exception) -> None:
        """Back to vLLM's own queue, of the blocks that nobody uses: that is known whatever went wrong here.

        Blocks have no user before they are taken and after they are given back.
        """
        self.broken = True
        self._order = None
        self._forget_programs()
        free = [block for block in self._all if block.ref_cnt == 0]
        for block in self._all:
            block.prev_free_block = block.next_free_block = None
        super().__init__([])
        super().append_n([block for block in free if block.block_hash is None])
        super().append_n([block for block in free if block.block_hash is not None])
        self._failed(error)


def _taken_from(queue: FreeKVCacheBlockQueue) -> list[KVCacheBlock]:
    """All blocks of ``queue`` in its order; it is empty afterwards."""
    return queue.popleft_n(queue.num_free_blocks)
