"""Limits of one engine's KV transfers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Limits of one engine's transfer buffers and waiting times. Times in seconds, sizes in bytes."""

    slots: int
    """Number of Full Blocks (the unit of storage, 64 tokens) that the buffers hold. A prompt can be sent to
    this engine only if all its blocks fit."""
    patience_s: float = 1.5
    """Seconds after which a silent peer, a peer that a request expects, or a read counts as failed."""
    lease_s: float = 30.0
    """Seconds without new data after which a transfer fails or gives up its buffers."""
    chunk_bytes: int = 1 << 20
    """Maximum payload of a message that this engine sends. If one layer of a block is larger, it is sent
    whole. A peer must receive each message within ``patience_s`` seconds."""
    max_waiting_writes: int = 256
    """Maximum number of copied blocks that wait to be stored. Further blocks are saved later."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, not {self.slots}")
        if not math.isfinite(self.patience_s) or self.patience_s <= 0:
            raise ValueError(f"patience_s must be more than 0 seconds, not {self.patience_s}")
        if not math.isfinite(self.lease_s) or self.lease_s <= self.patience_s:
            raise ValueError(f"lease_s {self.lease_s} must be above patience_s {self.patience_s}")
