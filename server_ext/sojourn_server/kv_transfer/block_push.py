"""Pushes a prompt's blocks to the peer that decodes the request: offers all keys, then sends the blocks that
the peer lacks.

The peer may already have some of the blocks, read from storage. It answers with the indices of the blocks
that it lacks. Layers are sent in the order of computation. The engine may ``give`` layers before the peer has
answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from .peer_connection import PeerConnection, TransferFailed
from .transfer import Transfer, TransferContext, TransferOutcome
from .transfer_wire import AbortMessage, CompleteMessage, NeedMessage, OfferMessage, WireMessage


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
