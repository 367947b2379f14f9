"""What the parts of the core share: links, buffers, memory, and what goes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..kv_offload.block_file import KvIdentity
from .buffer_pool import BufferPool, BufferSlot, SlotMemory
from .transfer_actions import ReadBlock, TransferAction, TransferEvent
from .transfer_limits import LinkRates, TransferLimits
from .transfer_link import LinkItem, TrafficClass, TransferLink


class StallDetector:
    """Whether something still goes on: it has stalled once nothing was seen of it for ``patience_s``."""

    def __init__(self, patience_s: float, now: float) -> None:
        self._patience_s = patience_s
        self._seen_s = now
        self._done: dict[str, int] = {}

    def seen(self, now: float) -> None:
        """There was progress."""
        self._seen_s = now

    def told(self, done: int, now: float, by: str = "peer") -> bool:
        """Somebody says how much has been done there so far: whether that is progress, more than before."""
        if done <= self._done.get(by, -1):
            return False
        self._done[by] = done
        self._seen_s = now
        return True

    def stalled(self, now: float) -> bool:
        return now - self._seen_s >= self._patience_s


class LeaseHolder(Protocol):
    """Who has a lease, and is told what becomes of its slots."""

    def granted(self, now: float) -> None: ...
    def layers_advanced(self, slot: BufferSlot, before: int, now: float) -> None:
        """A slot has more layers than ``before``."""
        ...

    def lost(self, slot: BufferSlot, why: str, now: float) -> None:
        """Nobody brings a slot's block any more."""
        ...

    def lease_expired(self, now: float) -> bool:
        """The lease's time is up, and it ends; False: its blocks are being taken at this moment."""
        ...


class SlotFiller(Protocol):
    """Who brings blocks into slots from somewhere else than storage."""

    def unwanted(self, slot: BufferSlot, now: float) -> None:
        """Nobody holds the slot any more: it may be another block's the next moment."""
        ...


class _StorageFiller(NamedTuple):
    item: int


class _SlotRead(NamedTuple):
    """The work of an item of the storage link."""

    slot: BufferSlot


class TransferContext:
    """One engine's links and buffers. ``now`` is in seconds, monotonic."""

    def __init__(
        self, identity: KvIdentity, limits: TransferLimits, rates: LinkRates, send_width: int = 4
    ) -> None:
        share = limits.kv_share
        self.identity = identity
        self.limits = limits
        self.memory = SlotMemory(limits.slots, identity.block_bytes, identity.layers)
        self.buffers = BufferPool(limits.slots, limits.lease_s)
        self.reads = TransferLink("storage read", rates.storage_read, width=limits.read_width, kv_share=share)
        self.writes = TransferLink("storage write", rates.storage_write, kv_share=share)
        self.compute = TransferLink(
            "compute network",
            rates.compute,
            width=send_width,
            kv_share=share,
            sends=True,
            peer_width=max(1, send_width // 2),
            late_s=limits.patience_s / 4,
        )
        self.actions: list[TransferAction] = []
        self.events: list[TransferEvent] = []
        self.counts: Counter[str] = Counter()
        self._holders: dict[str, LeaseHolder] = {}
        self._failed_reads: dict[int, str] = {}

    @property
    def layers(self) -> int:
        return self.memory.layers

    def done(self, now: float) -> int:
        """A number that grows whenever anything goes on here."""
        moved = sum(link.moved(now) for link in (self.reads, self.writes, self.compute))
        return moved + self.buffers.released

    # -- leases ---------------------------------------------------------------------

    def lease(self, name: str, holder: LeaseHolder, keys: list[bytes], extra: int, now: float) -> None:
        """Ask for a lease; ``holder.granted`` is called when it is there, perhaps before this returns.

        Raises ``LeaseTooLarge``.
        """
        self.buffers.ask(name, keys, extra, now)
        self._holders[name] = holder
        self.grant(now)

    def grant(self, now: float) -> None:
        """Give out what leases can be had."""
        while granted := self.buffers.take_granted(now):
            for name in granted:
                if name in self._holders:  # what was granted before it may have ended it
                    self._holders[name].granted(now)

    def release(self, name: str, now: float) -> None:
        """End a lease. Who waits for room gets it at the next ``grant``."""
        self._holders.pop(name, None)
        for slot in self.buffers.release(name):
            self._unwanted(slot, now)

    def drop(self, name: str, slot: BufferSlot, now: float) -> None:
        """Give up one block of a lease."""
        if self.buffers.drop(name, slot.key) is not None:
            self._unwanted(slot, now)

    def expire(self, now: float) -> None:
        """End the leases whose time is up."""
        for name in self.buffers.expired(now):
            holder = self._holders.get(name)
            if holder is not None and holder.lease_expired(now):
                self.counts["leases_expired"] += 1
                self.release(name, now)
            else:
                self.buffers.renew(name, now)

    def _unwanted(self, slot: BufferSlot, now: float) -> None:
        filler, slot.filler = slot.filler, None
        if isinstance(filler, _StorageFiller):
            if self.reads.cancel(filler.item):
                self.counts["reads_cancelled"] += 1
        elif filler is not None:
            filler.unwanted(slot, now)  # type: ignore[attr-defined]

    # -- filling slots --------------------------------------------------------------

    def read(self, request: str, slot: BufferSlot, now: float, traffic_class: TrafficClass) -> bool:
        """Have a slot filled from storage, unless it is or somebody does; whether it was needed."""
        if slot.filled == self.layers or slot.filler is not None:
            self.counts["blocks_merged"] += 1
            return False
        number = self.reads.put(request, self.memory.block_bytes, _SlotRead(slot), now, traffic_class)
        slot.filler = _StorageFiller(number)
        return True

    def stop_reading(self, slot: BufferSlot) -> None:
        """Nobody needs a slot filled for now, though it is held; what has begun comes all the same."""
        if isinstance(slot.filler, _StorageFiller) and self.reads.cancel(slot.filler.item):
            slot.filler = None
            self.counts["reads_cancelled"] += 1

    def start_reads(self, now: float) -> None:
        """Begin reads that may begin."""
        for item in self.reads.take(now):
            slot = item.work.slot
            self.buffers.pin(slot)
            self.actions.append(ReadBlock(item.number, slot.key, [self.memory.block(slot.index)]))

    def read_done(self, number: int, why: str | None, now: float) -> None:
        """A read has come back, well or because of ``why`` not."""
        if why is not None:
            self._failed_reads[number] = why
        self.reads.over(number, now)

    def complete_reads(self, now: float) -> None:
        """Take in the reads that are through."""
        for item in self.reads.finished(now):
            slot, why = item.work.slot, self._failed_reads.pop(item.number, None)
            self.buffers.unpin(slot)
            self.counts["blocks_read" if why is None else "blocks_unread"] += 1
            if not self._is_filled_by(slot, item):
                continue  # nobody wants it any more, or it was given up before it came back
            slot.filler = None
            if why is None:
                self.advance(slot, self.layers, now)
            else:
                self.fail(slot, why, now)

    def give_up_stuck_reads(self, now: float) -> None:
        """Fail the slots of reads that do not come back; their threads have the slots until they do.

        Where no thread is left that could come to them, those of reads in line behind too.
        """
        # Sooner than a peer that waits for it loses patience: it is told which blocks are good.
        stuck = self.reads.stuck(now, self.limits.patience_s / 2)
        behind = self.reads.in_queue() if len(stuck) == self.limits.read_width else []
        for item in [*stuck, *behind]:
            slot = item.work.slot
            if self._is_filled_by(slot, item):  # else it was given up already
                self.reads.cancel(item.number)
                self.counts["stalls"] += 1
                self.fail(slot, "storage has not answered", now)

    def advance(self, slot: BufferSlot, layers: int, now: float) -> None:
        """A slot has so many layers now."""
        before, slot.filled = slot.filled, layers
        self._tell(slot, lambda holder: holder.layers_advanced(slot, before, now))

    def fail(self, slot: BufferSlot, why: str, now: float) -> None:
        """Nobody brings a slot's block any more; one who holds it may see to it himself."""
        slot.filler = None
        if slot.pins or slot.filled:
            self.buffers.spoil(slot)
        self._tell(slot, lambda holder: holder.lost(slot, why, now))

    def _tell(self, slot: BufferSlot, what: Callable[[LeaseHolder], None]) -> None:
        for name in list(slot.holders):
            holder = self._holders.get(name)
            if holder is not None and name in slot.holders:
                what(holder)

    @staticmethod
    def _is_filled_by(slot: BufferSlot, item: LinkItem) -> bool:
        return isinstance(slot.filler, _StorageFiller) and slot.filler.item == item.number
