"""The three transfers of an engine: a load, a push, and a prompt that a peer sends.

A load returns the *leading* blocks that arrived, because blocks after a missing block are useless. If the
peer fails before every block has its first layer, this engine reads the missing blocks itself, into the
buffers that the load already has. If the peer fails later, missing blocks stay missing, because a step may
already wait for layers.

A push offers a prompt's keys to the peer that decodes the request, and sends the blocks that the peer lacks.
Layers are sent in the order of computation. The engine may ``give`` layers before the peer has answered.

The id of a transfer names the prompt that a peer sends. The peer may first ask this engine to read stored
blocks (``ReadMessage``), which stay here, and then offers the whole prompt (``OfferMessage``). The engine
calls ``expect`` to wait for a transfer, before or after its data arrives. When all blocks are present, the
engine uses them and then calls ``end``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from .peer_connection import PeerConnection, TransferFailed
from .staging_buffers import BufferSlot
from .transfer import GIVEN_UP, LEASE_EXPIRED, STALLED, Transfer, TransferContext, TransferOutcome
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

UNEXPECTED_DATA = "the peer sent unexpected data"
COMPUTE_LEASES = 4
"""A live peer may compute for so many times ``lease_s`` between its read and its offer of a prompt."""


class ReadingPeer(NamedTuple):
    """A peer that reads blocks from storage for this engine."""

    address: str
    total: int
    """Number of blocks of the whole prompt, for which the peer reserves buffers."""


class BlockLoad(Transfer):
    """A load of the leading blocks that the store has into this engine's buffers."""

    kind = "load"
    received_as = "fetched"

    def __init__(
        self, node: TransferContext, name: str, keys: Sequence[bytes], peer: ReadingPeer | None
    ) -> None:
        self.keys = list(keys)
        self.peer = peer
        self.layers_loaded = 0
        """Number of leading layers that have arrived for all blocks that the load still expects."""
        super().__init__(node, name)

    # -- for the engine's threads -----------------------------------------------------

    def ready(self, layerwise: bool) -> int | None:
        with self.node.changed:
            if self.outcome is None and layerwise and self.layers_loaded:
                return len(self.slots)
        return super().ready(layerwise)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> list[memoryview]:
        """Wait for a layer or the end of the load, at most ``timeout_s`` seconds (``None``: without limit).
        Returns the layer of each block of the load; empty if it has not arrived."""
        with self.node.changed:
            self.node.changed.wait_for(
                lambda: self.layers_loaded > layer or self.outcome is not None, timeout_s
            )
            return [slot.layer(layer) for slot in self.slots] if self.layers_loaded > layer else []

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node, why = self.node, ""
        self.keys = self.keys[: node.limits.slots]
        self.keys = self.keys[: await node.storage.look_up(self.keys)]
        if not self.keys:
            self.finish(TransferOutcome(0))
            return
        self.slots = await self.lease_slots(len(self.keys), node.limits.lease_s)
        if self.peer is not None:
            await self._fetch_from(self.peer)
        else:
            for slot, key in zip(self.slots, self.keys, strict=True):
                node.reads.put(slot, key, self.was_read)
        for layer in range(node.layers):
            place = 0
            while place < len(self.slots):
                slot = self.slots[place]
                if slot.filled > layer:
                    place += 1
                elif slot.why:
                    why = slot.why
                    self._cut(place)
                else:
                    try:  # once a layer has arrived, a step of the engine may wait for the next
                        await self.news(node.limits.patience_s if layer else None)
                    except TimeoutError:
                        node.counts["stalls"] += 1
                        self._give_up_peer(STALLED)
            with node.changed:
                self.layers_loaded += bool(self.slots)
                node.changed.notify_all()
        node.counts["loads_short" if why else "loads_whole"] += 1
        self.finish(TransferOutcome(len(self.slots), why))
        await node.loop.create_future()  # until ``end``

    def ended(self, why: str) -> None:
        if self.outcome is None and why == GIVEN_UP:
            self.node.counts["loads_aborted"] += 1
        if self.conn is not None:
            self.conn.post(FailedMessage(transfer=self.name, index=0, reason=why))

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage):
            if not self.take(message, payload):
                self.node.counts["out_of_order"] += 1
                self._give_up_peer(UNEXPECTED_DATA)
        elif isinstance(message, FailedMessage | AbortMessage):
            self._not_sent(message.index if isinstance(message, FailedMessage) else 0, message.reason)
        last = next(reversed(self.awaited.values()), None)
        if last is None or last.is_full:  # layers are sent in order
            self.conn = None

    def lost(self, why: str) -> None:
        self.conn = None
        self._not_sent(0, why)

    async def _fetch_from(self, peer: ReadingPeer) -> None:
        """Ask a peer to read the blocks and send them."""
        self.awaited = dict(enumerate(self.slots))
        try:
            self.conn = await self.node.peers.reach(peer.address)
            total = max(peer.total, len(self.keys))
            await self.conn.send(ReadMessage(transfer=self.name, keys=self.keys, total=total))
        except TransferFailed as error:
            self.lost(str(error))

    def _not_sent(self, first: int, why: str) -> None:
        """Give up the blocks from index ``first`` on that the peer has not sent, for the reason ``why``. Read
        them here if no layer is in use."""
        for index in [index for index in self.awaited if index >= first]:
            slot = self.awaited.pop(index)
            if not slot.filled and not self.layers_loaded:
                self.node.counts["blocks_read_instead"] += 1
                self.node.reads.put(slot, self.keys[index], self.was_read)
            elif not slot.is_full:
                slot.why = why
        self.wake()

    def _give_up_peer(self, why: str) -> None:
        """End the peer's part of the transfer."""
        if self.conn is not None:
            self.conn.post(FailedMessage(transfer=self.name, index=0, reason=why))
        self.lost(why)

    def _cut(self, place: int) -> None:
        """Release the blocks from index ``place`` on, which are useless."""
        with self.node.changed:
            dropped, self.slots = self.slots[place:], self.slots[:place]
        self.node.buffers.release(dropped)


class BlockPush(Transfer):
    """A push of a prompt's blocks to a peer."""

    kind = "push"

    def __init__(self, node: TransferContext, name: str, address: str, keys: Sequence[bytes]) -> None:
        self.keys = list(keys)
        self._inbox: asyncio.Queue[NeedMessage | CompleteMessage | int] = asyncio.Queue()
        """Answers of the peer, and numbers of layers that the engine has given."""
        self.announced = 0
        """Number of layers that the engine has begun to ``give``. Belongs to the engine's thread."""
        self._address = address
        self._layers: list[Sequence[memoryview]] = []
        """The layers given so far, each with one buffer per offered block."""
        super().__init__(node, name)

    def give(self, layer: int, blocks: Sequence[memoryview]) -> None:
        """Add the next layer of all blocks, from the engine's threads. The memory of ``blocks`` must be
        contiguous, and must not change until ``outcome`` is set."""
        if self.outcome is not None:
            return
        assert layer == len(self._layers) < self.node.layers
        assert [block.nbytes for block in blocks] == [self.node.layer_bytes] * len(self.keys)
        self._layers.append(blocks)
        self.node.post(self._inbox.put_nowait, layer)

    async def run(self) -> None:
        self.node.counts["pushes"] += 1
        self.conn = conn = await self.node.peers.reach(self._address)
        await conn.send(OfferMessage(transfer=self.name, keys=self.keys))
        needed: set[int] = set()
        given = 0
        while True:
            async with asyncio.timeout(self.node.limits.lease_s):
                event = await self._inbox.get()
            if isinstance(event, CompleteMessage):
                self.finish(TransferOutcome(len(self.keys)))
                return
            if isinstance(event, int):
                given = event + 1
                await self._send(conn, [event], needed)
                continue
            if any(not 0 <= index < len(self.keys) for index in event.indices):
                raise TransferFailed("the peer asked for a block that was not offered")
            added = set(event.indices) - needed
            needed |= added
            await self._send(conn, range(given), added)

    async def _send(self, conn: PeerConnection, layers: Iterable[int], indices: Collection[int]) -> None:
        async with conn.lane:
            for layer in layers if indices else ():
                blocks = [(index, self._layers[layer][index]) for index in sorted(indices)]
                await self.send_layer(conn, self.name, layer, blocks)
                self.node.counts["bytes_pushed"] += len(blocks) * self.node.layer_bytes

    def ended(self, why: str) -> None:
        self.node.counts["pushes_failed" if why else "pushes_complete"] += 1
        if why and self.conn is not None:
            self.conn.post(AbortMessage(transfer=self.name, reason=why))

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, NeedMessage | CompleteMessage):
            self._inbox.put_nowait(message)
        elif isinstance(message, AbortMessage):
            self.lost(message.reason)


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
            async with asyncio.timeout(COMPUTE_LEASES * node.limits.lease_s):
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
            await asyncio.sleep(node.limits.lease_s)
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
