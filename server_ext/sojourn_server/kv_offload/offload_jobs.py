"""The copy orders of one engine step, and the results of earlier orders.

The planner, beside the scheduler, writes ``OffloadJobs``. The worker, beside the model, carries them out in
the order of the fields below and answers with ``OffloadResults``. Block ids are the engine's; slots of host
memory count from 0; a key is the chain hash of a block's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

BlockKey = bytes


class BlockCopy(NamedTuple):
    """A copy of one block between the device and host memory."""

    block_id: int
    slot: int


class FileCopy(NamedTuple):
    """A copy of one block between host memory and disk."""

    slot: int
    key: BlockKey
    shared: bool = False
    """Read from another engine's store instead of this engine's."""


class ProbeResult(NamedTuple):
    """What a search of other engines' stores found."""

    found: int
    """Number of leading keys found."""
    stores: int
    """Number of other engines' stores."""


class CopyResult(Enum):
    """The result of one block's copy."""

    MOVED = "moved"
    FULL = "full"
    """The destination has no room."""
    MISSING = "missing"
    """The source does not have the block."""
    CORRUPT = "corrupt"
    """The source has the block, with wrong content."""
    FAILED = "failed"
    """The device, the memory or the disk reported an error."""


@dataclass(slots=True)
class OffloadJobs:
    """The orders of one step. Jobs are numbered; each number is answered once."""

    awaited: dict[int, list[BlockCopy]] = field(default_factory=dict)
    """Earlier stores that must end first, and are retried if they failed: this step overwrites their blocks
    and may reuse their slots."""
    saves: list[BlockCopy] = field(default_factory=list)
    """Device to host, in this order, before this step's forward pass overwrites the blocks."""
    loads: dict[str, list[BlockCopy]] = field(default_factory=dict)
    """Host to device, by request: each layer before this step's forward pass reaches it."""
    stores: dict[int, list[BlockCopy]] = field(default_factory=dict)
    """Device to host, while the model computes."""
    drops: list[BlockKey] = field(default_factory=list)
    """Files to delete, before anything is written: a later write may have the same key."""
    spills: dict[int, list[FileCopy]] = field(default_factory=dict)
    """Host to disk."""
    stages: dict[int, list[FileCopy]] = field(default_factory=dict)
    """Disk to host, in order of job numbers."""
    probes: dict[int, Sequence[BlockKey]] = field(default_factory=dict)
    """Chains to search for in other engines' stores."""

    def __bool__(self) -> bool:
        return bool(
            self.saves
            or self.awaited
            or self.loads
            or self.stores
            or self.spills
            or self.stages
            or self.drops
            or self.probes
        )


@dataclass(slots=True)
class OffloadResults:
    """One worker's results since its last report."""

    on_disk: Sequence[BlockKey] | None = None
    """Reported once: keys left by an earlier engine, least recently used first."""
    stored: dict[int, CopyResult] = field(default_factory=dict)
    """By store that has ended."""
    spilled: dict[int, Mapping[BlockKey, CopyResult]] = field(default_factory=dict)
    staged: dict[int, Mapping[BlockKey, CopyResult]] = field(default_factory=dict)
    probed: dict[int, ProbeResult] = field(default_factory=dict)
    lost_slots: list[int] = field(default_factory=list)
    """Slots of failed ``saves`` and ``awaited``: their content is undefined."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By lane, the seconds of copying since the last report."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """By lane, the bytes copied since the last report."""
    waited_s: float = 0.0
    """Seconds for which the forward pass waited for copies."""

    def __bool__(self) -> bool:
        return bool(
            self.on_disk is not None
            or self.stored
            or self.spilled
            or self.staged
            or self.probed
            or self.lost_slots
            or self.moved_bytes
            or self.waited_s
        )
