"""Limits of transfers, and staging buffers in host memory: slots for one Full Block each, which they lease.

A transfer leases all its slots at once. Leases are granted whole, in the order of requests. So two transfers
never each hold half of their slots and wait for the other half.

A slot becomes free when its lease has ended and no thread writes to it. Use the pool only in its event loop.
"""

from __future__ import annotations

import asyncio
import math
import mmap
from collections import deque
from collections.abc import Iterable
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
        if not 0 < self.patience_s < self.lease_s < math.inf:
            raise ValueError(f"expected 0 < patience_s ({self.patience_s}) < lease_s ({self.lease_s})")


class BufferSlot:
    """A place for one Full Block (the unit of storage, 64 tokens) in the buffers, for one lease."""

    def __init__(self, index: int, memory: memoryview, layers: int) -> None:
        self.index = index
        self.memory = memory
        self.layers = layers
        self.filled = 0
        """Number of leading layers that are present."""
        self.why = ""
        """Why the other layers will not arrive; empty while they may."""
        self.is_leased = True
        self.is_written = False
        """Whether a thread may still write to the slot."""

    @property
    def is_full(self) -> bool:
        return self.filled == self.layers

    def layer(self, layer: int) -> memoryview:
        """Return the memory of one layer."""
        size = self.memory.nbytes // self.layers
        return self.memory[layer * size : (layer + 1) * size]


class BufferPool:
    """Pool of ``slots`` buffer slots of ``block_bytes`` bytes, which transfers lease."""

    def __init__(self, slots: int, block_bytes: int, layers: int) -> None:
        assert block_bytes % layers == 0, "layers have one size"
        self.slots = slots
        self.layers = layers
        self.block_bytes = block_bytes
        # A bytearray would write zeros to all its memory. The operating system allocates a page of an
        # anonymous map when it is first written, and the map is page-aligned, as direct I/O requires.
        self._memory = memoryview(mmap.mmap(-1, slots * block_bytes))
        self._free = list(range(slots - 1, -1, -1))
        self._queue: deque[tuple[int, asyncio.Future[list[BufferSlot]]]] = deque()
        """Waiting leases, granted strictly in order of arrival, so that large leases are not starved."""
        self.released = 0
        """Number of slots that have been released so far."""

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    @property
    def waiting(self) -> int:
        """Number of transfers that wait for a lease."""
        return len(self._queue)

    @property
    def lacking(self) -> int:
        """Number of further slots that the first waiting lease needs; at most 0 if none waits."""
        return self._queue[0][0] - len(self._free) if self._queue else 0

    def lease(self, count: int) -> asyncio.Future[list[BufferSlot]]:
        """Ask for ``count`` slots; the pool must have as many. Returns a future, which ``end_wait`` must
        get back whether or not it is done."""
        granted: asyncio.Future[list[BufferSlot]] = asyncio.get_running_loop().create_future()
        self._queue.append((count, granted))
        self._grant()
        return granted

    def end_wait(self, granted: asyncio.Future[list[BufferSlot]]) -> list[BufferSlot]:
        """Return the slots that were granted, which ``release`` must get. If there are none yet, leave the
        queue."""
        if not granted.cancel():
            return granted.result()
        self._queue = deque(each for each in self._queue if each[1] is not granted)
        self._grant()
        return []

    def release(self, slots: Iterable[BufferSlot]) -> None:
        """End the lease on ``slots``. Slots whose lease has ended already are left out."""
        for slot in slots:
            if slot.is_leased:
                slot.is_leased = False
                self.released += 1
                self._free_if_unused(slot)
        self._grant()

    def written(self, slot: BufferSlot) -> None:
        """Record that no thread writes to the slot any more."""
        slot.is_written = False
        self._free_if_unused(slot)
        self._grant()

    def _free_if_unused(self, slot: BufferSlot) -> None:
        if not slot.is_leased and not slot.is_written:
            self._free.append(slot.index)

    def _grant(self) -> None:
        while self._queue and self.lacking <= 0:
            count, granted = self._queue.popleft()
            size = self.block_bytes
            indices = [self._free.pop() for _ in range(count)]
            granted.set_result(
                [BufferSlot(at, self._memory[at * size : (at + 1) * size], self.layers) for at in indices]
            )
