"""Pushes a prompt's blocks to the peer that decodes the request: offers all keys, then sends the blocks that
the peer lacks.

The peer may already have some of the blocks, read from storage or received with another push. It answers with
the indices of the blocks that it lacks. Layers are sent in the order of computation. The engine may ``give``
layers before the peer has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from .peer_connection import PeerConnection, TransferFailed
from .transfer import Transfer, TransferOutcome
from .transfer_resources import TransferResources
from .transfer_wire import AbortMessage, CompleteMessage, NeedMessage, OfferMessage, WireMessage


class BlockPush(Transfer):
    """A push of a prompt's blocks to a peer."""

    kind = "push"

    def __init__(self, node: TransferResources, name: str, address: str, keys: Sequence[bytes]) -> None:
        self.keys = list(keys)
        self.conn: PeerConnection | None = None
        self.inbox: asyncio.Queue[NeedMessage | CompleteMessage | int] = asyncio.Queue()
        """Answers of the peer, and numbers of layers that the engine has given."""
        self._address = address
        self._layers: list[Sequence[memoryview]] = []
        """The layers given so far, each with one buffer per offered block."""
        super().__init__(node, name)
        self.allowed_s = node.limits.patience_s

    # -- for the engine's threads -----------------------------------------------------

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """Add the next layer of all blocks. The memory of ``blocks`` must be contiguous, and must not change
        until ``outcome`` is set. Returns whether the push is still open."""
        if self.outcome is not None:
            return False
        assert layer == len(self._layers) < self.node.layers
        assert [block.nbytes for block in blocks] == [self.node.layer_bytes] * len(self.keys)
        self._layers.append(blocks)
        self.node.post(self.inbox.put_nowait, layer)
        return True

    def abort(self) -> None:
        """Cancel the push. The memory of its blocks stays in use until ``outcome`` is set."""
        self.end()

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        self.node.counts["pushes"] += 1
        conn = await self.node.peers.reach(self._address)
        self.conn = conn
        await conn.send(OfferMessage(transfer=self.name, keys=self.keys))
        needed: dict[int, None] | None = None
        given = 0
        while True:
            # If the peer has answered, the next layer may take as long as the engine computes.
            computes = given < self.node.layers and bool(needed)
            async with contextlib.nullcontext() if computes else self.patience():
                event = await self.inbox.get()
            if isinstance(event, CompleteMessage):
                self.finish(TransferOutcome(len(self.keys)))
                return
            if isinstance(event, int):
                given = event + 1
                await self._send(conn, [event], needed or {})
                continue
            if any(not 0 <= index < len(self.keys) for index in event.indices):
                raise TransferFailed("the peer asked for a block that was not offered")
            added = {index: None for index in event.indices if index not in (needed or {})}
            needed = {**(needed or {}), **added}
            await self._send(conn, range(given), added)

    async def _send(self, conn: PeerConnection, layers: Sequence[int], indices: dict[int, None]) -> None:
        async with conn.lane:
            for layer in layers if indices else ():
                blocks = [(index, self._layers[layer][index]) for index in indices]
                await self.send_layer(conn, self.name, layer, blocks)
                self.node.counts["bytes_pushed"] += len(blocks) * self.node.layer_bytes

    def ended(self, why: str) -> None:
        self.node.counts["pushes_failed" if why else "pushes_complete"] += 1
        if why and self.conn is not None:
            self.conn.post(AbortMessage(transfer=self.name, reason=why))

    def conns(self) -> set[PeerConnection]:
        return {self.conn} if self.conn is not None else set()

    def received(self, conn: PeerConnection, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, NeedMessage | CompleteMessage):
            self.inbox.put_nowait(message)
        elif isinstance(message, AbortMessage):
            self.lost(conn, message.reason)

    def lost(self, conn: PeerConnection, why: str) -> None:
        self.conn = None  # so that the peer gets no abort
        self.stop(why)
