"""How many of the device's blocks run, are leased, are cached and are free."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.block_pool import BlockPool

from .held_blocks import HeldBlocks

EASILY_COUNTED = 20_000
"""Pools of fewer blocks are counted each time somebody asks: at most 2 ms."""

COUNTING_S_PER_BLOCK = 40e-6
"""Blocks of larger pools are counted anew no sooner than this times their number: 0.2 % of the time."""


class PoolCount:
    """Counts a pool when somebody asks, and a large one not each time."""

    def __init__(self, pool: BlockPool, held: HeldBlocks, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._held = held
        self._clock = clock
        self._counted: dict[str, int] | None = None
        self._counted_at = 0.0

    def used_blocks(self) -> int:
        """In use or held, as of now."""
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def by_state(self) -> dict[str, int]:
        """Blocks by state. In use and cached are told apart: cached blocks are free to be reused."""
        now = self._clock()
        blocks = self._pool.num_gpu_blocks
        age_s = now - self._counted_at
        if self._counted is None or blocks < EASILY_COUNTED or age_s >= blocks * COUNTING_S_PER_BLOCK:
            self._counted, self._counted_at = self._count(), now
        return self._counted

    def _count(self) -> dict[str, int]:
        pool = self._pool
        total = pool.num_gpu_blocks - 1
        available = pool.get_num_free_blocks()
        cached_and_free = 0
        if available:
            cached_and_free = sum(
                1 for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0
            )
        leased = self._held.blocks()
        return {
            "total": total,
            "running": total - available - leased,
            "leased": leased,
            "cached": cached_and_free,
            "free": available - cached_and_free,
        }
