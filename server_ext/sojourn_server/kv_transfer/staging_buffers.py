"""Staging buffers in host memory: a fixed number of slots for one Full Block each, which transfers lease.

A transfer leases all its blocks at once, plus a number of slots for blocks whose keys it does not know yet.
Leases are granted whole, in the order of requests. So two transfers never each hold half of their slots and
wait for the other half. All leases on a block share one slot: if a thousand requests need one prefix, the
first reads it and the others wait for that read.

A slot becomes free when it has no lease and no pin. A pin is held by a thread that may still write to the
slot after every lease on it has ended. Use the pool only in its event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Sequence


class BufferSlot:
    """A place for one Full Block (the unit of storage, 64 tokens) in the buffers."""

    def __init__(self, index: int, key: bytes, memory: memoryview, layers: int) -> None:
        self.index = index
        self.key = key
        self.memory = memory
        self.layers = layers
        self.filled = 0
        """Number of leading layers that are present."""
        self.filler: object | None = None
        """The transfer, or the reader of the store, that is filling the slot; ``None`` if there is none."""
        self.why = ""
        """Why the last fill has failed."""
        self.bad = False
        """Whether the content is unusable, because a fill failed half way or a thread may still write."""
        self.leases = 0
        self.pins = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        return self.filled == self.layers

    @property
    def is_free_to_fill(self) -> bool:
        """Whether the block is missing and no transfer brings it."""
        return self.filler is None and not self.is_full and not self.bad

    def layer(self, layer: int) -> memoryview:
        """Return the memory of one layer."""
        size = self.memory.nbytes // self.layers
        return self.memory[layer * size : (layer + 1) * size]

    def advance(self, filled: int) -> None:
        """Record that the first ``filled`` layers are present, and wake the transfers that wait."""
        self.filled = filled
        if self.is_full:
            self.filler = None
        self.wake()

    async def changed(self) -> None:
        """Wait until a layer arrives or the filler changes."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class BufferLease:
    """The slots of one transfer, by block key."""

    def __init__(self, keys: Sequence[bytes], extra: int) -> None:
        self.keys = list(dict.fromkeys(keys))
        self.extra = extra
        """Number of slots reserved for blocks whose keys are not known yet."""
        self.slots: dict[bytes, BufferSlot] = {}
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


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
        self._by_key: dict[bytes, BufferSlot] = {}
        self._queue: deque[BufferLease] = deque()
        """Waiting leases, granted strictly in order of arrival, so that large leases are not starved."""
        self._reserved = 0
        """Number of slots that granted leases have reserved for blocks whose keys are not known yet."""
        self.leases = 0
        """Number of granted leases."""
        self.released = 0
        """Number of granted leases that have ended. Its growth counts as progress of waiting transfers."""

    @property
    def used(self) -> int:
        """Number of slots in use or reserved."""
        return self.slots - len(self._free) + self._reserved

    @property
    def waiting(self) -> int:
        """Number of transfers that wait for a lease."""
        return len(self._queue)

    async def lease(self, keys: Sequence[bytes], extra: int = 0) -> BufferLease:
        """Wait for a lease on the blocks ``keys``, and on ``extra`` slots for blocks whose keys are not known
        yet. There must be as many slots in all."""
        lease = BufferLease(keys, extra)
        self._queue.append(lease)
        self._grant()
        try:
            await lease.granted
        except asyncio.CancelledError:
            self.release(lease)
            raise
        return lease

    def extend(self, lease: BufferLease, keys: Sequence[bytes]) -> bool:
        """Add blocks to a granted lease; new slots come from its ``extra`` slots, and the rest of these is
        returned to the pool. Returns false, and changes nothing, if they do not suffice."""
        added = [key for key in dict.fromkeys(keys) if key not in lease.slots]
        if sum(key not in self._by_key for key in added) > lease.extra:
            return False
        self._reserved -= lease.extra
        lease.extra = 0
        self._hold(lease, added)
        self._grant()
        return True

    def drop(self, lease: BufferLease, slot: BufferSlot) -> None:
        """Remove one block from a lease."""
        if lease.slots.pop(slot.key, None) is slot:
            self._let_go(slot)
            self._grant()

    def release(self, lease: BufferLease) -> None:
        """End a lease, granted or waiting."""
        if lease in self._queue:
            self._queue.remove(lease)
        else:
            self.leases -= 1
            self.released += 1
            self._reserved -= lease.extra
            for slot in lease.slots.values():
                self._let_go(slot)
        lease.slots, lease.extra = {}, 0
        self._grant()

    def fail(self, slot: BufferSlot, why: str) -> None:
        """Record that a slot's block will not arrive. A transfer that holds the slot may fill it again,
        unless layers are present or a thread may still write to it: new leases then get another slot."""
        slot.filler, slot.why = None, why
        if slot.pins or slot.filled:
            slot.bad = True
            self._forget(slot)
        slot.wake()

    def unpin(self, slot: BufferSlot) -> None:
        slot.pins -= 1
        self._free_if_unused(slot)
        self._grant()

    def _grant(self) -> None:
        while self._queue:
            lease = self._queue[0]
            fresh = sum(key not in self._by_key for key in lease.keys)
            if fresh + lease.extra > len(self._free) - self._reserved:
                return
            self._queue.popleft()
            self.leases += 1
            self._reserved += lease.extra
            self._hold(lease, lease.keys)
            if not lease.granted.done():  # otherwise its transfer has been cancelled, and releases it
                lease.granted.set_result(None)

    def _hold(self, lease: BufferLease, keys: Sequence[bytes]) -> None:
        for key in keys:
            slot = self._by_key.get(key)
            if slot is None:
                index = self._free.pop()
                memory = self._memory[index * self.block_bytes : (index + 1) * self.block_bytes]
                slot = self._by_key[key] = BufferSlot(index, key, memory, self.layers)
            slot.leases += 1
            lease.slots[key] = slot

    def _let_go(self, slot: BufferSlot) -> None:
        slot.leases -= 1
        if not slot.leases:
            # Its filler may leave half a block in it, so no other lease may find it.
            self._forget(slot)
            slot.filler = None
            slot.wake()
            self._free_if_unused(slot)

    def _forget(self, slot: BufferSlot) -> None:
        if self._by_key.get(slot.key) is slot:
            del self._by_key[slot.key]

    def _free_if_unused(self, slot: BufferSlot) -> None:
        if not slot.leases and not slot.pins:
            self._free.append(slot.index)
