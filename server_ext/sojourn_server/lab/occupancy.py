"""Looks, from time to time, at who holds the device's KV memory. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .lives import OccupancySample

if TYPE_CHECKING:
    from .bare_engine import BareEngine

STRIDE = 8
"""Of a long context every eighth block is looked up: eviction takes runs of blocks."""


def look(
    engine: BareEngine,
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
    leased = _leased(engine)
    cached = sum(1 for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0)
    idle = sum(_cached(engine, hashes) for hashes in contexts)
    idle = min(idle, cached + leased)
    return OccupancySample(
        at_s=at_s,
        running=total - unused - leased,
        idle=idle,
        other=cached + leased - idle,
        free=unused - cached,
        host=host_blocks(engine),
        programs_waiting=waiting,
        programs_acting=acting,
        programs_running=running,
    )


def host_blocks(engine: BareEngine) -> int:
    """Blocks in host memory, those on their way included; 0 without a host cache."""
    connector = engine.scheduler.connector
    if connector is None:
        return 0
    if engine.options.own_tiers:
        return len(connector.planner.host)
    # vLLM has no public count: chunks handed out so far, less those given back (kv_offload/cpu/manager.py).
    manager = connector.scheduler.manager
    return int(manager._num_allocated_chunks - len(manager._free_list))


def _leased(engine: BareEngine) -> int:
    adapter = getattr(engine.scheduler, "sojourn", None)
    return 0 if adapter is None else int(adapter.pool_state()["leased"])


def _cached(engine: BareEngine, hashes: Sequence[bytes]) -> int:
    find = engine.pool.get_cached_block
    found = sum(1 for block_hash in hashes[::STRIDE] if find(block_hash, [0]) is not None)
    return min(len(hashes), found * STRIDE)
