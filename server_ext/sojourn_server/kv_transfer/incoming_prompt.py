"""Prompts that peers send to this engine, which has no part in their prefill.

The id of a transfer names its prompt. The prompt's blocks come from storage or from the peer, after these
messages of the peer:

    Read     the peer asks this engine to read stored blocks, which it needs to compute the prompt:
             lease for the whole prompt ── read from storage ── stream layers to the peer ──▶ blocks stay
    Offer    the peer has computed the prompt and offers all its blocks:
             lease, unless Read has one ── Need (the missing blocks) ── Data ──▶ Complete

A prompt may have both messages, or only an offer. The engine calls ``expect`` to wait for a transfer, before
or after its data arrives. When all blocks are present, the engine uses them and then calls ``end``.
"""

from __future__ import annotations

import asyncio
import contextlib

from .block_load import UNEXPECTED_DATA
from .peer_connection import PeerConnection, TransferFailed
from .staging_buffers import BufferSlot
from .transfer import LEASE_EXPIRED, STALLED, Transfer, TransferContext, TransferOutcome
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


class IncomingPrompt(Transfer):
    """One prompt that a peer sends to this engine."""

    kind = "prompt"
    received_as = "taken"

    def __init__(self, node: TransferContext, name: str) -> None:
        self.is_expected = False
        """Whether the engine waits for the prompt. Set by ``TransferNode.expect``, in any thread."""
        self.complete_since_s: float | None = None
        self.keys: list[bytes] = []
        """Keys of the blocks, in order."""
        self._inbox: asyncio.Queue[ReadMessage | OfferMessage] = asyncio.Queue()
        self._asked: set[type] = set()
        """Kinds of the messages that the peer has sent, each at most once."""
        self._read: dict[bytes, BufferSlot] = {}
        """Slots of the blocks that are read from storage."""
        super().__init__(node, name)

    # -- what the engine and the peer ask for --------------------------------------------

    def expected(self) -> None:
        """Fail if the peer does not offer the prompt within ``patience_s`` seconds from now."""
        self.start()
        self.node.loop.call_later(self.node.limits.patience_s, self._check_offer)

    @property
    def is_abandoned(self) -> bool:
        """Whether the prompt may be evicted: it is complete, and the engine does not wait for it."""
        return self.complete_since_s is not None and not self.is_expected and not self.is_ending

    def asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        """Handle a request of a peer, or tell the peer why it is refused."""
        if self.is_ending or OfferMessage in self._asked or type(message) in self._asked:
            conn.post(AbortMessage(transfer=self.name, reason="the transfer is in progress already"))
        elif self.conn not in (None, conn):
            conn.post(AbortMessage(transfer=self.name, reason="another engine sends the prompt"))
        else:
            self.conn = conn
            self._asked.add(type(message))
            self._inbox.put_nowait(message)
            self.start()

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage):
            if not self.take(message, payload):
                self.node.counts["out_of_order"] += 1
                self.stop(UNEXPECTED_DATA)
        elif isinstance(message, AbortMessage):
            self.lost(message.reason)
        elif isinstance(message, FailedMessage) and OfferMessage not in self._asked:
            self.lost(message.reason)  # the peer needs no read any more

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node = self.node
        while True:
            async with asyncio.timeout(node.limits.lease_s):
                message = await self._inbox.get()
            if isinstance(message, OfferMessage):
                break
            await self._stream(message)
        await self._take_offer(message)
        self.conn = None
        self.finish(TransferOutcome(len(self.slots)))
        node.counts["prompts_complete"] += 1
        self.complete_since_s = node.loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(node.limits.lease_s):
                    await node.loop.create_future()
            if not self.is_expected:
                node.counts["leases_expired"] += 1
                raise TransferFailed(LEASE_EXPIRED)

    def ended(self, why: str) -> None:
        self.node.counts["prompts_failed"] += self.outcome is None
        if self.conn is not None:
            self.conn.post(AbortMessage(transfer=self.name, reason=why))

    def _check_offer(self) -> None:
        if OfferMessage not in self._asked and not self.is_ending:
            self.node.counts["stalls"] += 1
            self.stop(STALLED)

    async def _stream(self, message: ReadMessage) -> None:
        """Read blocks from storage and send them to the peer."""
        conn = self.conn
        assert conn is not None
        total = max(message.total, len(message.keys))
        self.slots = await self.lease_slots(total, self.node.limits.patience_s)
        self._read = dict(zip(message.keys, self.slots, strict=False))
        for key, slot in self._read.items():
            self.node.reads.put(slot, key, self.was_read)
        good = []
        for place, slot in enumerate(self._read.values()):
            while not slot.is_full and not slot.why:
                await self.news()
            if slot.why:
                conn.post(FailedMessage(transfer=self.name, index=place, reason=slot.why))
                break  # the blocks after it stay here, because the peer offers them once it has computed them
            good.append(slot)
        async with conn.lane:
            for layer in range(self.node.layers) if good else ():
                blocks = [(index, slot.layer(layer)) for index, slot in enumerate(good)]
                await self.send_layer(conn, self.name, layer, blocks)
                self.node.counts["bytes_streamed"] += len(blocks) * self.node.layer_bytes

    async def _take_offer(self, offer: OfferMessage) -> None:
        """Take the offered blocks: ask for those that are missing, and wait for all."""
        conn, self.keys = self.conn, offer.keys
        assert conn is not None
        free = self.slots[len(self._read) :]
        new = [key for key in self.keys if key not in self._read]
        if not self.slots:
            free = await self.lease_slots(len(new), self.node.limits.patience_s)
        if len(new) > len(free):
            raise TransferFailed(f"{len(self.keys)} blocks were offered; the read reserved fewer")
        slots = {**self._read, **dict(zip(new, free, strict=False))}
        self.slots = [slots[key] for key in self.keys]
        self.node.counts["blocks_offered"] += len(self.slots)
        self._need(conn, [index for index, key in enumerate(self.keys) if key not in self._read])
        for index, slot in enumerate(self.slots):
            while not slot.is_full:
                if slot.why and index not in self.awaited:  # its read has failed
                    if slot.is_written:
                        raise TransferFailed(f"a block did not arrive: {slot.why}")
                    self._need(conn, [index])
                await self.news()
        conn.post(CompleteMessage(transfer=self.name))

    def _need(self, conn: PeerConnection, indices: list[int]) -> None:
        self.awaited |= {index: self.slots[index] for index in indices}
        self.node.counts["blocks_needed"] += len(indices)
        conn.post(NeedMessage(transfer=self.name, indices=indices))
