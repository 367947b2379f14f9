"""Limits of one engine's KV transfers."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_WAITING_WRITE_BYTES = 256 << 20
"""Default limit of the bytes of copied blocks that wait to be written to the store."""

MAX_KEYS_PER_MESSAGE = 1 << 17
"""Maximum number of block keys in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Limits of one engine's transfer buffers and waiting times. Times in seconds, sizes in bytes."""

    slots: int
    """Number of Full Blocks (the unit of storage, 64 tokens) that the buffers hold. A prompt can be sent to
    this engine only if all its blocks fit."""
    patience_s: float = 1.5
    """Seconds without progress after which a transfer fails. Its total duration is not limited."""
    lease_s: float = 30.0
    """Seconds for which buffers are kept for a prompt that neither this engine nor its peer continues."""
    chunk_bytes: int = 1 << 20
    """Maximum payload of a message that this engine sends. If one layer of a block is larger, it is sent
    whole. A peer must accept each message within ``patience_s`` seconds."""
    read_width: int = 1
    """Maximum number of concurrent reads from storage. Reads start in the order of the queue."""
    max_waiting_writes: int = 256
    """Maximum number of copied blocks that wait to be stored. Further blocks are saved later."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk_bytes", "read_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not math.isfinite(self.patience_s) or self.patience_s <= 0:
            raise ValueError(f"patience_s must be more than 0 seconds, not {self.patience_s}")
        if not math.isfinite(self.lease_s) or self.lease_s <= self.patience_s:
            raise ValueError(f"lease_s {self.lease_s} must be above patience_s {self.patience_s}")

    @property
    def report_interval_s(self) -> float:
        """Seconds between progress reports to waiting peers."""
        return self.patience_s / 4
