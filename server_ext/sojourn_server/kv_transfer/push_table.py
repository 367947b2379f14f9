"""Pushes a prompt's blocks to the peer that decodes the request: offers all keys, then sends the blocks that
the peer lacks.

    reaching ── Welcome ──▶ offered ── Need ──▶ sending ── Complete ──▶ over
       └────────────── lost, refused, stalled, aborted ──────────────────▲

The peer may already have some of the blocks, read from storage or received with another push. It answers with
the indices of the blocks that it lacks. Layers are sent in the order of computation. The engine may ``give``
layers before the peer has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .peer_table import PeerTable
from .transfer_actions import GIVEN_UP, PushEnded, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_link import LinkItem, TrafficClass
from .transfer_wire import AbortMessage, CompleteMessage, DataMessage, NeedMessage, OfferMessage


class PushState(Enum):
    REACHING = "reaching"
    OFFERED = "offered"
    SENDING = "sending"


class BlockPush:
    """The push of one prompt to a peer. Implements ``PeerCaller`` and ``ChunkSender``."""

    def __init__(
        self,
        pushes: PushTable,
        transfer: str,
        keys: list[bytes],
        epoch: str | None,
        now: float,
    ) -> None:
        self.transfer = transfer
        self.keys = keys
        self.state = PushState.REACHING
        self.conn: int | None = None
        self.watch = StallDetector(pushes.ctx.limits.patience_s, now)
        self.needed: dict[int, None] = {}
        """Indices of the blocks that the peer has asked for, in the order of its requests."""
        self.layers: list[Sequence[memoryview]] = []
        """The layers given so far, each with one buffer per offered block."""
        self.in_queue: set[int] = set()
        """Numbers of this push's items on the link, waiting or in flight."""
        self.end_event: PushEnded | None = None
        """Event to report once the link has no item of this push left; ``None`` while the push is open."""
        self._pushes = pushes
        self._epoch = epoch

    @property
    def waits_for_peer(self) -> bool:
        """Whether the push can continue only with an answer from the peer."""
        if self.state is PushState.OFFERED:
            return True
        if self.state is not PushState.SENDING or self.in_queue:
            return False
        return not self.needed or len(self.layers) == self._pushes.ctx.layers

    def reached(self, conn: int, epoch: str, now: float) -> None:
        if self._pushes.find(self.transfer) is not self:
            return
        if self._epoch is not None and self._epoch != epoch:
            self._pushes.end(self, "the peer has restarted since it was chosen", now)
            return
        self.conn = conn
        self.state = PushState.OFFERED
        self.watch.record_progress(now)
        offer = OfferMessage(transfer=self.transfer, keys=self.keys, traffic_class=TrafficClass.KV)
        self._pushes.ctx.actions.append(SendMessage(conn, offer))

    def unreachable(self, why: str, now: float) -> None:
        if self._pushes.find(self.transfer) is self:
            self._pushes.end(self, why, now)

    def queue_needed(self, indices: Sequence[int], now: float) -> bool:
        """Queue the blocks that the peer asks for. Returns false if one of ``indices`` was not offered."""
        if any(not 0 <= index < len(self.keys) for index in indices):
            return False
        self.state = PushState.SENDING
        self.watch.record_progress(now)
        added = [index for index in dict.fromkeys(indices) if index not in self.needed]
        self.needed.update(dict.fromkeys(added))
        for layer in range(len(self.layers)):
            self._enqueue(layer, added)
        return True

    def give(self, blocks: Sequence[memoryview]) -> None:
        """Add the next computed layer. ``blocks``: this layer of each offered block, in order."""
        self.layers.append(blocks)
        self._enqueue(len(self.layers) - 1, list(self.needed))

    def payload(self, item: LinkItem) -> list[memoryview]:
        message: DataMessage = item.work.message
        return [self.layers[message.layer][index].cast("B") for index in message.indices]

    def chunk_sent(self, item: LinkItem, now: float) -> None:
        ctx = self._pushes.ctx
        self.in_queue.discard(item.number)
        self.watch.record_progress(now)
        if self.end_event is not None and not self.in_queue:
            ctx.events.append(self.end_event)
        if self._pushes.find(self.transfer) is self:
            ctx.counts["bytes_pushed"] += item.nbytes

    def _enqueue(self, layer: int, indices: list[int]) -> None:
        if not indices:
            return
        assert self.conn is not None, "the peer has asked for them"
        name = f"push {self.transfer}"
        items = self._pushes.ctx.queue_layer(name, self, self.conn, self.transfer, layer, indices)
        self.in_queue.update(item.number for item in items)


class PushTable:
    """All pushes of one engine."""

    def __init__(self, ctx: TransferContext, peers: PeerTable) -> None:
        self.ctx = ctx
        self._peers = peers
        self._pushes: dict[str, BlockPush] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def find(self, transfer: str) -> BlockPush | None:
        return self._pushes.get(transfer)

    def offer(
        self, transfer: str, address: str, keys: Sequence[bytes], now: float, *, epoch: str | None = None
    ) -> None:
        """Start a push (``TransferManager.offer``): connect to the peer and offer it the blocks. Then call
        ``give`` for each layer. Event: ``PushEnded``."""
        if transfer in self._pushes:
            raise ValueError(f"transfer {transfer!r} was offered already")
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(
                f"transfer {transfer!r} has {len(keys)} blocks, {len(set(keys))} of them distinct"
            )
        push = self._pushes[transfer] = BlockPush(self, transfer, list(keys), epoch, now)
        self.ctx.counts["pushes"] += 1
        self._peers.reach(address, push, now)

    def give(self, transfer: str, layer: int, blocks: Sequence[memoryview], now: float) -> bool:
        """Add the next layer of all offered blocks (``PushHandle.give``). Returns whether the push is still
        open."""
        push = self._pushes.get(transfer)
        if push is None:
            return False
        if layer != len(push.layers) or layer >= self.ctx.layers:
            raise ValueError(
                f"layer {layer} of transfer {transfer!r}; expected {len(push.layers)} of {self.ctx.layers}"
            )
        if len(blocks) != len(push.keys):
            raise ValueError(f"a layer of {len(blocks)} blocks; expected the {len(push.keys)} offered")
        size = self.ctx.memory.layer_bytes
        if any(block.nbytes != size or not block.c_contiguous for block in blocks):
            raise ValueError(f"a Layer Block of another size or layout; expected {size} contiguous bytes")
        push.give(blocks)
        return True

    def received(self, conn: int, message: NeedMessage | CompleteMessage | AbortMessage, now: float) -> bool:
        """Handle a peer's answer. Returns false if it belongs to no push."""
        push = self._pushes.get(message.transfer)
        if push is None or push.conn != conn:
            return False
        if isinstance(message, NeedMessage):
            if not push.queue_needed(message.indices, now):
                self.end(push, "the peer asked for a block that was not offered", now, notify=True)
        elif isinstance(message, CompleteMessage):
            self.end(push, "", now)
        else:
            self.end(push, message.reason, now)
        return True

    def on_progress(self, conn: int, transfer: str, done: int, now: float) -> None:
        push = self._pushes.get(transfer)
        if push is not None and push.conn == conn:
            push.watch.record_counter(done, now)

    def abort(self, transfer: str, now: float) -> None:
        """Cancel a push, and tell the peer. Ignores unknown transfers."""
        push = self._pushes.get(transfer)
        if push is not None:
            self.end(push, GIVEN_UP, now, notify=True)

    def end(self, push: BlockPush, why: str, now: float, notify: bool = False) -> None:
        """End a push. ``why``: the reason of a failure; empty for a success. ``notify``: whether to send the
        peer an ``AbortMessage``. The event ``PushEnded`` follows when the push's memory is no longer read."""
        del self._pushes[push.transfer]
        self.ctx.counts["pushes_failed" if why else "pushes_complete"] += 1
        for number in list(push.in_queue):
            if self.ctx.peer_send.cancel(number):
                push.in_queue.discard(number)
        self.ctx.peer_send.close(f"push {push.transfer}")
        if notify and push.conn is not None:
            self.ctx.actions.append(SendMessage(push.conn, AbortMessage(transfer=push.transfer, reason=why)))
        push.end_event = PushEnded(push.transfer, not why, why)
        if not push.in_queue:  # otherwise the memory is still being read
            self.ctx.events.append(push.end_event)

    def end_all(self, why: str, now: float) -> None:
        for push in list(self._pushes.values()):
            self.end(push, why, now, notify=True)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Return the ids of open pushes on this connection, for progress reports."""
        return [transfer for transfer, push in self._pushes.items() if push.conn == conn]

    def conns(self) -> set[int]:
        return {push.conn for push in self._pushes.values() if push.conn is not None}

    def connection_lost(self, conn: int, why: str, now: float) -> None:
        for push in list(self._pushes.values()):
            if push.conn == conn:
                self.end(push, why, now)

    def tick(self, now: float) -> None:
        for push in list(self._pushes.values()):
            if push.waits_for_peer and push.watch.stalled(now):
                self.ctx.counts["stalls"] += 1
                self.end(push, "the peer shows no progress", now, notify=True)
