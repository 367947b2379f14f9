"""Sending a context's blocks to the peer that is to go on with it: offered by name, sent where needed.

    reaching ── Welcome ──▶ offered ── Need ──▶ sending ── Complete ──▶ over
       └────────────── lost, refused, stalled, aborted ──────────────────▲

The peer may have some of the blocks already, having read them from storage itself or got them with another
push: nobody keeps account of that but the peer, and it says so. Layers go in order, as the engine computes
them, and may be given before the peer has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from .peer_table import PeerTable
from .transfer_actions import PushEnded, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_link import LinkItem, TrafficClass
from .transfer_wire import AbortMessage, CompleteMessage, DataMessage, NeedMessage, OfferMessage


class PushState(Enum):
    REACHING = "reaching"
    OFFERED = "offered"
    SENDING = "sending"


class PushChunk(NamedTuple):
    """The work of an item of the compute network: one layer of some blocks."""

    push: BlockPush
    layer: int
    indices: list[int]


class BlockPush:
    """One context on its way to a peer; a ``PeerCaller`` of it."""

    def __init__(
        self,
        pushes: PushTable,
        transfer: str,
        keys: list[bytes],
        epoch: str | None,
        traffic_class: TrafficClass,
        now: float,
    ) -> None:
        self.transfer = transfer
        self.keys = keys
        self.state = PushState.REACHING
        self.conn: int | None = None
        self.watch = StallDetector(pushes.transfer_context.limits.patience_s, now)
        self.needed: dict[int, None] = {}
        self.layers: list[Sequence[memoryview]] = []
        """What the engine has given so far, by layer."""
        self.in_queue: set[int] = set()
        """Items on the link."""
        self.over: PushEnded | None = None
        """What the engine is told once nothing of it is under way."""
        self._pushes = pushes
        self._epoch = epoch
        self._class = traffic_class

    @property
    def waits_for_peer(self) -> bool:
        """Everything that could be sent was: it is the peer's turn."""
        if self.state is PushState.OFFERED:
            return True
        if self.state is not PushState.SENDING or self.in_queue:
            return False
        return not self.needed or len(self.layers) == self._pushes.transfer_context.layers

    def reached(self, conn: int, epoch: str, now: float) -> None:
        if self._pushes.find(self.transfer) is not self:
            return
        if self._epoch is not None and self._epoch != epoch:
            self._pushes.end(self, "the peer has started anew since it was chosen", now)
            return
        self.conn = conn
        self.state = PushState.OFFERED
        self.watch.seen(now)
        offer = OfferMessage(transfer=self.transfer, keys=self.keys, traffic_class=self._class)
        self._pushes.transfer_context.actions.append(SendMessage(conn, offer))

    def unreachable(self, why: str, now: float) -> None:
        if self._pushes.find(self.transfer) is self:
            self._pushes.end(self, why, now)

    def need(self, indices: Sequence[int], now: float) -> bool:
        """The peer needs these; False: it cannot."""
        if any(not 0 <= index < len(self.keys) for index in indices):
            return False
        self.state = PushState.SENDING
        self.watch.seen(now)
        added = [index for index in dict.fromkeys(indices) if index not in self.needed]
        self.needed.update(dict.fromkeys(added))
        for layer in range(len(self.layers)):
            self._line_up(layer, added, now)
        return True

    def give(self, blocks: Sequence[memoryview], now: float) -> None:
        """The next layer of all blocks is computed."""
        self.layers.append(blocks)
        self._line_up(len(self.layers) - 1, list(self.needed), now)

    def _line_up(self, layer: int, indices: list[int], now: float) -> None:
        transfer_context = self._pushes.transfer_context
        size = transfer_context.memory.layer_bytes
        per = max(1, transfer_context.limits.chunk_bytes // size)
        for start in range(0, len(indices), per):
            part = indices[start : start + per]
            chunk = PushChunk(self, layer, part)
            self.in_queue.add(
                transfer_context.compute.put(
                    f"push {self.transfer}", len(part) * size, chunk, now, self._class, peer=self.conn
                )
            )

    def message(self, chunk: PushChunk) -> DataMessage:
        return DataMessage(
            transfer=self.transfer, layer=chunk.layer, indices=chunk.indices, traffic_class=self._class
        )


class PushTable:
    """All pushes of one engine."""

    def __init__(self, transfer_context: TransferContext, peers: PeerTable) -> None:
        self.transfer_context = transfer_context
        self._peers = peers
        self._pushes: dict[str, BlockPush] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def find(self, transfer: str) -> BlockPush | None:
        return self._pushes.get(transfer)

    def offer(
        self,
        transfer: str,
        address: str,
        keys: Sequence[bytes],
        epoch: str | None,
        traffic_class: TrafficClass,
        now: float,
    ) -> None:
        """Offer a context's blocks. Raises ``ValueError`` for a transfer that is open, or a key twice."""
        if transfer in self._pushes:
            raise ValueError(f"transfer {transfer!r} was offered already")
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"transfer {transfer!r} is of {len(keys)} blocks, {len(set(keys))} different")
        push = self._pushes[transfer] = BlockPush(self, transfer, list(keys), epoch, traffic_class, now)
        self.transfer_context.counts["pushes"] += 1
        self._peers.reach(address, push, now)

    def give(self, transfer: str, layer: int, blocks: Sequence[memoryview], now: float) -> bool:
        """A layer of all blocks that were offered, unchanged until ``PushEnded``; whether it is still wanted.

        Raises ``ValueError`` for a layer that is not the next, or blocks of another number or size.
        """
        push = self._pushes.get(transfer)
        if push is None:
            return False
        if layer != len(push.layers) or layer >= self.transfer_context.layers:
            raise ValueError(
                f"layer {layer} of transfer {transfer!r}; expected {len(push.layers)} of "
                f"{self.transfer_context.layers}"
            )
        if len(blocks) != len(push.keys):
            raise ValueError(f"{len(blocks)} blocks of a layer; {len(push.keys)} were offered")
        size = self.transfer_context.memory.layer_bytes
        if any(block.nbytes != size or not block.c_contiguous for block in blocks):
            raise ValueError(f"every Layer Block has {size} bytes in one piece")
        push.give(blocks, now)
        return True

    def begin(self, item: LinkItem, now: float) -> None:
        """The link has come to a chunk."""
        chunk: PushChunk = item.work
        push = chunk.push
        assert push.conn is not None, "nothing is lined up before the peer has said what it needs"
        payload = [push.layers[chunk.layer][index].cast("B") for index in chunk.indices]
        self.transfer_context.actions.append(
            SendMessage(push.conn, push.message(chunk), payload, item.number)
        )

    def finished(self, item: LinkItem, now: float) -> None:
        """A chunk is out, or will never be."""
        push: BlockPush = item.work.push
        push.in_queue.discard(item.number)
        push.watch.seen(now)
        if push.over is not None and not push.in_queue:
            self.transfer_context.events.append(push.over)
        if self._pushes.get(push.transfer) is push:
            self.transfer_context.counts["bytes_pushed"] += item.nbytes

    def received(self, conn: int, message: NeedMessage | CompleteMessage | AbortMessage, now: float) -> bool:
        """What a peer answers; whether it is of a push at all."""
        push = self._pushes.get(message.transfer)
        if push is None or push.conn != conn:
            return False
        if isinstance(message, NeedMessage):
            if not push.need(message.indices, now):
                self.end(push, "the peer needs what was not offered", now, tell=True)
        elif isinstance(message, CompleteMessage):
            self.end(push, "", now)
        else:
            self.end(push, message.reason, now)
        return True

    def told(self, conn: int, transfer: str, done: int, now: float) -> None:
        push = self._pushes.get(transfer)
        if push is not None and push.conn == conn:
            push.watch.told(done, now)

    def abort(self, transfer: str, why: str, now: float) -> None:
        """The engine does not want it any more. Nothing happens for one that is gone."""
        push = self._pushes.get(transfer)
        if push is not None:
            self.end(push, why, now, tell=True)

    def end(self, push: BlockPush, why: str, now: float, tell: bool = False) -> None:
        """It is over, well or because of ``why`` not; ``notify_listeners`` the peer, which does not know."""
        del self._pushes[push.transfer]
        self.transfer_context.counts["pushes_failed" if why else "pushes_complete"] += 1
        for number in list(push.in_queue):
            if self.transfer_context.compute.cancel(number):
                push.in_queue.discard(number)
        self.transfer_context.compute.close(f"push {push.transfer}")
        if tell and push.conn is not None:
            self.transfer_context.actions.append(
                SendMessage(push.conn, AbortMessage(transfer=push.transfer, reason=why))
            )
        push.over = PushEnded(push.transfer, not why, why)
        if not push.in_queue:  # else the memory of what is under way is still read
            self.transfer_context.events.append(push.over)

    def end_all(self, why: str, now: float) -> None:
        for push in list(self._pushes.values()):
            self.end(push, why, now, tell=True)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Transfers that this peer hears of while they go on."""
        return [transfer for transfer, push in self._pushes.items() if push.conn == conn]

    def conns(self) -> set[int]:
        return {push.conn for push in self._pushes.values() if push.conn is not None}

    def lost(self, conn: int, why: str, now: float) -> None:
        for push in list(self._pushes.values()):
            if push.conn == conn:
                self.end(push, why, now)

    def tick(self, now: float) -> None:
        for push in list(self._pushes.values()):
            if push.waits_for_peer and push.watch.stalled(now):
                self.transfer_context.counts["stalls"] += 1
                self.end(push, "the peer shows no progress", now, tell=True)
