"""Prompts that peers send to this engine, which has no part in their prefill.

The id of a transfer names its prompt. The prompt's blocks come from storage or from the peer, after these
messages of the peer:

    Read     the peer asks this engine to read stored blocks, which it needs to compute the prompt:
             lease for the whole prompt ── read from storage ── stream layers to the peer ──▶ blocks stay
    Offer    the peer has computed the prompt and offers all its blocks:
             lease, unless Read has one ── Need (the missing blocks) ── Data ──▶ Complete

A prompt may have both messages, or only one of them. The engine calls ``expect`` to wait for a transfer,
before or after its data arrives. When all blocks are present, the engine uses them and then calls ``end``. An
expected transfer without progress fails after ``patience_s``.
"""

from __future__ import annotations

import asyncio
import contextlib

from .peer_connection import PeerConnection, TransferFailed
from .staging_buffers import BufferSlot
from .transfer import LEASE_EXPIRED, Transfer, TransferOutcome
from .transfer_resources import TransferResources
from .transfer_wire import (
    AbortMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    ReadMessage,
    WireMessage,
)

MAX_SILENT_LEASES = 4
"""A prompt fails if no data arrives for this many times ``lease_s``, even if its peer reports progress. This
bounds the time for which a peer can hold buffers."""


def refuse(conn: PeerConnection, message: ReadMessage | OfferMessage, why: str) -> None:
    """Tell a peer that its request is refused for the reason ``why``."""
    if isinstance(message, ReadMessage):
        conn.post(FailedMessage(transfer=message.transfer, index=0, reason=why))
    else:
        conn.post(AbortMessage(transfer=message.transfer, reason=why))


class IncomingPrompt(Transfer):
    """One prompt that a peer sends to this engine."""

    kind = "prompt"
    received_as = "taken"
    why_stalled = "its peer sent no data of it"

    def __init__(self, node: TransferResources, name: str) -> None:
        self.is_expected = False
        """Whether the engine waits for the prompt. Set by ``TransferNode.expect``, in any thread."""
        self.read_conn: PeerConnection | None = None
        self.offer_conn: PeerConnection | None = None
        """Connections of the peer that has asked for a read, and of the peer that has offered the prompt."""
        self.idle_since_s: float | None = None
        """Time at which the prompt became complete, or its peer disconnected; ``None`` before that."""
        self.keys: list[bytes] = []
        """Keys of the offered blocks."""
        self._inbox: asyncio.Queue[ReadMessage | OfferMessage] = asyncio.Queue()
        self._has_read = False
        """Whether a peer has asked for a read."""
        self._moved_s = node.loop.time()
        """Time at which data last arrived or this engine made progress for which the prompt waits."""
        super().__init__(node, name)

    # -- what the engine and peers ask for ----------------------------------------------

    def expected(self) -> None:
        """Fail from now on after ``patience_s`` without progress."""
        if self.outcome is None:
            self.allowed_s = self.node.limits.patience_s
        self.start()
        self.renew()

    @property
    def is_abandoned(self) -> bool:
        """Whether the prompt may be evicted. False while the engine waits for it, or while blocks are read
        for the peer or streamed to it. Otherwise true in two cases: the prompt is complete, or the peer that
        asked for the read has disconnected without an offer."""
        if self.is_expected or any(not child.done() for child in self._children):
            return False
        return self.idle_since_s is not None and (self.outcome is not None or self.offer_conn is None)

    def asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        """Handle a request of a peer, or tell the peer why it is refused."""
        is_offer = isinstance(message, OfferMessage)
        if is_offer and self.outcome is not None and self.outcome.complete and message.keys == self.keys:
            conn.post(CompleteMessage(transfer=self.name))  # another push of the same prompt
        elif self.outcome is not None or self.offer_conn is not None or (self._has_read and not is_offer):
            why = (self.outcome.why if self.outcome else "") or "the transfer is in progress already"
            refuse(conn, message, why)
        else:
            if is_offer:
                self.offer_conn, self.keys = conn, message.keys
            else:
                self.read_conn, self._has_read = conn, True
            self._inbox.put_nowait(message)

    def conns(self) -> set[PeerConnection]:
        return {conn for conn in (self.read_conn, self.offer_conn) if conn is not None}

    def received(self, conn: PeerConnection, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage) and conn is self.offer_conn:
            self._moved_s = self.node.loop.time()
            if not self.take(self.slots, message, payload):
                self.node.counts["out_of_order"] += 1
                self.stop("the peer sent unexpected data")
        elif isinstance(message, AbortMessage):
            self._failed_by_peer(conn, message.reason)

    def on_progress(self, done: int) -> None:
        grows, self.peer_done = done > self.peer_done, max(done, self.peer_done)
        silent_s = self.node.loop.time() - self._moved_s
        if (grows or not self.is_expected) and silent_s < MAX_SILENT_LEASES * self.node.limits.lease_s:
            self.renew()

    def moved_here(self) -> None:
        self._moved_s = self.node.loop.time()
        self.renew()

    def _failed_by_peer(self, conn: PeerConnection, why: str) -> None:
        """Handle the peer's abort: the prompt fails, and that peer is not told."""
        if conn is self.read_conn:
            self.read_conn = None
        if conn is self.offer_conn:
            self.offer_conn = None
        self.stop(why)

    def lost(self, conn: PeerConnection, why: str) -> None:
        """Handle the end of a connection. A prompt that was offered over it fails. Blocks that were read for
        the peer stay for a while, because the peer may reconnect and offer their prompt."""
        if conn is self.offer_conn and self.outcome is None:
            self._failed_by_peer(conn, why)
        elif conn is self.read_conn:
            self.read_conn = None
            self.idle_since_s = self.idle_since_s or self.node.loop.time()
            for child in self._children:
                child.cancel()

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node = self.node
        async with self.patience():
            message = await self._inbox.get()
        if isinstance(message, ReadMessage):
            await self._begin_read(message)
            async with self.patience():
                message = await self._inbox.get()
        assert isinstance(message, OfferMessage)
        await self._take_offer(message)
        self.finish(TransferOutcome(len(self.slots)))
        node.counts["prompts_complete"] += 1
        self.idle_since_s, self.allowed_s = node.loop.time(), node.limits.lease_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with self.patience():
                    await node.loop.create_future()
            if not self.is_expected:
                node.counts["leases_expired"] += 1
                raise TransferFailed(LEASE_EXPIRED)

    def ended(self, why: str) -> None:
        if self.outcome is not None:
            return
        self.node.counts["prompts_failed"] += 1
        for conn in self.conns():
            conn.post(AbortMessage(transfer=self.name, reason=why))
        self.read_conn = self.offer_conn = None
        for slot in self.slots:
            if slot.filler is self:  # other leases may wait for this slot
                self.node.buffers.fail(slot, why)

    async def _begin_read(self, message: ReadMessage) -> None:
        try:
            slots = await self.lease_slots(message.keys, max(0, message.total - len(message.keys)))
        except TransferFailed as error:
            if self.read_conn is not None:
                refuse(self.read_conn, message, str(error))
                self.read_conn = None
            raise
        if self.read_conn is not None:
            self.is_waiting_here = True
            self._children.add(self.node.spawn(self._stream(self.read_conn, slots)))

    async def _stream(self, conn: PeerConnection, slots: list[BufferSlot]) -> None:
        """Read blocks from storage and send them to the peer."""
        try:
            for slot in slots:
                if slot.is_free_to_fill:
                    self.read(slot)
            for place, slot in enumerate(slots):
                if not await self.has(slot, self.node.layers - 1):
                    # The blocks after it stay here, because the peer offers them once it has computed them.
                    conn.post(FailedMessage(transfer=self.name, index=place, reason=slot.why))
                    del slots[place:]
                    break
            async with conn.lane:
                for layer in range(self.node.layers) if slots else ():
                    blocks = [(index, slot.layer(layer)) for index, slot in enumerate(slots)]
                    await self.send_layer(conn, self.name, layer, blocks)
                    self.node.counts["bytes_streamed"] += len(blocks) * self.node.layer_bytes
        finally:
            self.is_waiting_here = False

    async def _take_offer(self, offer: OfferMessage) -> None:
        """Take the offered blocks: ask for those that are missing, and wait for all."""
        if self.lease is None:
            await self.lease_slots(offer.keys)
        elif not self.node.buffers.extend(self.lease, offer.keys):
            raise TransferFailed(f"{len(offer.keys)} blocks were offered; the read reserved fewer")
        assert self.lease is not None
        self.slots = [self.lease.slots[key] for key in offer.keys]
        self.node.counts["blocks_offered"] += len(self.slots)
        self._need([index for index, slot in enumerate(self.slots) if slot.is_free_to_fill])
        async with self.patience():
            for index, slot in enumerate(self.slots):
                while not slot.is_full:
                    if slot.bad:
                        raise TransferFailed(f"a block did not arrive: {slot.why}")
                    if slot.filler is None:
                        self._need([index])
                    await slot.changed()
                    self.renew()
        if self.offer_conn is not None:
            self.offer_conn.post(CompleteMessage(transfer=self.name))

    def _need(self, indices: list[int]) -> None:
        for index in indices:
            self.slots[index].filler = self
        self.node.counts["blocks_needed"] += len(indices)
        if self.offer_conn is not None:
            self.offer_conn.post(NeedMessage(transfer=self.name, indices=indices))
