"""Holding and giving back a program's KV blocks: what leases come down to in vLLM's block pool.

A held block has one reference more than its users, so the pool never reuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sojourn.ids import ProgramId
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash

from .free_queue import ProgramFreeQueue


class HeldBlocks:
    """Blocks held for programs between their turns. A block that several programs hold is held once."""

    def __init__(self, pool: BlockPool, queue: ProgramFreeQueue) -> None:
        self._pool = pool
        self._queue = queue
        self._held: dict[ProgramId, list[KVCacheBlock]] = {}
        self._holders: dict[int, ProgramId | set[ProgramId]] = {}
        """Of each held block the one program that holds it, or the set of several."""
        self._alone: dict[ProgramId, int] = {}
        """Of each program that holds blocks, how many it holds alone."""

    def __len__(self) -> int:
        return len(self._held)

    def blocks(self) -> int:
        """Distinct blocks that are held by at least one program. O(1)."""
        return len(self._holders)

    def freed_by(self, program_id: ProgramId) -> int:
        """How many blocks no lease would hold any more once the program's is released. O(1).

        Whether a running request uses them besides is not asked.
        """
        return self._alone.get(program_id, 0)

    def unheld(self, blocks: Iterable[KVCacheBlock]) -> int:
        """How many of these distinct blocks no program holds yet. O(1) a block."""
        return sum(1 for block in blocks if block.block_id not in self._holders)

    def hold(self, program_id: ProgramId, blocks: Sequence[KVCacheBlock]) -> None:
        """Hold these distinct cached blocks for the program, in chain order, not what it held before."""
        # Taken before the earlier ones are given back: what is in both must not pass through the queue.
        self._pool.touch(blocks)
        self.release(program_id)
        self._held[program_id] = list(blocks)
        self._alone[program_id] = 0
        for block in blocks:
            self._add_holder(block.block_id, program_id)

    def release(self, program_id: ProgramId) -> bool:
        """Give the program's held blocks back: they stay cached until they are reused, tails first."""
        held = self._held.pop(program_id, None)
        if held is None:
            return False
        for block in held:
            self._remove_holder(block.block_id, program_id)
        del self._alone[program_id]
        self._pool.free_blocks(reversed(held))
        return True

    def drop(self, program_id: ProgramId) -> None:
        """The program has ended: release, and what no other program owns is reused before what any does."""
        self.release(program_id)
        self._queue.disown(program_id)

    def still_cached(self, hashes: Sequence[Any]) -> list[KVCacheBlock]:
        """The cached blocks of the longest cached prefix of a chain of block hashes."""
        found: list[KVCacheBlock] = []
        for block_hash in hashes:
            blocks = self._pool.get_cached_block(block_hash, [0])
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def _add_holder(self, block_id: int, program_id: ProgramId) -> None:
        holder = self._holders.get(block_id)
        if holder is None:
            self._holders[block_id] = program_id
            self._alone[program_id] += 1
        elif isinstance(holder, set):
            holder.add(program_id)
        else:
            self._holders[block_id] = {holder, program_id}
            self._alone[holder] -= 1

    def _remove_holder(self, block_id: int, program_id: ProgramId) -> None:
        holder = self._holders[block_id]
        if not isinstance(holder, set):
            del self._holders[block_id]
            return
        holder.discard(program_id)
        if len(holder) == 1:
            left = self._holders[block_id] = holder.pop()
            self._alone[left] += 1


def chain_hash(block: KVCacheBlock) -> Any:
    """The block's chained content hash, without the number of its cache group."""
    assert block.block_hash is not None
    return get_block_hash(block.block_hash)


def built_upon(chains: Iterable[Sequence[int]], block_ids: set[int]) -> set[int]:
    """These blocks, and of requests' chains of blocks all that stand behind one of them."""
    built = set(block_ids)
    for blocks in chains:
        first = next((place for place, block_id in enumerate(blocks) if block_id in block_ids), None)
        if first is not None:
            built.update(blocks[first:])
    return built
