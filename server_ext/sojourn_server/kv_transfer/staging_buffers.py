"""Staging buffers in host memory: a fixed number of slots for one Full Block each, which transfers lease.

A transfer requests one lease on all its blocks, plus a number of slots for blocks whose keys it does not know
yet. A lease is granted as a whole, in the order of requests. So two transfers never each hold half of their
slots and wait for the other half. A lease that is not renewed for ``lease_s`` seconds expires.

All leases on a block share one slot. If a thousand requests need one prefix, the first reads it and the
others wait for that read.

A slot becomes free when it has no lease and no pin. A pin outlives leases, because a thread may still write
to the slot after every lease on it has ended.

The module has no clock and does no I/O.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field


class SlotMemory:
    """Memory for ``slots`` Full Blocks of ``layers`` layers each. The operating system allocates each page
    when it is first written."""

    def __init__(self, slots: int, block_bytes: int, layers: int) -> None:
        """Raises ``ValueError`` for a size below 1 or layers of different sizes."""
        if slots < 1 or block_bytes < 1 or layers < 1 or block_bytes % layers:
            raise ValueError(
                f"{slots} blocks of {block_bytes} bytes and {layers} layers; expected at least one of each, "
                "and layers of one size"
            )
        self.slots = slots
        self.block_bytes = block_bytes
        self.layers = layers
        self.layer_bytes = block_bytes // layers
        # A bytearray would write zeros to all its memory. An anonymous map is also page-aligned, as direct
        # I/O requires.
        self._map = mmap.mmap(-1, slots * block_bytes)
        self._view = memoryview(self._map)

    def block(self, slot: int) -> memoryview:
        """Return the memory of all layers of a slot."""
        start = slot * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def layer(self, slot: int, layer: int) -> memoryview:
        """Return the memory of one layer of a slot."""
        start = slot * self.block_bytes + layer * self.layer_bytes
        return self._view[start : start + self.layer_bytes]


class LeaseTooLarge(ValueError):
    """Raised for a lease that needs more slots than the pool has."""

    def __init__(self, blocks: int, slots: int) -> None:
        super().__init__(
            f"a context of {blocks} Full Blocks does not fit buffers of {slots}; make them larger"
        )


@dataclass(slots=True, eq=False)
class BufferSlot:
    """A place for one Full Block (the unit of storage, 64 tokens) in the buffers."""

    index: int
    key: bytes = b""
    filled: int = 0
    """Number of leading layers that are present."""
    filler: object | None = None
    """The storage read or peer transfer that is filling the slot; ``None`` if there is none."""
    holders: dict[str, None] = field(default_factory=dict)
    """Names of the leases on this slot, oldest first."""
    pins: int = 0
    """Number of current uses of the slot: reads, writes, sends, and claims by the engine. A pinned slot is
    not freed."""
    bad: bool = False
    """Whether the content is unusable, because a fill failed. A thread may still write to the slot."""


@dataclass(slots=True, eq=False)
class _BufferLease:
    keys: OrderedDict[bytes, None]
    extra: int
    deadline_s: float
    granted: bool = False
    slots: dict[bytes, BufferSlot] = field(default_factory=dict)


class BufferPool:
    """Pool of ``slots`` buffer slots, which transfers lease. Each lease has a name. ``lease_s``: seconds
    after which a lease expires if it is not renewed."""

    def __init__(self, slots: int, lease_s: float) -> None:
        self.slots = slots
        self._lease_s = lease_s
        self._free = list(range(slots - 1, -1, -1))
        self._by_key: dict[bytes, BufferSlot] = {}
        self._used: dict[int, BufferSlot] = {}
        self._leases: dict[str, _BufferLease] = {}
        self._queue: deque[str] = deque()
        """Names of waiting leases, in order of arrival. They are granted strictly in this order, so that
        large leases are not starved."""
        self._reserved = 0
        """Number of slots that granted leases have reserved for blocks whose keys are not known yet."""
        self.released = 0
        """Number of granted leases that have ended. Its growth counts as progress of waiting transfers."""
        self.most_used = 0
        self._changes = 0
        """Counter of changes that may let a waiting lease fit."""
        self._refused_at = -1
        """Value of ``_changes`` when the first waiting lease last did not fit. The lease is not tried again
        before the counter changes."""

    @property
    def used(self) -> int:
        """Number of slots in use or reserved."""
        return self.slots - len(self._free) + self._reserved

    @property
    def leases(self) -> int:
        """Number of leases, granted or waiting."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def request_lease(self, name: str, keys: Sequence[bytes], extra: int, now: float) -> None:
        """Request a lease on the blocks ``keys``, and on ``extra`` slots for blocks whose keys are not known
        yet. ``take_granted`` grants it.

        Raises ``LeaseTooLarge`` if the pool is too small, and ``ValueError`` for a name that already has a
        lease.
        """
        if name in self._leases:
            raise ValueError(f"{name} has a lease already")
        distinct = OrderedDict.fromkeys(keys)
        if len(distinct) + extra > self.slots:
            raise LeaseTooLarge(len(distinct) + extra, self.slots)
        self._leases[name] = _BufferLease(distinct, extra, now + self._lease_s)
        self._queue.append(name)

    def take_granted(self, now: float) -> list[str]:
        """Grant waiting leases that fit, in order of arrival, and return their names."""
        granted: list[str] = []
        if self._refused_at == self._changes:  # nothing has changed since the first one did not fit
            return granted
        while self._queue:
            lease = self._leases[self._queue[0]]
            fresh = sum(key not in self._by_key for key in lease.keys)
            if fresh + lease.extra > len(self._free) - self._reserved:
                self._refused_at = self._changes
                break
            name = self._queue.popleft()
            lease.granted = True
            lease.deadline_s = now + self._lease_s
            self._reserved += lease.extra
            for key in lease.keys:
                lease.slots[key] = self._hold(name, key)
            granted.append(name)
        return granted

    def extend(self, name: str, keys: Sequence[bytes]) -> bool:
        """Add blocks to a granted lease; new slots come from its ``extra`` slots. Returns false, and changes
        nothing, if these do not suffice or the lease is not granted."""
        lease = self._leases[name]
        added = [key for key in OrderedDict.fromkeys(keys) if key not in lease.slots]
        fresh = sum(key not in self._by_key for key in added)
        if not lease.granted or fresh > lease.extra:
            return False
        lease.extra -= fresh
        self._reserved -= fresh
        for key in added:
            lease.slots[key] = self._hold(name, key)
        return True

    def release_extra(self, name: str) -> None:
        """Return the unused part of a lease's ``extra`` slots to the pool."""
        lease = self._leases[name]
        self._changes += 1
        if lease.granted:
            self._reserved -= lease.extra
            lease.extra = 0

    def granted(self, name: str) -> bool:
        lease = self._leases.get(name)
        return lease is not None and lease.granted

    def slot(self, name: str, key: bytes) -> BufferSlot:
        """Return the slot of a block of a granted lease."""
        return self._leases[name].slots[key]

    def renew(self, name: str, now: float) -> None:
        """Renew a lease, so that it expires ``lease_s`` seconds after ``now``. Ignores unknown names."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.deadline_s = now + self._lease_s

    def expired(self, now: float) -> list[str]:
        """Return the names of expired leases. The caller must ``release`` or ``renew`` each."""
        return [name for name, lease in self._leases.items() if lease.deadline_s <= now]

    def drop(self, name: str, key: bytes) -> BufferSlot | None:
        """Remove one block from a lease. Returns its slot if no other lease holds the slot, else ``None``."""
        slot = self._leases[name].slots.pop(key, None)
        return self._let_go(name, slot) if slot is not None else None

    def release(self, name: str) -> list[BufferSlot]:
        """End a lease, granted or waiting. Returns the slots that no lease holds any more. The caller must
        notify the fillers of those slots. Ignores unknown names."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return []
        self._changes += 1
        if lease.granted:
            self.released += 1
            self._reserved -= lease.extra
        else:
            self._queue.remove(name)
        found = [self._let_go(name, slot) for slot in lease.slots.values()]
        return [slot for slot in found if slot is not None]

    def pin(self, slot: BufferSlot) -> None:
        """Keep the slot from being reused until ``unpin``."""
        slot.pins += 1

    def unpin(self, slot: BufferSlot) -> None:
        assert slot.pins > 0, "a slot was unpinned more often than pinned"
        slot.pins -= 1
        self._free_if_unused(slot)

    def invalidate(self, slot: BufferSlot) -> None:
        """Mark a slot's content as unusable after a failed fill. New leases on the block get another slot,
        because a thread may still write to this one. Every holder of this slot must drop it."""
        slot.bad = True
        self._changes += 1
        if self._by_key.get(slot.key) is slot:
            del self._by_key[slot.key]

    def _hold(self, name: str, key: bytes) -> BufferSlot:
        self._changes += 1
        slot = self._by_key.get(key)
        if slot is None:
            slot = BufferSlot(self._free.pop(), key)
            self._by_key[key] = slot
            self._used[slot.index] = slot
            self.most_used = max(self.most_used, len(self._used))
        slot.holders[name] = None
        return slot

    def _let_go(self, name: str, slot: BufferSlot) -> BufferSlot | None:
        self._changes += 1
        slot.holders.pop(name, None)
        if slot.holders:
            return None
        if self._by_key.get(slot.key) is slot:
            # The filler may leave half a block in the slot, so no other lease may find it.
            del self._by_key[slot.key]
        self._free_if_unused(slot)
        return slot

    def _free_if_unused(self, slot: BufferSlot) -> None:
        self._changes += 1
        if not slot.holders and not slot.pins and self._used.get(slot.index) is slot:
            del self._used[slot.index]
            self._free.append(slot.index)
