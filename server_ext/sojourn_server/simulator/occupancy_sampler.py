"""Looks, from time to time, at who holds the device's KV memory. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .run_log import OccupancySample

if TYPE_CHECKING:
    from .simulated_engine import SimulatedEngine

HASH_STRIDE = 8
"""Of a long context every eighth block is looked up: eviction takes runs of blocks."""


def sample_occupancy(
    engine: SimulatedEngine,
    contexts: Sequence[Sequence[bytes]],
    *,
    at_s: float,
    waiting: int,
    acting: int,
    running: int,
) -> OccupancySample:
    """A sample. ``contexts`` are the block hashes of programs that are in a tool."""
    pool = engine.pool
    total = pool.num_gpu_blocks - 1
    unused = pool.get_num_free_blocks()
    leased = _count_leased_blocks(engine)
    cached = sum(1 for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0)
    idle = sum(_count_cached_blocks(engine, hashes) for hashes in contexts)
    idle = min(idle, cached + leased)
    return OccupancySample(
        at_s=at_s,
        running=total - unused - leased,
        idle=idle,
        other=cached + leased - idle,
        free=unused - cached,
        host=count_host_blocks(engine),
        programs_waiting=waiting,
        programs_acting=acting,
        programs_running=running,
    )


def count_host_blocks(engine: SimulatedEngine) -> int:
    """Blocks in host memory, those on their way included; 0 without a host cache."""
    connector = engine.scheduler.connector
    if connector is None:
        return 0
    if engine.options.own_tiers:
        return len(connector.planner.host)
    # vLLM has no public count: chunks handed out so far, less those given back (kv_offload/cpu/manager.py).
    manager = connector.scheduler.manager
    return int(manager._num_allocated_chunks - len(manager._free_list))


def _count_leased_blocks(engine: SimulatedEngine) -> int:
    adapter = getattr(engine.scheduler, "sojourn", None)
    return 0 if adapter is None else int(adapter.pool_state()["leased"])


def _count_cached_blocks(engine: SimulatedEngine, hashes: Sequence[bytes]) -> int:
    find = engine.pool.get_cached_block
    found = sum(1 for block_hash in hashes[::HASH_STRIDE] if find(block_hash, [0]) is not None)
    return min(len(hashes), found * HASH_STRIDE)
