"""State that the parts of ``TransferCore`` (``PeerTable``, ``LoadTable``, ``PushTable``,
``IncomingPromptTable``) share: links, buffers, memory, and pending actions and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..kv_offload.block_file import KvIdentity
from .staging_buffers import BufferPool, BufferSlot, SlotMemory
from .transfer_actions import ReadBlock, SendMessage, TransferAction, TransferEvent
from .transfer_limits import TransferLimits
from .transfer_link import LinkItem, TrafficClass, TransferLink
from .transfer_wire import DataMessage


class StallDetector:
    """Tells whether a transfer has made no progress for ``patience_s`` seconds."""

    def __init__(self, patience_s: float, now: float) -> None:
        self._patience_s = patience_s
        self._seen_s = now
        self._done: dict[str, int] = {}

    def record_progress(self, now: float) -> None:
        """Record that the transfer made progress."""
        self._seen_s = now

    def record_counter(self, done: int, now: float, by: str = "peer") -> bool:
        """Record the progress counter ``done`` of the source ``by``. If it is higher than ever before for
        this source, this counts as progress, and the result is true."""
        if done <= self._done.get(by, -1):
            return False
        self._done[by] = done
        self._seen_s = now
        return True

    def stalled(self, now: float) -> bool:
        return now - self._seen_s >= self._patience_s


class LeaseHolder(Protocol):
    """A transfer that holds a lease on buffer slots. The methods report changes of the lease and slots."""

    def granted(self, now: float) -> None: ...
    def layers_advanced(self, slot: BufferSlot, before: int, now: float) -> None:
        """Handle new layers of ``slot``, which had ``before`` layers and now has ``slot.filled``."""
        ...

    def slot_lost(self, slot: BufferSlot, why: str, now: float) -> None:
        """Handle a slot whose block will not arrive, for the reason ``why``."""
        ...

    def lease_expired(self, now: float) -> bool:
        """Handle the expiry of the lease. Returns false if its blocks are in use; the caller then renews the
        lease instead of ending it."""
        ...


class SlotFiller(Protocol):
    """A transfer that fills slots with data from a peer."""

    def unwanted(self, slot: BufferSlot, now: float) -> None:
        """Stop filling ``slot``. No lease holds the slot any more, and another block may use it at once."""
        ...


class ChunkSender(Protocol):
    """A transfer that sends chunks of layers to a peer."""

    def payload(self, item: LinkItem) -> Sequence[memoryview]:
        """Return the memory of a chunk, which is sent now."""
        ...

    def chunk_sent(self, item: LinkItem, now: float) -> None:
        """Handle the end of a chunk's link item, sent or not. Its memory is no longer read."""
        ...


class _Chunk(NamedTuple):
    """One layer of some blocks for a peer: the work of one item of the link to peers."""

    sender: ChunkSender
    conn: int
    message: DataMessage


SEND_WIDTH = 4
"""Maximum number of concurrent sends to peers."""


class TransferContext:
    """Links and buffers of one engine, and pending actions and events. The argument ``now`` of the methods is
    in seconds of a monotonic clock."""

    def __init__(self, identity: KvIdentity, limits: TransferLimits) -> None:
        share = limits.kv_share
        self.identity = identity
        self.limits = limits
        self.memory = SlotMemory(limits.slots, identity.block_bytes, identity.layers)
        self.buffers = BufferPool(limits.slots, limits.lease_s)
        self.reads = TransferLink("storage read", width=limits.read_width, kv_share=share)
        self.writes = TransferLink("storage write", kv_share=share)
        self.peer_send = TransferLink(
            "compute network",
            width=SEND_WIDTH,
            kv_share=share,
            peer_width=SEND_WIDTH // 2,
            late_s=limits.patience_s / 4,
        )
        self.links = (self.reads, self.writes, self.peer_send)
        self.actions: list[TransferAction] = []
        self.events: list[TransferEvent] = []
        self.counts: Counter[str] = Counter()
        self._holders: dict[str, LeaseHolder] = {}

    @property
    def layers(self) -> int:
        return self.memory.layers

    @property
    def progress_counter(self) -> int:
        """A counter that grows whenever any transfer of this engine makes progress."""
        return sum(link.moved_bytes for link in self.links) + self.buffers.released

    # -- leases ---------------------------------------------------------------------

    def lease(self, name: str, holder: LeaseHolder, keys: list[bytes], extra: int, now: float) -> None:
        """Request a lease on the blocks ``keys``, and on ``extra`` slots for blocks whose keys are not known
        yet. Calls ``holder.granted`` when the lease is granted, perhaps before this method returns. Raises
        ``LeaseTooLarge``."""
        self.buffers.request_lease(name, keys, extra, now)
        self._holders[name] = holder
        self.grant(now)

    def grant(self, now: float) -> None:
        """Grant waiting leases in order, as long as they fit, and notify their holders."""
        while granted := self.buffers.take_granted(now):
            for name in granted:
                if name in self._holders:  # an earlier ``granted`` call may have ended this lease
                    self._holders[name].granted(now)

    def release(self, name: str, now: float) -> None:
        """End a lease. The next ``grant`` gives its slots to waiting leases."""
        self._holders.pop(name, None)
        for slot in self.buffers.release(name):
            self._unwanted(slot, now)

    def drop(self, name: str, slot: BufferSlot, now: float) -> None:
        """Remove the block of ``slot`` from the lease ``name``."""
        if self.buffers.drop(name, slot.key) is not None:
            self._unwanted(slot, now)

    def expire(self, now: float) -> None:
        """End expired leases. A lease whose holder still uses its blocks is renewed instead."""
        for name in self.buffers.expired(now):
            holder = self._holders.get(name)
            if holder is not None and holder.lease_expired(now):
                self.counts["leases_expired"] += 1
                self.release(name, now)
            else:
                self.buffers.renew(name, now)

    def _unwanted(self, slot: BufferSlot, now: float) -> None:
        filler, slot.filler = slot.filler, None
        if isinstance(filler, LinkItem):
            if self.reads.cancel(filler.number):
                self.counts["reads_cancelled"] += 1
        elif filler is not None:
            filler.unwanted(slot, now)  # type: ignore[attr-defined]

    # -- filling slots --------------------------------------------------------------

    def read(self, request: str, slot: BufferSlot, traffic_class: TrafficClass = TrafficClass.KV) -> None:
        """Queue a read of a slot's block from storage, unless the slot is full or being filled. ``request``:
        name of the transfer; its reads share a place in the link's queue."""
        if slot.filled == self.layers or slot.filler is not None:
            self.counts["blocks_merged"] += 1
            return
        slot.filler = self.reads.put(request, self.memory.block_bytes, slot, traffic_class)

    def stop_reading(self, slot: BufferSlot) -> None:
        """Cancel the queued read of a slot that still has a lease. A read that has begun continues."""
        if isinstance(slot.filler, LinkItem) and self.reads.cancel(slot.filler.number):
            slot.filler = None
            self.counts["reads_cancelled"] += 1

    def start_reads(self, now: float) -> None:
        """Start the queued reads that the storage link allows now."""
        for item in self.reads.take(now):
            slot: BufferSlot = item.work
            self.buffers.pin(slot)
            self.actions.append(ReadBlock(item.number, slot.key, [self.memory.block(slot.index)]))

    def read_done(self, number: int, why: str | None, now: float) -> None:
        """Handle the end of a ``ReadBlock``: update its slot, and notify the slot's holders. ``why``: its
        error; ``None`` for a success."""
        item = self.reads.finish(number, now)
        slot: BufferSlot = item.work
        self.buffers.unpin(slot)
        self.counts["blocks_read" if why is None else "blocks_unread"] += 1
        if slot.filler is not item:
            return  # the block is not needed any more, or the read was given up
        slot.filler = None
        if why is None:
            self.advance(slot, self.layers, now)
        else:
            self.fail(slot, why, now)

    def give_up_stuck_reads(self, now: float) -> None:
        """Treat the blocks of reads that have hung for half of ``patience_s`` as failed. Their slots stay
        pinned until the reader threads return.

        If every reader thread hangs, the blocks of queued reads fail too.
        """
        # Half of ``patience_s``, so that a peer that waits for the block learns of the failure before it
        # gives up itself.
        stuck = self.reads.stuck(now, self.limits.patience_s / 2)
        behind = self.reads.in_queue() if len(stuck) == self.limits.read_width else []
        for item in [*stuck, *behind]:
            slot: BufferSlot = item.work
            if slot.filler is item:  # otherwise it was given up before
                self.reads.cancel(item.number)
                self.counts["stalls"] += 1
                self.fail(slot, "storage has not answered", now)

    def advance(self, slot: BufferSlot, layers: int, now: float) -> None:
        """Record that a slot now has its first ``layers`` layers, and notify its holders."""
        before, slot.filled = slot.filled, layers
        self._tell(slot, lambda holder: holder.layers_advanced(slot, before, now))

    def fail(self, slot: BufferSlot, why: str, now: float) -> None:
        """Record that a slot's block will not arrive, and notify the slot's holders. A holder may start to
        read the block again."""
        slot.filler = None
        if slot.pins or slot.filled:
            self.buffers.invalidate(slot)
        self._tell(slot, lambda holder: holder.slot_lost(slot, why, now))

    def _tell(self, slot: BufferSlot, what: Callable[[LeaseHolder], None]) -> None:
        for name in list(slot.holders):
            holder = self._holders.get(name)
            if holder is not None and name in slot.holders:
                what(holder)

    # -- sending --------------------------------------------------------------------

    def queue_layer(
        self,
        request: str,
        sender: ChunkSender,
        conn: int,
        transfer: str,
        layer: int,
        blocks: Sequence[int],
        traffic_class: TrafficClass = TrafficClass.KV,
    ) -> list[LinkItem]:
        """Queue one layer of some blocks to be sent to a peer, in chunks. ``request``: name of the place in
        the link's queue. ``blocks``: their indices within the transfer. Returns the chunks' items."""
        per = max(1, self.limits.chunk_bytes // self.memory.layer_bytes)
        items = []
        for start in range(0, len(blocks), per):
            part = list(blocks[start : start + per])
            message = DataMessage(transfer=transfer, layer=layer, indices=part, traffic_class=traffic_class)
            chunk, size = _Chunk(sender, conn, message), len(part) * self.memory.layer_bytes
            items.append(self.peer_send.put(request, size, chunk, traffic_class, peer=conn))
        return items

    def start_sends(self, now: float) -> None:
        """Send the queued chunks that the link to peers allows now."""
        for item in self.peer_send.take(now):
            chunk: _Chunk = item.work
            payload = chunk.sender.payload(item)
            self.actions.append(SendMessage(chunk.conn, chunk.message, payload, item.number))

    def sent(self, number: int, now: float) -> None:
        """Handle the end of a ``SendMessage``, sent or not. Its payload is no longer read."""
        item = self.peer_send.finish(number, now)
        chunk: _Chunk = item.work
        chunk.sender.chunk_sent(item, now)
