"""Prompts that peers send to this engine, which has no part in their prefill.

The id of a transfer names its prompt. The prompt's blocks come from storage or from the peer, after these
messages of the peer:

    Read     the peer asks this engine to read stored blocks, which it needs to compute the prompt:
             lease for the whole prompt ── read from storage ── stream layers to the peer ──▶ blocks stay
    Offer    the peer has computed the prompt and offers all its blocks:
             lease, unless Read has one ── Need (the missing blocks) ── Data ──▶ Complete

A prompt may have both messages, or only one of them.

The engine calls ``expect`` to wait for a transfer, before or after its data arrives. When all blocks are
present, the engine uses them and then calls ``forget``. An expected transfer without progress fails after
``patience_s``. While a request is queued, the engine repeats ``want``, which keeps the complete prompt in the
buffers.

Prompts are evicted only while other transfers wait for buffers. First, the prompts that no queued request
wants are evicted. Then prompts of queued requests are evicted, from the end of the queue, until the rest fits
``queue_share`` of the slots. The prompt of the first queued request is always kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from .staging_buffers import BufferSlot, LeaseTooLarge
from .transfer_actions import GIVEN_UP, PromptTransferEnded, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_link import LinkItem, TrafficClass
from .transfer_wire import (
    AbortMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    ReadMessage,
)

MAX_REMEMBERED_EVICTIONS = 4096
"""Maximum number of evicted or failed transfers whose reason is remembered; the oldest are forgotten."""
EVICTED_UNCLAIMED = "evicted before any request asked for it: other transfers waited for its buffers"
EVICTED_LOW_PRIORITY = "its request was among the last in the queue, and others waited for its buffers"
BAD_KEYS = "no blocks, or a duplicate block"
MAX_SILENT_LEASES = 4
"""A prompt that has buffers fails if no data arrives for this many times ``lease_s``, even if its peer
reports progress. This bounds the time for which a peer can hold buffers."""


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
        offer = self.offer
        if offer is not None and slot in offer.slots:
            if slot.bad or offer.conn is None:
                self.fail(f"a block did not arrive: {why}", now, notify=True)
            else:
                self._need([offer.slots.index(slot)], offer, now)
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
        if read is None or read.state is not PromptReadState.READING or read.missing:
            return
        slots = read.slots
        if read.conn is None:  # the peer has disconnected
            read.state = PromptReadState.DONE
            return
        read.state = PromptReadState.STREAMING
        ctx.reads.close(self.name)
        for layer in range(ctx.layers):
            blocks, kind = range(len(slots)), read.traffic_class
            for item in ctx.queue_layer(self.name, self, read.conn, self.transfer, layer, blocks, kind):
                sent = read.in_queue[item.number] = [slots[index] for index in item.work.message.indices]
                for slot in sent:
                    ctx.buffers.pin(slot)
        if not read.in_queue:
            read.state = PromptReadState.DONE
        ctx.peer_send.close(self.name)

    def payload(self, item: LinkItem) -> list[memoryview]:
        ctx, read = self._prompts.ctx, self.read
        assert read is not None
        layer = item.work.message.layer
        return [ctx.memory.layer(slot.index, layer) for slot in read.in_queue[item.number]]

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


class IncomingPromptTable:
    """All prompts that peers send to one engine."""

    def __init__(self, ctx: TransferContext, epoch: str) -> None:
        """``epoch``: the present run of this engine's process."""
        self.ctx = ctx
        self._epoch = epoch
        self._prompts: dict[str, IncomingPrompt] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Evicted or failed transfer that the engine had not asked for → reason."""
        self._wanted: dict[str, float] = {}
        """Transfer that a queued request will ``expect`` → time until which it is kept. In queue order."""

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def wanted(self) -> int:
        """Number of transfers that queued requests want."""
        return len(self._wanted)

    # -- what the engine asks for ---------------------------------------------------

    def expect(self, transfer: str, now: float, *, epoch: str | None = None) -> bool:
        """Announce that the engine waits for a transfer (``TransferManager.expect``). The event
        ``PromptTransferEnded`` reports the end of the transfer, at once if it has ended already. After that,
        call ``blocks`` if the prompt is complete, and ``forget`` in any case. Returns false, and there is no
        event, if ``epoch`` is an earlier run."""
        if self._is_stale(epoch):
            return False
        prompt = self._prompts.get(transfer)
        if prompt is None:
            prompt = self._prompts[transfer] = IncomingPrompt(self, transfer, now)
        if prompt.expected:
            raise ValueError(f"transfer {transfer!r} is expected already")
        prompt.expected = True
        prompt.watch.record_progress(now)
        self._wanted.pop(transfer, None)
        if transfer in self._gone:  # report the failure at once
            prompt.state, prompt.why = PromptState.FAILED, self._gone.pop(transfer)
        self.ctx.buffers.renew(prompt.name, now)
        if prompt.state is not PromptState.GATHERING:
            self._event(prompt)
        return True

    def want(self, transfers: Sequence[str], now: float) -> None:
        """Keep the complete prompts of these transfers for queued requests (``TransferManager.want``)."""
        for transfer in transfers:
            prompt = self._prompts.get(transfer)
            if prompt is not None and prompt.expected:
                continue
            self._wanted.pop(transfer, None)  # the order of the latest call counts
            self._wanted[transfer] = now + self.ctx.limits.lease_s
            if prompt is not None and prompt.state is PromptState.COMPLETE:
                self.ctx.buffers.renew(prompt.name, now)

    def blocks(self, transfer: str) -> list[memoryview]:
        """Return the blocks of a complete prompt, in the order of its offer. Their slots stay pinned until
        ``forget``. Raises ``ValueError`` if the prompt is not complete."""
        prompt = self._prompts.get(transfer)
        if prompt is None or prompt.state is not PromptState.COMPLETE or prompt.offer is None:
            raise ValueError(f"transfer {transfer!r} is not complete, or unknown")
        if not prompt.claimed:
            prompt.claimed = True
            for slot in prompt.offer.slots:
                self.ctx.buffers.pin(slot)
        return [self.ctx.memory.block(slot.index) for slot in prompt.offer.slots]

    def forget(self, transfer: str, now: float) -> None:
        """Remove a prompt that was used or is not needed, and release its buffers. Ignores unknown transfers.
        If the prompt is not complete, its peers are told."""
        self._wanted.pop(transfer, None)
        prompt = self._prompts.get(transfer)
        if prompt is None:
            return
        prompt.expected = False  # the engine needs no event about it
        prompt.fail(GIVEN_UP, now, notify=True)
        if prompt.claimed and prompt.offer is not None:
            for slot in prompt.offer.slots:
                self.ctx.buffers.unpin(slot)
        self.release_buffers(prompt, now)

    def discard(self, transfer: str, now: float, *, epoch: str | None = None) -> bool:
        """Remove a prompt that no request asks for (``TransferManager.discard``). If the engine expects it,
        keep it and return false."""
        if self._is_stale(epoch):
            return True
        prompt = self._prompts.get(transfer)
        if prompt is not None and prompt.expected:
            return False
        self._gone.pop(transfer, None)
        self.forget(transfer, now)
        return True

    def _is_stale(self, epoch: str | None) -> bool:
        """Return whether ``epoch`` names another run of this engine's process, and count it if so."""
        stale = epoch is not None and epoch != self._epoch
        self.ctx.counts["stale"] += stale
        return stale

    def end_all(self, why: str, now: float) -> None:
        for prompt in list(self._prompts.values()):
            prompt.fail(why, now, notify=True)
            if not prompt.claimed:
                self.forget(prompt.transfer, now)
        self._wanted.clear()

    # -- what peers ask for ---------------------------------------------------------

    def read(self, conn: int, message: ReadMessage, now: float) -> None:
        prompt, keys = self._prompts.get(message.transfer), message.keys
        why: str | None
        if prompt is not None and (
            prompt.read is not None or prompt.offer is not None or prompt.state is not PromptState.GATHERING
        ):
            why = "the transfer is in progress already"
        elif not keys or len(set(keys)) != len(keys):
            why = BAD_KEYS
        else:
            why = self._refusal(conn, message.transfer, len(keys))
        if why is not None:
            self.send(conn, FailedMessage(transfer=message.transfer, index=0, reason=why))
            return
        self._gone.pop(message.transfer, None)
        prompt = prompt or IncomingPrompt(self, message.transfer, now)
        prompt.read = PromptReadSide(conn, keys, message.traffic_class)
        self._prompts[message.transfer] = prompt
        self.ctx.counts["prompts"] += 1
        self._lease(prompt, keys, max(0, message.total - len(keys)), now)

    def offer(self, conn: int, message: OfferMessage, now: float) -> None:
        prompt, keys = self._prompts.get(message.transfer), message.keys
        why = refused = None
        if prompt is not None and prompt.offer is not None:
            if prompt.state is PromptState.COMPLETE and prompt.offer.keys == keys:
                # The peer has reconnected and offers it again.
                self.send(conn, CompleteMessage(transfer=message.transfer))
                return
            why = "it was offered already"
        elif not keys or len(set(keys)) != len(keys):
            why = BAD_KEYS
        elif prompt is not None and prompt.state is not PromptState.GATHERING:
            why = prompt.why
        else:
            why = refused = self._refusal(conn, message.transfer, len(keys))
        if why is not None:
            self.send(conn, AbortMessage(transfer=message.transfer, reason=why))
            if refused is not None and prompt is not None and prompt.conns() <= {conn}:
                prompt.fail(refused, now, notify=False)
            return
        half = PromptOfferSide(conn, keys)
        if prompt is not None and prompt.leased:
            prompt.watch.record_progress(now)
            prompt.take_offer(half, now)
            return
        if prompt is None:
            self._gone.pop(message.transfer, None)
            prompt = self._prompts[message.transfer] = IncomingPrompt(self, message.transfer, now)
            self.ctx.counts["prompts"] += 1
        prompt.offer = half
        prompt.watch.record_progress(now)
        self._lease(prompt, keys, 0, now)

    def data(self, conn: int, message: DataMessage, payload: memoryview, now: float) -> bool:
        """Copy data from a peer into the buffers. Returns false if the data belong to no prompt of this
        table. Unexpected data make their prompt fail."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or prompt.offer is None or prompt.offer.conn != conn:
            return False
        if prompt.state is PromptState.GATHERING and not prompt.data(message, payload, now):
            self.ctx.counts["out_of_order"] += 1
            prompt.fail("the peer sent unexpected data", now, notify=True)
        return True

    def aborted(self, conn: int, message: AbortMessage, now: float) -> None:
        """Handle a peer's abort of a transfer: its prompt fails."""
        prompt = self._prompts.get(message.transfer)
        if prompt is None or conn not in prompt.conns():
            return
        prompt.fail(message.reason, now, notify=False)

    def on_progress(self, conn: int, transfer: str, done: int, now: float) -> None:
        """Handle a peer's progress report: renew the prompt's lease. While the prompt waits for buffers, the
        lease is renewed only if the peer's counter ``done`` has grown. ``MAX_SILENT_LEASES`` limits how long
        reports keep a prompt that gets no data."""
        prompt = self._prompts.get(transfer)
        if prompt is None or conn not in prompt.conns() or prompt.claimed:
            return
        if prompt.watch.record_counter(done, now) or not prompt.waits_for_room:
            self.ctx.buffers.renew(prompt.name, now)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Return the ids of open transfers in which the peer of connection ``conn`` waits for this engine."""
        return [
            transfer
            for transfer, prompt in self._prompts.items()
            if prompt.state is PromptState.GATHERING
            and (
                (prompt.offer is not None and prompt.offer.conn == conn)
                or (
                    prompt.read is not None
                    and prompt.read.conn == conn
                    and prompt.read.state is not PromptReadState.DONE
                )
            )
        ]

    def conns(self) -> set[int]:
        return {conn for prompt in self._prompts.values() for conn in prompt.conns()}

    def connection_lost(self, conn: int, why: str, now: float) -> None:
        """Handle the end of a connection. Prompts that were offered over it fail. Blocks that were read for
        the peer stay for a while, because the peer may reconnect and offer their prompt."""
        for prompt in list(self._prompts.values()):
            if prompt.forget_connection(conn, now):
                prompt.fail(why, now, notify=False)

    def tick(self, now: float) -> None:
        done = self.ctx.progress_counter
        silent_s = MAX_SILENT_LEASES * self.ctx.limits.lease_s
        for transfer in [each for each, until_s in self._wanted.items() if until_s <= now]:
            del self._wanted[transfer]
        for prompt in list(self._prompts.values()):
            if prompt.state is not PromptState.GATHERING:
                continue
            if prompt.waits_for_local_resources and prompt.watch.record_counter(done, now, by="here"):
                self.ctx.buffers.renew(prompt.name, now)
                prompt.moved_s = now
            if prompt.leased and not prompt.waits_for_room and now - prompt.moved_s >= silent_s:
                self.ctx.counts["stalls"] += 1
                self.remember(prompt, "its peer sent no data of it")
                prompt.fail("its peer sent no data of it", now, notify=True)
                continue
            if prompt.expected and prompt.watch.stalled(now):
                self.ctx.counts["stalls"] += 1
                prompt.fail("it makes no progress", now, notify=True)
        self._make_room(now)

    # -- inside ---------------------------------------------------------------------

    def _make_room(self, now: float) -> None:
        """Evict idle prompts while other transfers wait for buffers, longest idle first.

        A prompt is kept for half of ``patience_s`` after it became idle, because its request may still be on
        the way. Keeping it longer would let the waiting transfers time out.
        """
        ctx = self.ctx
        if not ctx.buffers.waiting:
            return
        least_s = ctx.limits.patience_s / 2
        left = [
            (prompt.idle_since_s, prompt)
            for prompt in self._prompts.values()
            if prompt.is_abandoned
            and prompt.idle_since_s is not None
            and now - prompt.idle_since_s >= least_s
        ]
        unwanted = [each for each in left if not self._is_wanted(each[1])]
        for _, prompt in sorted(unwanted, key=lambda each: each[0]):
            self._evict(prompt, EVICTED_UNCLAIMED, now)
            if not ctx.buffers.waiting:
                return
        if len(unwanted) < len(left):
            for prompt in self._beyond_share({prompt.transfer for _, prompt in left}):
                self._evict(prompt, EVICTED_LOW_PRIORITY, now)
                if not ctx.buffers.waiting:
                    return

    def _is_wanted(self, prompt: IncomingPrompt) -> bool:
        """Return whether the prompt is complete and a queued request wants it."""
        return prompt.transfer in self._wanted and prompt.state is PromptState.COMPLETE

    def _beyond_share(self, rest: set[str]) -> list[IncomingPrompt]:
        """Return the prompts of queued requests that must be evicted so that the rest fits ``queue_share`` of
        the slots, in reverse queue order. ``rest``: transfers to consider. The first of these transfers in
        the queue is needed next, so its prompt is never returned."""
        most = self.ctx.limits.queue_share * self.ctx.limits.slots
        slots: set[int] = set()
        found: list[IncomingPrompt] = []
        for transfer in self._wanted:
            prompt = self._prompts.get(transfer)
            if prompt is None or prompt.offer is None or not self._is_wanted(prompt) or transfer not in rest:
                continue
            is_first = not slots
            slots.update(slot.index for slot in prompt.offer.slots)
            if len(slots) > most and not is_first:
                found.append(prompt)
        return found[::-1]

    def _evict(self, prompt: IncomingPrompt, why: str, now: float) -> None:
        self.ctx.counts["prompts_evicted"] += 1
        self.remember(prompt, why)
        prompt.fail(why, now, notify=True)
        self.release_buffers(prompt, now)
        self.ctx.grant(now)

    def remember(self, prompt: IncomingPrompt, why: str) -> None:
        """Record why a prompt was removed, so that a later ``expect`` of it fails at once. Does nothing if
        the engine already expects the prompt."""
        if prompt.expected:
            return
        self._gone[prompt.transfer] = why
        if len(self._gone) > MAX_REMEMBERED_EVICTIONS:
            self._gone.popitem(last=False)

    def _refusal(self, conn: int, transfer: str, keys: int) -> str | None:
        """Return why a prompt of ``keys`` blocks is refused; ``None`` if it is accepted."""
        prompts, limits = self._prompts.values(), self.ctx.limits
        halves = [(each.transfer, half) for each in prompts for half in (each.read, each.offer) if half]
        own = [(name, half) for name, half in halves if half.conn == conn]
        for who, share, found in (("a peer", 2, own), ("peers", 1, halves)):
            most, most_keys = -(-limits.max_prompts // share), limits.max_keys // share
            others, held = {name for name, _ in found} - {transfer}, sum(len(half.keys) for _, half in found)
            if len(others) >= most or held + keys > most_keys:
                self.ctx.counts["contexts_refused"] += 1
                return f"{who} may have {most} contexts of {most_keys} keys here at a time"
        return None

    def release_buffers(self, prompt: IncomingPrompt, now: float) -> None:
        """Release the prompt's buffers. A prompt that the engine expects stays known until ``forget``."""
        self.ctx.release(prompt.name, now)
        self.ctx.reads.close(prompt.name)
        if not prompt.expected:
            self._prompts.pop(prompt.transfer, None)

    def send(self, conn: int | None, message: PeerAnswer) -> None:
        if conn is not None:
            self.ctx.actions.append(SendMessage(conn, message))

    def notify_engine(self, prompt: IncomingPrompt) -> None:
        """Report the prompt's outcome to the engine, if the engine waits for the prompt."""
        if prompt.state is PromptState.COMPLETE:
            self.ctx.counts["prompts_complete"] += 1
        if prompt.expected:
            self._event(prompt)

    def _event(self, prompt: IncomingPrompt) -> None:
        complete = prompt.state is PromptState.COMPLETE
        self.ctx.events.append(PromptTransferEnded(prompt.transfer, complete, prompt.why))

    def _lease(self, prompt: IncomingPrompt, keys: Sequence[bytes], extra: int, now: float) -> None:
        prompt.leased = True
        try:
            self.ctx.lease(prompt.name, prompt, list(keys), extra, now)
        except LeaseTooLarge as error:
            self.ctx.counts["too_large"] += 1
            prompt.leased = False
            read, prompt.read = prompt.read, None
            if read is not None:
                self.send(read.conn, FailedMessage(transfer=prompt.transfer, index=0, reason=str(error)))
                if prompt.offer is None and not prompt.expected:
                    del self._prompts[prompt.transfer]
                return
            prompt.fail(str(error), now, notify=True)
