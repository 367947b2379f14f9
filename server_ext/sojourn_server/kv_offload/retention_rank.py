"""The order in which blocks are evicted from host memory."""

from __future__ import annotations

from enum import IntEnum


class RetentionRank(IntEnum):
    """Slots of the lowest rank are reused first; within a rank, the least recently used.

    Members hash and compare as fast as numbers. Attribute access is slower: code that runs for each block
    binds members first."""

    WORTHLESS = 0
    """No request is known to need it again. Not written to disk."""
    SPARE = 1
    """The device has it too: a copy made ahead of eviction. Not written to disk."""
    COLD = 2
    """Of a program idle for so long that its KV belongs on disk; the disk has it."""
    PLAIN = 3
    """Of a busy program whose KV belongs on the device, and of blocks of unknown programs."""
    IDLE = 4
    """Of an idle program whose KV belongs in host memory."""
    WANTED = 5
    """Read next: its program has just been admitted. Nothing replaces it."""

    @property
    def until_written(self) -> RetentionRank:
        """The rank until the disk has the block: the only copy of a cold block is kept like an idle one."""
        return _IDLE if self is _COLD else self


_COLD, _IDLE = RetentionRank.COLD, RetentionRank.IDLE
