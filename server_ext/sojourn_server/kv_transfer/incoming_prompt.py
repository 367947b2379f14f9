"""Assembles the KV of one prompt in this engine's buffers. The prompt's prefill runs on a peer.

Blocks come from storage or from the peer, after these messages of the peer:

    Read     the peer asks this engine to read stored blocks for it:
             lease for the whole prompt ── read from storage ── stream layers to the peer ──▶ blocks stay
    Offer    the peer has computed the prompt and offers all its blocks:
             lease, unless Read has one ── Need (the missing blocks) ── Data ──▶ Complete

A prompt may have both messages, or only one of them. ``incoming_prompt_table`` notifies peers and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .staging_buffers import BufferSlot
from .transfer_context import StallDetector
from .transfer_link import LinkItem, TrafficClass
from .transfer_wire import AbortMessage, CompleteMessage, DataMessage, FailedMessage, NeedMessage

if TYPE_CHECKING:
    from .incoming_prompt_table import IncomingPromptTable

PeerAnswer = NeedMessage | CompleteMessage | FailedMessage | AbortMessage
"""Messages to a peer about a prompt."""


class PromptReadState(Enum):
    WAITING = "waiting"
    """The prompt waits for buffers."""
    READING = "reading"
    STREAMING = "streaming"
    DONE = "done"


class PromptState(Enum):
    GATHERING = "gathering"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class PromptReadSide:
    """The blocks of a prompt that this engine reads from storage and streams to the peer."""

    conn: int | None
    keys: list[bytes]
    traffic_class: TrafficClass
    state: PromptReadState = PromptReadState.WAITING
    slots: list[BufferSlot] = field(default_factory=list)
    """Slots of the blocks before the first failed read; empty until the lease is granted."""
    missing: set[int] = field(default_factory=set)
    """Indices of slots that are not complete yet."""
    in_queue: dict[int, list[BufferSlot]] = field(default_factory=dict)
    """Link item number → the pinned slots whose layer the item sends. Holds items that wait or are in
    flight."""


@dataclass(slots=True, eq=False)
class PromptOfferSide:
    """The peer's offer of all blocks of a prompt. The peer then pushes only the blocks that this engine
    neither has nor reads itself."""

    conn: int | None
    keys: list[bytes]
    slots: list[BufferSlot] = field(default_factory=list)
    """Slots of the offered blocks; empty until the lease is granted."""
    pending: set[int] = field(default_factory=set)
    """Indices of slots that are not complete yet."""


class IncomingPrompt:
    """One prompt that a peer sends to this engine. Implements ``LeaseHolder`` for its lease,
    ``SlotFiller`` for its slots, and ``ChunkSender``."""

    def __init__(self, prompts: IncomingPromptTable, transfer: str, now: float) -> None:
        self.transfer = transfer
        self.name = f"prompt {transfer}"
        self.state = PromptState.GATHERING
        self.why = ""
        self.read: PromptReadSide | None = None
        self.offer: PromptOfferSide | None = None
        self.leased = False
        """Whether the prompt has requested a lease on buffers, granted or not."""
        self.expected = False
        """Whether the engine waits for the prompt (``IncomingPromptTable.expect``)."""
        self.claimed = False
        """Whether the engine has taken the complete blocks. They are pinned from then on."""
        self.idle_since_s: float | None = None
        """Time at which the prompt became complete, or its peer disconnected; ``None`` before that."""
        self.moved_s = now
        """Time at which data last arrived, the lease was granted, or this engine made progress for which the
        prompt waits."""
        self.watch = StallDetector(prompts.ctx.limits.patience_s, now)
        self._prompts = prompts

    # -- as a holder ----------------------------------------------------------------

    def granted(self, now: float) -> None:
        self.moved_s = now
        if self.read is not None:
            self._begin_reading(self.read, now)
        if self.offer is not None and self.state is PromptState.GATHERING:
            self._begin_taking(self.offer, now)

    def layers_advanced(self, slot: BufferSlot, before: int, now: float) -> None:
        ctx = self._prompts.ctx
        ctx.buffers.renew(self.name, now)
        self.watch.record_progress(now)
        self.moved_s = now
        if slot.filled < ctx.layers:
            return
        if self.read is not None:
            self.read.missing.discard(slot.index)
            self._check_read(now)
        if self.offer is not None:
            self.offer.pending.discard(slot.index)
            self._check_offer(now)

    def slot_lost(self, slot: BufferSlot, why: str, now: float) -> None:
        if self.state is not PromptState.GATHERING or (slot.filler is not None and not slot.bad):
            return  # the prompt has ended, or another holder reads the block again
        if self.read is not None:
            self._lose_read(self.read, slot, why, now)
        if self._offers(slot):
            assert self.offer is not None
            if slot.bad or self.offer.conn is None:
                self.fail(f"a block did not arrive: {why}", now, notify=True)
            else:
                self._need([self.offer.slots.index(slot)], self.offer, now)
        elif slot.bad:  # otherwise the lease keeps the slot until the block is offered
            self._prompts.ctx.drop(self.name, slot, now)

    def lease_expired(self, now: float) -> bool:
        why = "the lease on its buffers has expired"
        if not self.claimed:
            self._prompts.remember(self, why)
            self.fail(why, now, notify=True)
            if self.state is PromptState.COMPLETE and self.expected:
                self.state, self.why = PromptState.FAILED, why
                self._prompts.notify_engine(self)
            self._prompts.release_buffers(self, now)
        return not self.claimed

    # -- as a filler ----------------------------------------------------------------

    def unwanted(self, slot: BufferSlot, now: float) -> None:
        """Do nothing. A slot becomes unwanted only when the lease ends, and the code that ends the lease
        notifies the peer."""

    # -- the half that reads for a peer ---------------------------------------------

    def _begin_reading(self, read: PromptReadSide, now: float) -> None:
        ctx = self._prompts.ctx
        read.state = PromptReadState.READING
        read.slots = [ctx.buffers.slot(self.name, key) for key in read.keys]
        read.missing = {slot.index for slot in read.slots if slot.filled < ctx.layers}
        for slot in read.slots:
            ctx.read(self.name, slot, read.traffic_class)
        self._check_read(now)

    def _lose_read(self, read: PromptReadSide, slot: BufferSlot, why: str, now: float) -> None:
        if slot not in read.slots:
            return
        place = read.slots.index(slot)
        self._prompts.send(read.conn, FailedMessage(transfer=self.transfer, index=place, reason=why))
        # The peer cannot use blocks after a missing block. Their slots stay, because the peer may offer the
        # blocks once it has computed them.
        given_up, read.slots = read.slots[place + 1 :], read.slots[:place]
        offered = {each.index for each in self.offer.slots} if self.offer is not None else set()
        for each in given_up:
            if list(each.holders) == [self.name] and each.index not in offered:
                self._prompts.ctx.stop_reading(each)
        read.missing.difference_update([slot.index, *(each.index for each in given_up)])
        self._check_read(now)

    def _check_read(self, now: float) -> None:
        ctx, read = self._prompts.ctx, self.read
        if read is None or read.state is not PromptReadState.READING:
            return
        slots = read.slots
        if read.missing:
            return
        if read.conn is None:  # the peer has disconnected
            read.state = PromptReadState.DONE
            return
        read.state = PromptReadState.STREAMING
        ctx.reads.close(self.name)
        for layer in range(ctx.layers):
            blocks = [(index, ctx.memory.layer(slot.index, layer)) for index, slot in enumerate(slots)]
            for item in ctx.queue_layer(
                self.name, self, read.conn, self.transfer, layer, blocks, read.traffic_class
            ):
                sent = read.in_queue[item.number] = [slots[index] for index in item.work.message.indices]
                for slot in sent:
                    ctx.buffers.pin(slot)
        if not read.in_queue:
            read.state = PromptReadState.DONE
        ctx.peer_send.close(self.name)

    def chunk_sent(self, item: LinkItem, now: float) -> None:
        ctx, read = self._prompts.ctx, self.read
        assert read is not None
        for slot in read.in_queue.pop(item.number):
            ctx.buffers.unpin(slot)
        ctx.buffers.renew(self.name, now)
        ctx.counts["bytes_streamed"] += item.nbytes
        if not read.in_queue:
            read.state = PromptReadState.DONE

    # -- the half that is pushed ----------------------------------------------------

    def take_offer(self, offer: PromptOfferSide, now: float) -> None:
        self.offer = offer
        self.moved_s = now
        if self._prompts.ctx.buffers.granted(self.name):
            self._begin_taking(offer, now)

    def data(self, message: DataMessage, payload: memoryview, now: float) -> bool:
        """Copy one received layer of some blocks into their slots. Returns false for a wrong size, a block
        that this engine did not request, or a layer that is not the next of its block."""
        ctx, offer = self._prompts.ctx, self.offer
        size = ctx.memory.layer_bytes
        if offer is None or len(payload) != len(message.indices) * size:
            return False
        for at, index in enumerate(message.indices):
            if not 0 <= index < len(offer.slots):
                return False
            slot = offer.slots[index]
            if slot.filler is not self or slot.filled != message.layer or message.layer >= ctx.layers:
                return False
            ctx.memory.layer(slot.index, message.layer)[:] = payload[at * size : (at + 1) * size]
            if message.layer + 1 == ctx.layers:
                slot.filler = None
            ctx.counts["bytes_taken"] += size
            ctx.advance(slot, message.layer + 1, now)
        return True

    def _begin_taking(self, offer: PromptOfferSide, now: float) -> None:
        ctx = self._prompts.ctx
        if not ctx.buffers.extend(self.name, offer.keys):
            self.fail(f"{len(offer.keys)} blocks were offered; the read reserved fewer", now, notify=True)
            return
        ctx.buffers.release_extra(self.name)
        offer.slots = [ctx.buffers.slot(self.name, key) for key in offer.keys]
        offer.pending = {slot.index for slot in offer.slots if slot.filled < ctx.layers}
        self._need(
            [
                index
                for index, slot in enumerate(offer.slots)
                if slot.filled < ctx.layers and slot.filler is None
            ],
            offer,
            now,
        )
        ctx.counts["blocks_offered"] += len(offer.slots)
        self._check_offer(now)

    def _need(self, indices: list[int], offer: PromptOfferSide, now: float) -> None:
        for index in indices:
            offer.slots[index].filler = self
        self._prompts.ctx.counts["blocks_needed"] += len(indices)
        self._prompts.send(offer.conn, NeedMessage(transfer=self.transfer, indices=indices))

    def _check_offer(self, now: float) -> None:
        offer = self.offer
        if self.state is not PromptState.GATHERING or offer is None or offer.pending:
            return
        self.state = PromptState.COMPLETE
        self.idle_since_s = now
        self._prompts.send(offer.conn, CompleteMessage(transfer=self.transfer))
        self._prompts.notify_engine(self)

    # -- the end --------------------------------------------------------------------

    def fail(self, why: str, now: float, notify: bool) -> None:
        """Mark the prompt as failed for the reason ``why``, and release its buffers. Does nothing if the
        prompt is complete or has failed. ``notify``: whether to send its peers an ``AbortMessage``."""
        if self.state is not PromptState.GATHERING:
            return
        self.state = PromptState.FAILED
        self.why = why
        ctx = self._prompts.ctx
        ctx.counts["prompts_failed"] += 1
        if notify:
            for conn in self.conns():
                self._prompts.send(conn, AbortMessage(transfer=self.transfer, reason=why))
        self.cancel_streaming()
        for slot in list(self.offer.slots) if self.offer is not None else ():
            if slot.filler is self:  # other leases may wait for this slot
                ctx.fail(slot, why, now)
        self._prompts.notify_engine(self)
        self._prompts.release_buffers(self, now)

    def cancel_streaming(self) -> None:
        """Remove from the link the prompt's chunks that have not been sent."""
        ctx, read = self._prompts.ctx, self.read
        if read is None:
            return
        for number in list(read.in_queue):
            if ctx.peer_send.cancel(number):
                for slot in read.in_queue.pop(number):
                    ctx.buffers.unpin(slot)
        if not read.in_queue and read.state is PromptReadState.STREAMING:
            read.state = PromptReadState.DONE

    @property
    def is_abandoned(self) -> bool:
        """Whether the prompt may be evicted. False while the engine waits for it (``expected``), or while
        blocks are read for the peer or streamed to it. Otherwise true in two cases: the prompt is complete,
        or it is incomplete and the peer that asked for the read has disconnected without an offer."""
        if self.expected or (self.read is not None and self.read.state is not PromptReadState.DONE):
            return False
        if self.state is PromptState.COMPLETE:
            return True
        gathering = self.state is PromptState.GATHERING
        return gathering and self.offer is None and self.read is not None and self.read.conn is None

    @property
    def waits_for_room(self) -> bool:
        return self.leased and not self._prompts.ctx.buffers.granted(self.name)

    @property
    def waits_for_local_resources(self) -> bool:
        """Whether the prompt waits for buffers, or for reads or sends of this engine."""
        if self.waits_for_room:
            return True
        return self.read is not None and self.read.state is not PromptReadState.DONE

    def conns(self) -> set[int]:
        """Return the connections of the peers that send or receive blocks of this prompt."""
        halves = [half.conn for half in (self.read, self.offer) if half is not None]
        return {conn for conn in halves if conn is not None}

    def forget_connection(self, conn: int, now: float) -> bool:
        """Handle the end of connection ``conn``. Returns whether the prompt was offered over it."""
        if self.read is not None and self.read.conn == conn:
            self.read.conn = None
            if self.idle_since_s is None:
                self.idle_since_s = now
            self.cancel_streaming()
        offered = self.offer is not None and self.offer.conn == conn
        if self.offer is not None and offered:
            self.offer.conn = None
        return offered

    def _offers(self, slot: BufferSlot) -> bool:
        return self.offer is not None and slot in self.offer.slots
