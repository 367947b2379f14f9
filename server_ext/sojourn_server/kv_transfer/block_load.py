"""Loads blocks into this engine's buffers, from storage or through a peer that reads them from storage.

A load returns the *leading* blocks that arrived, because blocks after a missing block are useless. If another
transfer already brings a block, the load waits for it. If the peer fails before every block has its first
layer, this engine reads the missing blocks itself, into the buffers that the load already has. If the peer
fails later, missing blocks stay missing, because a step may already wait for layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .peer_connection import PeerConnection, TransferFailed
from .staging_buffers import BufferSlot
from .transfer import Transfer, TransferOutcome
from .transfer_resources import GIVEN_UP, TransferResources
from .transfer_wire import AbortMessage, DataMessage, FailedMessage, ReadMessage, WireMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPeer:
    """A peer that reads blocks from storage for this engine, and the transfer for which it reads them."""

    address: str
    transfer: str
    total: int
    """Number of blocks of the whole prompt, for which the peer reserves buffers."""


class BlockLoad(Transfer):
    """A load of blocks into this engine's buffers."""

    kind = "load"
    received_as = "fetched"

    def __init__(
        self,
        node: TransferResources,
        name: str,
        keys: Sequence[bytes],
        peer: ReadingPeer | None,
        look_up: bool,
    ) -> None:
        """``look_up``: whether to load only the leading blocks that the store has."""
        self.keys = list(keys)
        self.peer = peer
        self.conn: PeerConnection | None = None
        """Connection over which the peer sends the blocks; ``None`` if it does not."""
        self.layers_loaded = 0
        """Number of leading layers that have arrived for all blocks that the load still expects."""
        self._look_up = look_up
        self._fetched: list[BufferSlot] = []
        """Slots of the blocks that the peer was asked to read."""
        super().__init__(node, name)

    # -- for the engine's threads -----------------------------------------------------

    def ready(self, layerwise: bool) -> int | None:
        with self.node.changed:
            if self.outcome is None and layerwise and self.layers_loaded:
                return len(self.slots)
        return super().ready(layerwise)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait for a layer or the end of the load, at most ``timeout_s`` seconds (``None``: without limit).
        Returns whether the layer has arrived."""
        self._wait_until(lambda: self.layers_loaded > layer or self.outcome is not None, timeout_s)
        return self.layers_loaded > layer and (self.outcome is None or self.outcome.good > 0)

    def layer(self, layer: int) -> list[memoryview]:
        """Return one layer of each block of the load. Raises ``ValueError`` if it has not arrived."""
        with self.node.changed:
            if self.layers_loaded <= layer or not self.slots:
                raise ValueError(f"layer {layer} of load {self.name!r} has not arrived")
            return [slot.layer(layer) for slot in self.slots]

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node, why = self.node, ""
        self.keys = self.keys[: node.limits.slots]
        if self._look_up:
            self.keys = self.keys[: await node.storage.look_up(self.keys)]
            if not self.keys:
                self.finish(TransferOutcome(0))
                return
        self.slots = await self.lease_slots(self.keys)
        missing = [slot for slot in self.slots if slot.is_free_to_fill]
        node.counts["blocks_merged"] += len(self.slots) - len(missing)
        if self.peer is not None and missing:
            for slot in missing:
                slot.filler = self
            self._fetched = missing
            self._children.add(node.spawn(self._fetch_from(self.peer)))
        else:
            for slot in missing:
                self.read(slot)
        for layer in range(node.layers):
            for place, slot in enumerate(self.slots):
                if not await self.has(slot, layer):
                    why = slot.why
                    self._cut(place)
                    break
            with node.changed:
                self.layers_loaded += bool(self.slots)
                node.changed.notify_all()
        node.counts["loads_short" if why else "loads_whole"] += 1
        self.finish(TransferOutcome(len(self.slots), why))
        await node.loop.create_future()  # until ``end``

    def ended(self, why: str) -> None:
        if self.outcome is None and why == GIVEN_UP:
            self.node.counts["loads_aborted"] += 1
        if self.conn is not None and self.peer is not None:
            self.conn.post(AbortMessage(transfer=self.peer.transfer, reason=why))
        self.fetch_failed(0, why)

    def read(self, slot: BufferSlot) -> None:
        self.node.counts["blocks_read_instead"] += self.peer is not None
        super().read(slot)

    async def _fetch_from(self, peer: ReadingPeer) -> None:
        """Ask a peer to read the blocks of ``_fetched``, and wait until they have arrived or will not."""
        why = ""
        try:
            self.conn = await self.node.peers.reach(peer.address)
            self._fetched = [slot for slot in self._fetched if slot.filler is self]
            self.allowed_s = self.node.limits.patience_s
            async with self.patience():
                keys = [slot.key for slot in self._fetched]
                total = max(peer.total, len(keys))
                await self.conn.send(ReadMessage(transfer=peer.transfer, keys=keys, total=total))
                for slot in self._fetched:
                    while slot.filler is self:
                        await slot.changed()
        except TransferFailed as error:
            why = str(error)
        except TimeoutError:
            # Send the peer no abort, because blocks that it has read are useful once it is offered them.
            self.node.counts["stalls"] += 1
            why = self.why_stalled
        finally:
            self.conn = None
            self.fetch_failed(0, why)

    def fetch_failed(self, index: int, why: str) -> None:
        """Give up the blocks from index ``index`` on that the peer has not sent, for the reason ``why``."""
        for slot in self._fetched[max(0, index) :]:
            if slot.filler is self:
                self.node.buffers.fail(slot, why)
                if self._why_stopped is None and not slot.filled and not self.layers_loaded:
                    self.read(slot)

    def conns(self) -> set[PeerConnection]:
        return {self.conn} if self.conn is not None else set()

    @property
    def wire_name(self) -> str:
        return self.peer.transfer if self.peer is not None else self.name

    def received(self, conn: PeerConnection, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage):
            if not self.take(self._fetched, message, payload):
                self.node.counts["out_of_order"] += 1
                self.fetch_failed(0, "the peer sent unexpected data")
                self.node.peers.drop(conn, "the peer sent unexpected data")
        elif isinstance(message, FailedMessage | AbortMessage):
            self.renew()
            self.fetch_failed(message.index if isinstance(message, FailedMessage) else 0, message.reason)

    def lost(self, conn: PeerConnection, why: str) -> None:
        self.fetch_failed(0, why)

    def _cut(self, place: int) -> None:
        """Release the blocks from index ``place`` on, which are useless."""
        assert self.lease is not None
        with self.node.changed:
            dropped, self.slots = self.slots[place:], self.slots[:place]
        for slot in dropped:
            self.node.buffers.drop(self.lease, slot)
