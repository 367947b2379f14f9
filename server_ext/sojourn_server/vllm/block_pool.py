"""Sojourn's additions to vLLM's block pool: pinned blocks, counts by state, and the policy's eviction order.

Each pin adds one reference to a block, so the pool does not reuse a pinned block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

from ..core.program_scheduler import ProgramScheduler
from ..policies.policy_views import AbandonedBranch
from ..programs.windowed_history import BranchReuseRate
from .compat import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock, get_block_hash
from .eviction_heap import Score, Standing
from .free_block_queue import BeforeReuse, OnEvicted, ProgramFreeBlockQueue

if TYPE_CHECKING:
    from .compat import KVCacheManager

SMALL_POOL_BLOCKS = 20_000
"""Pool size in blocks below which ``count_by_state`` counts all blocks at each call (in at most 2 ms)."""

COUNTING_S_PER_BLOCK = 40e-6
"""Minimum seconds between two counts of a larger pool, per block of the pool. Counting then takes at most
0.2 % of the engine's time."""


class PinnedBlocks:
    """Blocks pinned for programs between their turns. Each program that pins a block adds one reference."""

    def __init__(
        self,
        pool: BlockPool,
        program_scheduler: ProgramScheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._program_scheduler = program_scheduler
        self._clock = clock
        self._pinned: dict[ProgramId, list[KVCacheBlock]] = {}
        self._counted: dict[str, int] | None = None
        self._counted_at = 0.0

    def __len__(self) -> int:
        return len(self._pinned)

    def hold(self, program_id: ProgramId, blocks: list[KVCacheBlock]) -> None:
        """Pin ``blocks`` for the program, which has no pinned blocks. They must be distinct, cached, and in
        context order."""
        self._pool.touch(blocks)
        self._pinned[program_id] = blocks

    def release(self, program_id: ProgramId) -> None:
        """Unpin the program's blocks, if any. They stay cached until the pool reuses them, last block
        first."""
        self._pool.free_blocks(reversed(self._pinned.pop(program_id, [])))

    def used_blocks(self) -> int:
        """Return the number of blocks that requests use or programs pin."""
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def count_by_state(self) -> dict[str, int]:
        """Return the number of blocks by state. The keys are ``total``, ``running`` (used by requests alone),
        ``leased`` (pinned), ``cached`` (with content, but evictable) and ``free`` (without content).

        A large pool is not counted at each call, so its counts may be some seconds old.
        """
        pool, now = self._pool, self._clock()
        age_s = now - self._counted_at
        is_large = pool.num_gpu_blocks >= SMALL_POOL_BLOCKS
        if self._counted is not None and is_large and age_s < pool.num_gpu_blocks * COUNTING_S_PER_BLOCK:
            return self._counted
        available = pool.get_num_free_blocks()
        cached = 0
        if available:
            cached = sum(1 for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None)
        total, leased = pool.num_gpu_blocks - 1, self._program_scheduler.leased_blocks
        self._counted_at = now
        self._counted = {
            "total": total,
            "running": total - available - leased,
            "leased": leased,
            "cached": cached,
            "free": available - cached,
        }
        return self._counted


def without_common_prefix(manager: KVCacheManager, pinned: PinnedBlocks) -> Callable[[str], list[int]]:
    """Return a function that replaces ``manager.get_num_common_prefix_blocks``. While blocks are pinned, it
    reports no common prefix.

    vLLM 0.31 treats a block as common to all requests if its reference count equals the number of requests
    with blocks. Pins are references too, so a pinned block may look common. Cascade attention would then let
    requests read blocks that are not theirs. Cascade attention is off by default in vLLM 0.31, and later
    releases do not have it."""
    count = manager.get_num_common_prefix_blocks

    def get_num_common_prefix_blocks(running_request_id: str) -> list[int]:
        found: list[int] = count(running_request_id)
        return [0] * len(found) if len(pinned) else found

    return get_num_common_prefix_blocks


class EvictionAdapter:
    """Keeps a pool's free queue in the order of the preset's eviction policy.

    The caller must install ``queue`` in the pool. If the policy cannot score some blocks, only these keep
    vLLM's order.
    """

    def __init__(
        self,
        program_scheduler: ProgramScheduler,
        replaced: FreeKVCacheBlockQueue,
        *,
        report_failure: Callable[[Exception, str], None],
        evicted: OnEvicted,
        failed: Callable[[Exception], None],
        before_reuse: BeforeReuse | None,
    ) -> None:
        """The last three are callbacks of ``queue``, which takes the blocks of ``replaced``."""
        self._program_scheduler = program_scheduler
        self._report_failure = report_failure
        self.by_program = program_scheduler.preset.eviction.by_program
        scorer = self if self.by_program else None
        self.queue = ProgramFreeBlockQueue(
            replaced, owners=program_scheduler.owners, evicted=evicted, scorer=scorer, failed=failed,
            before_reuse=before_reuse,
        )  # fmt: skip
        self._branches = BranchReuseRate()
        self._scale_changes = 0

    def before_step(self) -> None:
        """Update the scores of programs whose state has changed. Update all scores if the scale of scores has
        changed. Call it only if the policy orders ``by_program``."""
        self._branches.observe(self.queue.abandoned_reused, self.queue.abandoned_evicted)
        for program_id in self._program_scheduler.predictor.take_changed():
            self.queue.rescore(program_id)
        scale_changes = self._program_scheduler.predictor.scale_changes + self._branches.changes
        if scale_changes != self._scale_changes:
            self._scale_changes = scale_changes
            self.queue.rescale()

    def after_step(self) -> None:
        """Mark an abandoned branch for each program with a newly admitted turn. It consists of the free
        blocks of the program's previous turn, which the new turn does not use. Call it only if the policy
        orders ``by_program``."""
        for program_id, used_s in self._program_scheduler.predictor.take_begun().items():
            self.queue.mark_abandoned(program_id, used_s)

    def standing(self, program_id: ProgramId, left: AbandonedBranch | None) -> Standing:
        """Return the standing (the inputs of the eviction score) of the abandoned branch ``left``, or of the
        program's newest turn if ``left`` is ``None``. Returns ``None`` for an unknown program."""
        return self._program_scheduler.owner_standing(program_id, left)

    def score(self, standing: Standing) -> Score:
        """Return the eviction score of a standing in the present scale; the lowest is evicted first."""
        return self._program_scheduler.owner_score(standing, self._branches.share)

    def score_failed(self, error: Exception) -> None:
        """Count an error of the policy, and log it if there were few."""
        self._report_failure(error, "the eviction score failed; what it cannot score is evicted first")


def block_content_hash(block: KVCacheBlock) -> Any:
    """Return the content hash of a cached block, without the number of its KV cache group."""
    assert block.block_hash is not None
    return get_block_hash(block.block_hash)
