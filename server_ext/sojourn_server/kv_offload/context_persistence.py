"""Writes whole contexts to disk, so that a program can move to another engine that reads the same disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .disk_planner import DiskPlanner
from .host_block_pool import HostBlockPool, RetentionRank
from .offload_jobs import BlockKey


class PersistStatus(NamedTuple):
    """Progress of writing a context to disk, in blocks."""

    stored: int
    """Number of leading blocks of the context that are on disk."""
    pending: int
    """Number of blocks of the context that wait to be written or are being written."""


def persist_context(
    host: HostBlockPool,
    disk: DiskPlanner,
    store: Callable[..., int],
    chain: Sequence[BlockKey],
    on_device: Mapping[BlockKey, int],
) -> PersistStatus:
    """Plan to write a context to disk, and return the progress so far. The writes take several steps. Without
    a disk, or after a cache reset, nothing is written.

    ``chain``: keys of the context's blocks, in order. ``on_device``: key → block id, for blocks that the
    device has. ``store``: ``OffloadPlanner.store``, for blocks that only the device has. To make room for
    them, host memory evicts only blocks of retention rank ``PLAIN`` or below.
    """
    if disk.closed:
        return PersistStatus(0, 0)
    idle = RetentionRank.IDLE
    # Writes delete the least recently used files. So write no more than fits, and mark the blocks that are on
    # disk already as just used. Otherwise the end of the context would displace its beginning.
    chain = chain[: disk.room]
    disk.touch(chain)
    unsaved: list[tuple[BlockKey, int]] = []
    for key in chain:
        entry = host.get(key)
        if entry is not None and entry.rank < idle and key not in disk:
            host.set_rank(entry, idle)  # keep the block until it is on disk
        elif entry is None and key in on_device and key not in disk:
            unsaved.append((key, on_device[key]))
    store(unsaved, idle, at_most=RetentionRank.PLAIN)
    stored = pending = 0
    whole = True
    for key in chain:
        if key in disk:
            whole = whole and not pending
            stored += whole
            continue
        entry = host.get(key)
        if entry is None:
            break
        if key not in disk.being_spilled:
            disk.request_spill(key, RetentionRank.COLD if entry.rank == idle else entry.rank)
        pending += 1
    return PersistStatus(stored, pending)
