"""The engine's queue of free blocks, with an order that knows programs.

``BlockPool.free_block_queue`` *is* vLLM's eviction order: blocks are reused from
its front. This queue stands in its place. Blocks of no program keep the
engine's own linked list and thus the engine's own order; with an order by
program, cached blocks of programs live in one bucket each and are reused by
ascending score. O(1) a block; O(log programs) when a program's score changes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

Score = tuple[float, ...]
Owner = ProgramId | frozenset[ProgramId]
Evicted = Callable[[KVCacheBlock, Owner], None]

SHARED = ProgramId("")
"""Bucket of blocks that several programs own; an empty id cannot come over the wire."""


class ProgramFreeQueue(FreeKVCacheBlockQueue):
    """Free blocks of one pool.

    ``score`` gives a program's place in the order, lowest first; None keeps the
    engine's order for all. ``evicted`` hears of every owned, cached block that
    is reused, while it still has its hash.
    """

    def __init__(
        self,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        score: Callable[[ProgramId], Score] | None = None,
    ) -> None:
        super().__init__([])
        self._score = score
        self._evicted = evicted
        self._owner: dict[int, Owner] = {}
        self._owned: dict[ProgramId, set[int]] = {}
        self._buckets: dict[ProgramId, OrderedDict[int, KVCacheBlock]] = {}
        self._bucket_of: dict[int, ProgramId] = {}
        self._heap: list[tuple[Score, int, ProgramId]] = []
        self._version: dict[ProgramId, int] = {}
        self._bumps = 0
        super().append_n(_taken_from(replaced))

    # -- ownership ------------------------------------------------------------

    def own(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> None:
        """Note that the program's context is (also) in these cached blocks. Call before they are freed."""
        owned = self._owned.setdefault(program_id, set())
        for block in blocks:
            block_id = block.block_id
            owner = self._owner.get(block_id)
            if owner is None:
                self._owner[block_id] = program_id
            elif owner != program_id:
                self._owner[block_id] = (
                    frozenset((owner, program_id)) if isinstance(owner, str) else owner | {program_id}
                )
                for other in (owner,) if isinstance(owner, str) else owner:
                    self._owned.setdefault(other, set()).add(block_id)
                self._rebucket(block_id)
            owned.add(block_id)

    def disown(self, program_id: ProgramId) -> list[int]:
        """The program is no owner any more; returns the ids of blocks that nobody owns now."""
        orphans: list[int] = []
        for block_id in self._owned.pop(program_id, ()):
            owner = self._owner.get(block_id)
            if owner == program_id:
                del self._owner[block_id]
                orphans.append(block_id)
            elif isinstance(owner, frozenset):
                left = owner - {program_id}
                self._owner[block_id] = next(iter(left)) if len(left) == 1 else left
                self._rebucket(block_id)
        self._version.pop(program_id, None)
        return orphans

    def owners(self, block_id: int) -> frozenset[ProgramId]:
        """Programs whose context is in the block."""
        owner = self._owner.get(block_id)
        if owner is None:
            return frozenset()
        return frozenset((owner,)) if isinstance(owner, str) else owner

    def owned_blocks(self) -> int:
        """How many blocks have an owner."""
        return len(self._owner)

    def rescore(self, program_id: ProgramId) -> None:
        """The program's score may have changed."""
        if self._score is not None and self._buckets.get(program_id):
            self._push(program_id)

    def discard_to_front(self, block: KVCacheBlock) -> None:
        """Make a free block, whose hash has just been taken away, the first to be reused."""
        self.remove(block)
        super().prepend_n([block])

    # -- the protocol of vLLM's queue -------------------------------------------

    def append(self, block: KVCacheBlock) -> None:
        if not self._to_bucket(block):
            super().append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if self._score is None or not self._owner:
            super().append_n(blocks)
            return
        for block in blocks:
            self.append(block)

    def remove(self, block: KVCacheBlock) -> None:
        bucket = self._bucket_of.pop(block.block_id, None)
        if bucket is None:
            super().remove(block)
            return
        del self._buckets[bucket][block.block_id]
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if not self._owner:
            return super().popleft_n(n)
        if not self._bucket_of:
            blocks = super().popleft_n(n)
        else:
            assert self.num_free_blocks >= n
            blocks = [self._pop_one() for _ in range(n)]
        for block in blocks:
            self._forget(block)
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        blocks = super().get_all_free_blocks()
        if self._score is None:
            return blocks
        order = sorted((self._score_of(name), name) for name, bucket in self._buckets.items() if bucket)
        for _, name in order:
            blocks.extend(self._buckets[name].values())
        return blocks

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        blocks = iter(self.get_all_free_blocks())
        if cursor is not None:
            for block in blocks:
                if block is cursor:
                    break
        yield from blocks

    # -- inside -----------------------------------------------------------------

    def _to_bucket(self, block: KVCacheBlock) -> bool:
        if self._score is None or block.block_hash is None:
            return False
        owner = self._owner.get(block.block_id)
        if owner is None:
            return False
        name = owner if isinstance(owner, str) else SHARED
        bucket = self._buckets.setdefault(name, OrderedDict())
        if not bucket:
            self._push(name)
        bucket[block.block_id] = block
        self._bucket_of[block.block_id] = name
        self.num_free_blocks += 1
        return True

    def _rebucket(self, block_id: int) -> None:
        name = self._bucket_of.get(block_id)
        if name is None:
            return
        block = self._buckets[name][block_id]
        self.remove(block)
        self.append(block)

    def _pop_one(self) -> KVCacheBlock:
        """Uncached blocks first, then blocks of no program, then programs by score, shared ones last."""
        front = self.fake_free_list_head.next_free_block
        if front is not self.fake_free_list_tail:
            return super().popleft()
        while True:
            _, version, name = self._heap[0]
            bucket = self._buckets.get(name)
            if not bucket or self._version.get(name) != version:
                heapq.heappop(self._heap)
                continue
            block_id, block = bucket.popitem(last=False)
            del self._bucket_of[block_id]
            self.num_free_blocks -= 1
            return block

    def _forget(self, block: KVCacheBlock) -> None:
        owner = self._owner.pop(block.block_id, None)
        if owner is None:
            return
        for program_id in (owner,) if isinstance(owner, str) else owner:
            owned = self._owned.get(program_id)
            if owned is not None:
                owned.discard(block.block_id)
                if not owned:
                    del self._owned[program_id]
        if block.block_hash is not None:
            self._evicted(block, owner)

    def _push(self, name: ProgramId) -> None:
        self._bumps += 1
        self._version[name] = self._bumps
        heapq.heappush(self._heap, (self._score_of(name), self._bumps, name))
        if len(self._heap) > 4 * len(self._buckets) + 64:
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket}
            self._heap = [
                entry
                for entry in self._heap
                if entry[2] in self._buckets and self._version[entry[2]] == entry[1]
            ]
            heapq.heapify(self._heap)

    def _score_of(self, name: ProgramId) -> Score:
        if name == SHARED:
            return (float("inf"),)
        assert self._score is not None
        return self._score(name)


def _taken_from(queue: FreeKVCacheBlockQueue) -> list[KVCacheBlock]:
    """All blocks of ``queue`` in its order; it is empty afterwards."""
    return queue.popleft_n(queue.num_free_blocks)
