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
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile, islice
from typing import Protocol

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

Score = tuple[float, ...]
Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""One program; the set of several; or ``MANY``."""
Evicted = Callable[[KVCacheBlock, Owner, "Score | None"], None]
"""Block, owner, and the score by which it was chosen; ``None``: by the engine's own order."""

NEWEST = math.inf
Bucket = tuple[ProgramId, float]
"""A program, and when it last used these blocks; ``NEWEST``: in its newest turn."""
Standing = tuple[float, ...] | None
"""What a bucket's score is made of, whatever the scale."""
Place = tuple[Score, bool, int]
"""Of the same score, what a turn did without goes first, then what was filed or scored first."""

SHARED: Bucket = (ProgramId(""), NEWEST)
"""Of blocks that several programs own; an empty id cannot come over the wire."""

ENDED: Bucket = (ProgramId(""), -math.inf)
"""Of blocks whose only program has ended. Not in the heap: it goes before any score."""

MAX_LEFT = 16
"""Buckets of one program for what turns did without. Of more, the oldest two become one."""

MAX_OWNERS = 16
"""Owners of a block who are known by name. More would cost memory and tell nothing."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block of more programs than that. It stays shared, whoever ends, until it is reused or reset."""


class Order(Protocol):
    """In what order programs' buckets are reused: ascending ``score``."""

    def standing(self, program_id: ProgramId, left: tuple[float, int] | None) -> Standing:
        """Asked when a bucket is begun and at ``rescore``. ``left``: (when it was last used, blocks) of what
        a turn did without."""

    def score(self, standing: Standing) -> Score:
        """The place of a standing, the same for the same standing until ``rescale``."""


class ProgramFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool.

    Without an ``order`` all have the engine's. ``evicted`` hears of every
    cached block that is reused and has an owner, or had one alone to its end,
    while it still has its hash.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        order: Order | None = None,
    ) -> None:
        super().__init__([])
        self._by = order
        self._evicted = evicted
        self._owner: dict[int, Owner] = {}
        self._owned: dict[ProgramId, dict[int, KVCacheBlock]] = {}
        """Of each program the blocks it is named as an owner of, in the order of its context."""
        self.left_reused = 0
        """Blocks that a turn did without and somebody then used for what they hold."""
        self.left_evicted = 0
        """The same that were taken for something else instead."""
        self._names: dict[ProgramId, dict[float, None]] = {}
        """Of each program the dates of its buckets, the oldest first but for ``NEWEST``."""
        self._buckets: dict[Bucket, OrderedDict[int, KVCacheBlock]] = {}
        """Only such as have blocks in them."""
        self._bucket_of: dict[int, Bucket] = {}
        self._orphans: dict[int, ProgramId] = {}
        """Of cached blocks without an owner that one program alone has used, that program."""
        self._common: set[int] = set()
        """Cached blocks that somebody else has used besides an owner, with or without one now."""
        self._standing: dict[Bucket, Standing] = {}
        self._place: dict[Bucket, Place] = {}
        """Of each bucket the one entry of the heap that counts; others are left over from earlier scores."""
        self._heap: list[tuple[Place, Bucket]] = []
        self._rescaled = False
        """Scores are measured in something else now; they are worked out when they are next looked at."""
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
                if self._orphans and self._orphans.pop(block_id, program_id) != program_id:
                    self._common.add(block_id)
            elif isinstance(owner, str):
                if owner == program_id:
                    continue
                self._owner[block_id] = {owner, program_id}
                self._common.add(block_id)
                self._refile(block_id)
            elif isinstance(owner, frozenset) or program_id in owner:
                continue
            elif len(owner) < MAX_OWNERS:
                owner.add(program_id)
            else:
                self._forget_names(block_id, owner)
                self._owner[block_id] = MANY
                continue
            owned[block_id] = block
        if not owned:
            del self._owned[program_id]

    def disown(self, program_id: ProgramId) -> list[int]:
        """The program has ended and is no owner any more; returns the ids of blocks that nobody owns now.

        What nobody else ever used is the next to be reused, after uncached blocks
        and what ended before. Of the others, free ones in buckets go where
        blocks of no program are: uncached to the front, cached to the end.
        Blocks of ``MANY`` are not among them.
        """
        orphans: list[int] = []
        # Against the order of the context: of what moves, tails are to be reused first.
        for block_id, block in reversed(self._owned.pop(program_id, {}).items()):
            owner = self._owner[block_id]
            if isinstance(owner, set):
                owner.discard(program_id)
                if len(owner) == 1:
                    self._owner[block_id] = owner.pop()
                    self._refile(block_id)
            else:
                del self._owner[block_id]
                orphans.append(block_id)
                self._orphan(block, program_id)
        return orphans

    def forget_all(self) -> None:
        """Nobody owns anything any more: the cache was reset. No block is lost or gained."""
        bucketed = [block for name in (ENDED, *self._order()) for block in self._empty_bucket(name)]
        self._heap.clear()
        self._owner.clear()
        self._owned.clear()
        self._orphans.clear()
        self._common.clear()
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
        for used_s in self._names.get(program_id, ()):
            self._push((program_id, used_s))

    def rescale(self) -> None:
        """The same standings may have other scores from now on."""
        self._rescaled = True

    def leave_behind(self, program_id: ProgramId, used_s: float) -> None:
        """What of the program's newest turn before is free now, the turn that has just got its blocks does
        without; it was last used at ``used_s``.
        """
        bucket = self._buckets.get((program_id, NEWEST))
        if bucket is None:
            return
        self._forget_bucket((program_id, NEWEST))
        self._add_left((program_id, used_s), bucket)
        before = list(self._names[program_id])
        if len(before) > MAX_LEFT:
            # The second into the first: so a block is moved once, however many turns leave something.
            oldest, moved = ((program_id, then) for then in before[:2])
            blocks = self._buckets[moved]
            self._forget_bucket(moved)
            self._add_left(oldest, blocks)

    def left(self, program_id: ProgramId) -> dict[float, int]:
        """Of what turns of the program did without: blocks by when they were last used."""
        names = self._names.get(program_id, {})
        return {used_s: len(self._buckets[program_id, used_s]) for used_s in names if used_s != NEWEST}

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        orphans = self._orphans
        if self._by is None or not self._owner:
            ended = [b for b in blocks if b.block_id in orphans and b.block_hash] if orphans else []
            if not ended:
                super().append_n(blocks)
                return
        owners, buckets, bucket_of = self._owner, self._buckets, self._bucket_of
        for block in blocks:
            block_id = block.block_id
            owner = owners.get(block_id)
            if block.block_hash is None:
                super().append(block)
                continue
            if owner is None:
                name = ENDED if block_id in orphans else None
            elif self._by is None:
                name = None
            else:
                name = (owner, NEWEST) if isinstance(owner, str) else SHARED
            if name is None:
                super().append(block)
                continue
            bucket = buckets.get(name)
            if bucket is None:
                bucket = self._bucket(name)
            bucket[block_id] = block
            bucket_of[block_id] = name
            self.num_free_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Of the engine: somebody has found what the block holds."""
        block_id = block.block_id
        program_id, used_s = self._bucket_of.get(block_id, SHARED)
        self.left_reused += used_s != NEWEST and program_id != ""
        self._take_out(block)
        # Where no program is known there is nobody whose end would matter.
        if (self._owner or self._orphans) and block_id not in self._owner:
            self._orphans.pop(block_id, None)
            self._common.add(block_id)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        # The list's own way takes n blocks from the list unseen, so all free ones must be there.
        if not self._bucket_of:
            blocks = super().popleft_n(n)
            if self._owner or self._orphans or self._common:
                self._reused(blocks, None)
            return blocks
        popped = self._first_of_list(n)
        taken: list[tuple[list[KVCacheBlock], Score | None]] = [(popped.copy(), None)]
        while len(popped) < n:
            blocks, score = self._first_of_buckets(n - len(popped))
            popped += blocks
            taken.append((blocks, score))
        for blocks, score in taken:
            self._reused(blocks, score)
        return popped

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Blocks in the order of their reuse. Lazy: the queue must not change between two of one bucket."""
        within = self._bucket_of.get(cursor.block_id) if cursor is not None else None
        if within is None:
            if cursor is not None and cursor.next_free_block is None:
                return  # not free, so nothing comes after it
            yield from self._list_after(cursor)
            names = self._order()
        else:
            assert cursor is not None
            rest = iter(self._buckets[within])
            for block_id in rest:
                if block_id == cursor.block_id:
                    break
            yield from map(self._buckets[within].__getitem__, rest)
            if within == ENDED:
                yield from self._list_after_ended()
            names = self._order()
            if within != ENDED:
                names = names[names.index(within) + 1 :]
        for name in names:
            yield from self._buckets[name].values()

    # -- inside -----------------------------------------------------------------

    def _add_left(self, name: Bucket, blocks: OrderedDict[int, KVCacheBlock]) -> None:
        left = self._buckets.get(name)
        if left is None:
            left = self._buckets[name] = OrderedDict()
            self._names.setdefault(name[0], {})[name[1]] = None
        left.update(blocks)
        self._bucket_of.update(dict.fromkeys(blocks, name))
        self._push(name)

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

    def _orphan(self, block: KVCacheBlock, program_id: ProgramId) -> None:
        """The block has just lost its last owner."""
        block_id = block.block_id
        in_bucket = block_id in self._bucket_of
        if block.block_hash is None or block_id in self._common:
            if not in_bucket:
                return  # in use, or where it belongs
        else:
            self._orphans[block_id] = program_id
            if not in_bucket and block.next_free_block is None:
                return  # in use
        self._take_out(block)
        if block.block_hash is None:
            super().prepend_n([block])
        else:
            self.append(block)

    def _bucket(self, name: Bucket) -> OrderedDict[int, KVCacheBlock]:
        bucket = self._buckets[name] = OrderedDict()
        if name[0]:
            self._names.setdefault(name[0], {})[name[1]] = None
        if name != ENDED:
            self._push(name)
        return bucket

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
        del self._buckets[name]
        self._place.pop(name, None)
        self._standing.pop(name, None)
        program_id, used_s = name
        if program_id:
            names = self._names[program_id]
            del names[used_s]
            if not names:
                del self._names[program_id]

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
        """Uncached blocks, what ended programs left, then other blocks of no program, at most ``most``."""
        blocks: list[KVCacheBlock] = []
        if ended := self._buckets.get(ENDED):
            head, tail = self.fake_free_list_head, self.fake_free_list_tail
            while len(blocks) < most:
                first = head.next_free_block
                if first is None or first is tail or first.block_hash is not None:
                    break
                blocks.append(super().popleft())
            taken = list(islice(ended.values(), most - len(blocks)))
            for block in taken:
                del ended[block.block_id], self._bucket_of[block.block_id]
            if not ended:
                self._forget_bucket(ENDED)
            self.num_free_blocks -= len(taken)
            blocks += taken
        in_list = self.num_free_blocks - len(self._bucket_of)
        blocks += super().popleft_n(min(most - len(blocks), in_list))
        return blocks

    def _first_of_buckets(self, most: int) -> tuple[list[KVCacheBlock], Score]:
        """Of the bucket whose turn it is, at most ``most``; shared blocks come last."""
        if self._rescaled:
            self._place_anew()
        while True:
            place, name = self._heap[0]
            if self._place.get(name) == place:
                break
            heapq.heappop(self._heap)
        bucket, bucket_of = self._buckets[name], self._bucket_of
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
        if name[1] != NEWEST:
            self.left_evicted += len(blocks)
        return blocks, place[0]

    def _reused(self, blocks: list[KVCacheBlock], score: Score | None) -> None:
        owners, owned_by, common = self._owner, self._owned, self._common
        for block in blocks:
            block_id = block.block_id
            common.discard(block_id)
            owner = owners.pop(block_id, None)
            if owner is None:
                owner = self._orphans.pop(block_id, None)
                if owner is None:
                    continue
            elif isinstance(owner, str):
                owned = owned_by[owner]
                del owned[block_id]
                if not owned:
                    del owned_by[owner]
            else:
                self._forget_names(block_id, owner)
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
        if name != SHARED:
            assert self._by is not None
            program_id, used_s = name
            left = (used_s, len(self._buckets[name])) if used_s != NEWEST else None
            self._standing[name] = self._by.standing(program_id, left)
        place = self._place[name] = (self._score_of(name), name[1] == NEWEST, self._pushes)
        heapq.heappush(self._heap, (place, name))
        if len(self._heap) > 4 * len(self._place) + 64:
            self._tidy()

    def _place_anew(self) -> None:
        """O(buckets), about a microsecond each."""
        self._rescaled = False
        for name, (_, used, pushed) in self._place.items():
            self._place[name] = (self._score_of(name), used, pushed)
        self._tidy()

    def _tidy(self) -> None:
        self._heap = [(place, name) for name, place in self._place.items()]
        heapq.heapify(self._heap)

    def _order(self) -> list[Bucket]:
        if self._rescaled:
            self._place_anew()
        return sorted(self._place, key=self._place.__getitem__)

    def _score_of(self, name: Bucket) -> Score:
        if name == SHARED:
            return (math.inf,)
        assert self._by is not None
        return self._by.score(self._standing[name])


def _taken_from(queue: FreeKVCacheBlockQueue) -> list[KVCacheBlock]:
    """All blocks of ``queue`` in its order; it is empty afterwards."""
    return queue.popleft_n(queue.num_free_blocks)
