"""Leased buffers: slots of one Full Block each, bounded, shared by all who want the same block.

Who gathers a context asks for a lease on all its blocks at once, and on room for those it cannot name yet. A
lease is granted whole or waits its turn, so that two who have half of what they need never wait for each
other. A lease whose holder shows no sign of life for ``lease_s`` ends by itself.

A block is in one slot at most: a lease on a block that is there, or on its way, takes the same slot. That is
how reads are merged: of a thousand requests for one prefix the first has it read, and the others wait for it.

A slot is free again when no lease holds it and nobody is inside it (``pin``): a thread that reads into it may
outlive every lease on it.

No clock and no I/O.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field


class SlotMemory:
    """``slots`` blocks of ``layers`` layers; pages are the system's to give when they are first written."""

    def __init__(self, slots: int, block_bytes: int, layers: int) -> None:
        """Raises ``ValueError`` where layers are of different sizes: its Layer Blocks would differ."""
        if slots < 1 or block_bytes < 1 or layers < 1 or block_bytes % layers:
            raise ValueError(
                f"{slots} blocks of {block_bytes} bytes and {layers} layers; expected at least one of each, "
                "and layers of one size"
            )
        self.slots = slots
        self.block_bytes = block_bytes
        self.layers = layers
        self.layer_bytes = block_bytes // layers
        # Not a bytearray: that writes zeros to all of it at once. And aligned, as direct I/O wants it.
        self._map = mmap.mmap(-1, slots * block_bytes)
        self._view = memoryview(self._map)

    def block(self, slot: int) -> memoryview:
        """All layers of a slot."""
        start = slot * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def layer(self, slot: int, layer: int) -> memoryview:
        """One layer of a slot."""
        start = slot * self.block_bytes + layer * self.layer_bytes
        return self._view[start : start + self.layer_bytes]


class LeaseTooLarge(ValueError):
    """It never fits, however long it waits."""

    def __init__(self, blocks: int, slots: int) -> None:
        super().__init__(
            f"a context of {blocks} Full Blocks does not fit buffers of {slots}; make them larger"
        )
        self.blocks = blocks
        self.slots = slots


@dataclass(slots=True, eq=False)
class BufferSlot:
    """A place for one block."""

    index: int
    key: bytes = b""
    filled: int = 0
    """Leading layers that are there."""
    filler: object | None = None
    """Who brings it, if anybody does."""
    holders: dict[str, None] = field(default_factory=dict)
    """Leases on it, in the order in which they came."""
    pins: int = 0
    """Threads and messages that read or write it now."""
    bad: bool = False
    """What was being brought into it when it failed may still be written: of no use to anybody."""


@dataclass(slots=True, eq=False)
class _BufferLease:
    keys: OrderedDict[bytes, None]
    extra: int
    deadline_s: float
    granted: bool = False
    slots: dict[bytes, BufferSlot] = field(default_factory=dict)


class BufferPool:
    """``slots`` places, leased by the names of those who hold them."""

    def __init__(self, slots: int, lease_s: float) -> None:
        self.slots = slots
        self._lease_s = lease_s
        self._free = list(range(slots - 1, -1, -1))
        self._by_key: dict[bytes, BufferSlot] = {}
        self._used: dict[int, BufferSlot] = {}
        self._leases: dict[str, _BufferLease] = {}
        self._line: deque[str] = deque()
        """Leases that wait, first come first served: a large one is not passed by for ever."""
        self._reserved = 0
        """Slots promised to leases for blocks they have yet to name."""
        self.released = 0
        """Granted leases that have ended so far, however: those who wait see by it that it goes on. One that
        only waited has given nothing back."""
        self.most_used = 0
        self._changes = 0
        self._refused_at = -1
        """How many changes there had been when the first in line was found not to fit."""

    @property
    def used(self) -> int:
        """Slots that are not free, by block or by promise."""
        return self.slots - len(self._free) + self._reserved

    @property
    def leases(self) -> int:
        """Leases that are granted or wait."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        return len(self._line)

    def ask(self, name: str, keys: Sequence[bytes], extra: int, now: float) -> None:
        """Ask for a lease on ``keys`` and on ``extra`` more slots; ``take_granted`` says when it is there.

        Raises ``LeaseTooLarge`` where it never will be, ``ValueError`` for a name that has one already.
        """
        if name in self._leases:
            raise ValueError(f"{name} has a lease already")
        distinct = OrderedDict.fromkeys(keys)
        if len(distinct) + extra > self.slots:
            raise LeaseTooLarge(len(distinct) + extra, self.slots)
        self._leases[name] = _BufferLease(distinct, extra, now + self._lease_s)
        self._line.append(name)

    def take_granted(self, now: float) -> list[str]:
        """Leases that can be had now, in the order in which they were asked for."""
        granted: list[str] = []
        if self._refused_at == self._changes:  # its blocks need not be counted again
            return granted
        while self._line:
            lease = self._leases[self._line[0]]
            fresh = sum(key not in self._by_key for key in lease.keys)
            if fresh + lease.extra > len(self._free) - self._reserved:
                self._refused_at = self._changes
                break
            name = self._line.popleft()
            lease.granted = True
            lease.deadline_s = now + self._lease_s
            self._reserved += lease.extra
            for key in lease.keys:
                lease.slots[key] = self._hold(name, key)
            granted.append(name)
        return granted

    def extend(self, name: str, keys: Sequence[bytes]) -> bool:
        """Have a granted lease name more blocks, out of its ``extra``; whether that was enough.

        All or nothing: where it was not, nothing has changed.
        """
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

    def settle(self, name: str) -> None:
        """A lease needs no more than it has named: the rest of its ``extra`` is somebody else's."""
        lease = self._leases[name]
        self._changes += 1
        if lease.granted:
            self._reserved -= lease.extra
            lease.extra = 0

    def granted(self, name: str) -> bool:
        lease = self._leases.get(name)
        return lease is not None and lease.granted

    def slot(self, name: str, key: bytes) -> BufferSlot:
        """Where a granted lease has a block."""
        return self._leases[name].slots[key]

    def renew(self, name: str, now: float) -> None:
        """Its holder lives. Nothing happens where there is no such lease."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.deadline_s = now + self._lease_s

    def expired(self, now: float) -> list[str]:
        """Leases whose time is up; it is for their holders to ``release`` them."""
        return [name for name, lease in self._leases.items() if lease.deadline_s <= now]

    def drop(self, name: str, key: bytes) -> BufferSlot | None:
        """A lease gives up one block; its slot, where nobody holds that any more."""
        slot = self._leases[name].slots.pop(key, None)
        return self._let_go(name, slot) if slot is not None else None

    def release(self, name: str) -> list[BufferSlot]:
        """End a lease, whether it was granted or waits; the slots that nobody holds any more.

        Who brings something into one of those must be told. Nothing happens where there is no such lease.
        """
        lease = self._leases.pop(name, None)
        if lease is None:
            return []
        self._changes += 1
        if lease.granted:
            self.released += 1
            self._reserved -= lease.extra
        else:
            self._line.remove(name)
        found = [self._let_go(name, slot) for slot in lease.slots.values()]
        return [slot for slot in found if slot is not None]

    def pin(self, slot: BufferSlot) -> None:
        """Somebody goes inside: it is not given to another block before ``unpin``."""
        slot.pins += 1

    def unpin(self, slot: BufferSlot) -> None:
        assert slot.pins > 0, "a slot was unpinned more often than pinned"
        slot.pins -= 1
        self._free_if_unused(slot)

    def spoil(self, slot: BufferSlot) -> None:
        """Nobody may come upon this block in this slot any more; a new lease on it gets another slot.

        For what failed while somebody is inside who cannot be stopped. Those who hold it must let go.
        """
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
            # Whoever is still inside may leave half a block there: nobody is to find it.
            del self._by_key[slot.key]
        self._free_if_unused(slot)
        return slot

    def _free_if_unused(self, slot: BufferSlot) -> None:
        self._changes += 1
        if not slot.holders and not slot.pins and self._used.get(slot.index) is slot:
            del self._used[slot.index]
            self._free.append(slot.index)
