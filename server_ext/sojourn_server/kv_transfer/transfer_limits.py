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
    report_interval_s: float = 0.4
    """Seconds between progress reports to waiting peers."""
    lease_s: float = 30.0
    """Seconds after which a lease on buffers expires if its holder does not renew it."""
    chunk_bytes: int = 1 << 20
    """Maximum payload of a message that this engine sends. If one layer of a block is larger, it is sent
    whole. The engine accepts payloads up to the largest of three sizes: this one, one layer of a block, and
    1 MiB. Use one value on all engines."""
    read_width: int = 1
    """Maximum number of concurrent reads from storage. Reads start in the order of the queue."""
    max_waiting_writes: int = 256
    """Maximum number of copied blocks that wait to be stored. Further blocks are refused meanwhile."""
    kv_share: float = 0.01
    """Share of a link's bytes that KV traffic gets while model traffic also waits (DualPath §5.1)."""
    queue_share: float = 0.75
    """While other transfers wait for slots, complete prompts of queued requests keep at most this share of
    the slots. The prompt of the first queued request is always kept."""
    max_prompts: int = 4096
    """Maximum number of open prompts of all peers together on this engine. One peer may have half of it."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk_bytes", "read_width", "max_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("patience_s", "report_interval_s", "lease_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value}")
        if self.report_interval_s >= self.patience_s:
            raise ValueError(
                f"report_interval_s {self.report_interval_s} must be below patience_s {self.patience_s}"
            )
        if self.lease_s <= self.patience_s:
            raise ValueError(f"lease_s {self.lease_s} must be above patience_s {self.patience_s}")
        if self.max_waiting_writes < 0:
            raise ValueError(f"max_waiting_writes must not be negative, not {self.max_waiting_writes}")
        if not 0 <= self.queue_share <= 1:
            raise ValueError(f"queue_share must be from 0 to 1, not {self.queue_share}")

    @property
    def max_keys(self) -> int:
        """Maximum number of block keys in all open prompts together, including prompts that wait for
        buffers. One peer may have half of it."""
        return 4 * max(MAX_KEYS_PER_MESSAGE, 16 * self.slots)
