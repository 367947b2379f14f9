"""Loads blocks into this engine's buffers, from storage or through a peer that reads them from storage.

A load returns the *leading* blocks that arrived, because blocks after a missing block are useless. If the
peer fails before every block has its first layer, this engine reads the missing blocks itself, into the
buffers that the load already has. If the peer fails later, missing blocks stay missing, because a step may
already wait for layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .peer_connection import TransferFailed
from .transfer import GIVEN_UP, STALLED, Transfer, TransferContext, TransferOutcome
from .transfer_wire import AbortMessage, DataMessage, FailedMessage, ReadMessage, WireMessage

UNEXPECTED_DATA = "the peer sent unexpected data"


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
