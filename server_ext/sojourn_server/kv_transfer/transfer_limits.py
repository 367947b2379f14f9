"""What bounds one engine's traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second of each link; ``None``: as fast as it goes.

    A rate of zero is refused. It would mean "never", and who is never served is better told at the start.
    """

    storage_read: float | None = None
    storage_write: float | None = None
    compute: float | None = None
    """What this engine sends to its peers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_rate(field.name, getattr(self, field.name))


def check_rate(name: str, rate: float | None) -> None:
    """Raise ``ValueError`` for what is no rate."""
    if rate is None:
        return
    if not math.isfinite(rate) or rate <= 0:
        raise ValueError(
            f"the rate of {name} is {rate!r} bytes a second; expected more than 0, or None for as fast as it "
            "goes. A link that never moves is not a slow one: leave out what is to use it"
        )


MAX_WAITING_WRITE_BYTES = 256 << 20
"""Copies of blocks that wait to be stored, as long as nothing else is said."""


def waiting_write_limit(max_bytes: int, block_bytes: int) -> int:
    """As many blocks as ``max_bytes`` hold, and one at least."""
    return max(1, max_bytes // block_bytes)


MAX_KEYS_PER_PEER = 1 << 17
"""Keys of one peer's contexts, where buffers are small: as many as its largest message has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """What bounds buffers and patience. Times in seconds, sizes in bytes."""

    slots: int
    """Full Blocks that fit the buffers. A prompt has to fit where it is gathered."""
    patience_s: float = 1.5
    """A transfer that shows no progress for so long has failed. How long it lasts in all does not matter."""
    beat_s: float = 0.4
    """How often a peer is told what goes on here while it waits for us."""
    lease_s: float = 30.0
    """Buffers whose holder shows no sign of life for so long are given back by themselves."""
    chunk_bytes: int = 1 << 20
    """Largest payload of one message; at least one Layer Block goes in any. A peer's larger than this, than a
    Layer Block and than 1 MiB are not read: give all engines the same."""
    read_width: int = 1
    """Reads from storage at a time. They begin in order all the same."""
    max_waiting_writes: int = 256
    """Blocks waiting to be stored, each a copy beside the buffers; more are not taken for the moment."""
    kv_share: float = 0.01
    """Of a link that model traffic wants too, what KV gets (DualPath §5.1)."""
    queue_share: float = 0.75
    """Of the slots, what contexts may keep whose requests wait in this engine's queue while others wait for
    buffers; the first of them stays in any case."""
    peer_contexts: int = 1024
    """Contexts that one peer may have here at a time; all peers together four times as many."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk_bytes", "read_width", "peer_contexts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("patience_s", "beat_s", "lease_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value}")
        if self.beat_s >= self.patience_s:
            raise ValueError(
                f"beat_s {self.beat_s} must be below patience_s {self.patience_s}, or all time out"
            )
        if self.lease_s <= self.patience_s:
            raise ValueError(f"lease_s {self.lease_s} must be above patience_s {self.patience_s}")
        if self.max_waiting_writes < 0:
            raise ValueError(f"max_waiting_writes must not be negative, not {self.max_waiting_writes}")
        if not 0 <= self.queue_share <= 1:
            raise ValueError(f"queue_share is a part of the slots, 0 to 1, not {self.queue_share}")

    @property
    def peer_keys(self) -> int:
        """Keys that the contexts of one peer may have here at a time, those of all that wait in line for
        buffers among them; all peers together four times as many."""
        return max(MAX_KEYS_PER_PEER, 16 * self.slots)
