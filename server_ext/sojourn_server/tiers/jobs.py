"""What moves: the orders of one engine step, and what became of earlier ones.

The planner, beside the scheduler, writes ``TierJobs``; the mover, beside the
model, carries them out in the order of the fields below and answers with
``TierResults``. Blocks are numbered as the engine numbers them, slots of host
memory from 0; a key is the chain hash of a block's content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Key = bytes


class Copy(NamedTuple):
    """One block between the device and host memory."""

    block_id: int
    slot: int


class FileCopy(NamedTuple):
    """One block between host memory and disk."""

    slot: int
    key: Key
    shared: bool = False
    """To be read from another engine's store, not from one's own."""


class Probed(NamedTuple):
    """What other engines' stores were found to have."""

    found: int
    """Of the keys that were looked for, how many leading ones."""
    stores: int
    """How many other engines' stores there are."""


class Fate(Enum):
    """What became of one block that was to be moved."""

    MOVED = "moved"
    FULL = "full"
    """No room where it was to go."""
    MISSING = "missing"
    """It is not where it was to come from."""
    CORRUPT = "corrupt"
    """It was there, and is not what it should be."""
    FAILED = "failed"
    """The device, the memory or the disk reported an error."""


@dataclass(slots=True)
class TierJobs:
    """Orders of one step. Jobs are numbered; a number is answered once."""

    awaited: dict[int, list[Copy]] = field(default_factory=dict)
    """Stores that must be over before anything else, and have worked, if need be at a second try: this step
    writes into their blocks, and may give their slots away."""
    saves: list[Copy] = field(default_factory=list)
    """Device to host, in this order, before this step's forward pass: it writes into these blocks."""
    loads: dict[str, list[Copy]] = field(default_factory=dict)
    """Host to device, of each request: each layer before this step's forward pass comes to it."""
    stores: dict[int, list[Copy]] = field(default_factory=dict)
    """Device to host, beside the computing."""
    drops: list[Key] = field(default_factory=list)
    """To be deleted from disk, before anything is written: what is written may be of the same key."""
    spills: dict[int, list[FileCopy]] = field(default_factory=dict)
    """Host to disk."""
    stages: dict[int, list[FileCopy]] = field(default_factory=dict)
    """Disk to host; first come, first served."""
    probes: dict[int, Sequence[Key]] = field(default_factory=dict)
    """Chains to be looked for in other engines' stores."""

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
class TierResults:
    """What one worker has to say after a step."""

    on_disk: Sequence[Key] | None = None
    """Said once: what an earlier engine left there, the longest unused first."""
    stored: dict[int, Fate] = field(default_factory=dict)
    """Of each store that is over."""
    spilled: dict[int, Mapping[Key, Fate]] = field(default_factory=dict)
    staged: dict[int, Mapping[Key, Fate]] = field(default_factory=dict)
    probed: dict[int, Probed] = field(default_factory=dict)
    lost_slots: list[int] = field(default_factory=list)
    """Slots of ``saves`` and ``awaited`` that failed: what is in them is nothing."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each lane, the seconds it moved something since it was last asked."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Of each lane, since then."""
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
