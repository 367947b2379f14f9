"""``TierLimits``: sizes of host memory and disk for offloaded KV, and how long requests wait for the disk."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STAGE_WAIT_S = 10.0
"""Default of ``TierLimits.max_stage_wait_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Limits of host memory and disk of one engine. Times are in seconds."""

    host_slots: int
    """Number of blocks that fit in host memory."""
    disk_blocks: int = 0
    """Number of blocks that fit on the disk; 0 if there is no disk."""
    spill_below: float = 0.25
    """Blocks are written to disk while less than this share of the slots can be reused without loss. Such a
    slot is empty, or its block is on disk or has the rank ``WORTHLESS`` or ``SPARE``."""
    max_spilling: int = 256
    """Maximum number of blocks being written to disk at once, so that a slow disk's queue stays short."""
    max_staging: int = 4096
    """Maximum number of blocks being read from disk at once."""
    max_stage_wait_s: float = MAX_STAGE_WAIT_S
    """Maximum seconds that a request waits for a disk read. After that it computes the missing blocks."""
    shared: bool = False
    """Whether this engine also reads the stores of other engines in the same root folder."""
    min_probe_blocks: int = 8
    """Other engines' stores are searched if a request misses at least this many blocks. Computing fewer
    blocks is faster than the search."""
    max_probe_wait_s: float = 1.0
    """Maximum seconds that a request waits for a search of other engines' stores. While any search runs
    longer than this, no further search begins."""
