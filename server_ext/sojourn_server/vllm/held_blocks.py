"""Holding, giving back and forgetting a program's KV blocks: what leases come down to in vLLM's block pool.

A held block has one reference more than its users, so the pool never reuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash

from .free_queue import ProgramFreeQueue


class HeldBlocks:
    """Blocks held for programs between their turns."""

    def __init__(self, pool: BlockPool, queue: ProgramFreeQueue) -> None:
        self._pool = pool
        self._queue = queue
        self._held: dict[ProgramId, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def blocks(self) -> int:
        """Distinct blocks that are held by at least one program."""
        return len({block.block_id for held in self._held.values() for block in held})

    def hold(self, program_id: ProgramId, blocks: Sequence[KVCacheBlock]) -> None:
        """Hold these cached blocks for the program, in chain order."""
        assert program_id not in self._held
        self._pool.touch(blocks)
        self._held[program_id] = list(blocks)

    def release(self, program_id: ProgramId) -> bool:
        """Give the program's held blocks back: they stay cached until they are reused, tails first."""
        held = self._held.pop(program_id, None)
        if held is None:
            return False
        self._pool.free_blocks(reversed(held))
        return True

    def drop(self, program_id: ProgramId) -> int:
        """Release, and forget the cached blocks that no other program owns; returns how many."""
        self.release(program_id)
        dropped = 0
        for block_id in self._queue.disown(program_id):
            block = self._pool.blocks[block_id]
            if block.ref_cnt == 0 and block.block_hash is not None:
                self._pool.evict_blocks({block_id})
                self._queue.discard_to_front(block)
                dropped += 1
        return dropped

    def still_cached(self, hashes: Sequence[Any]) -> list[KVCacheBlock]:
        """The cached blocks of the longest cached prefix of a chain of block hashes."""
        found: list[KVCacheBlock] = []
        for block_hash in hashes:
            blocks = self._pool.get_cached_block(block_hash, [0])
            if blocks is None:
                break
            found.append(blocks[0])
        return found


def chain_hash(block: KVCacheBlock) -> Any:
    """The block's chained content hash, without the number of its cache group."""
    assert block.block_hash is not None
    return get_block_hash(block.block_hash)
