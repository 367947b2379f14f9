"""Loads blocks into this engine's buffers, from storage or through a peer that reads them from storage.

    waiting ── lease ──▶ filling ── all blocks present, or no more will come ──▶ over ── ``end`` ──▶ gone

A load returns the *leading* blocks that arrived, because blocks after a missing block are useless. If another
load is already reading a block, this load waits for that read. If the peer fails before every block has its
first layer, this engine reads the missing blocks itself. It uses the buffers that the load already has,
because a new lease would wait behind other transfers. If the peer fails later, missing blocks stay missing,
because a step may already wait for layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .peer_table import PeerTable
from .staging_buffers import BufferSlot
from .transfer_actions import GIVEN_UP, CloseConnection, LayerLoaded, LoadEnded, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_link import TrafficClass
from .transfer_wire import AbortMessage, DataMessage, FailedMessage, ReadMessage


class LoadState(Enum):
    WAITING = "waiting"
    FILLING = "filling"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPeer:
    """A peer that reads blocks from storage for this engine, and the transfer for which it reads them."""

    address: str
    transfer: str
    total: int
    """Number of blocks of the whole prompt, for which the peer reserves buffers."""
    epoch: str | None = None
    """Identifies the run of the peer's process that the router chose; ``None`` for any run. A restarted peer
    has another epoch."""


class PeerFetch:
    """The blocks of a load that a peer reads. Implements ``SlotFiller`` for their slots, and ``PeerCaller``
    for the connection to the peer."""

    def __init__(
        self,
        loads: LoadTable,
        load: str,
        peer: ReadingPeer,
        slots: list[BufferSlot],
        now: float,
    ) -> None:
        self.peer = peer
        self.conn: int | None = None
        self.watch = StallDetector(loads.ctx.limits.patience_s, now)
        self.slots: list[BufferSlot | None] = list(slots)
        self._places = {slot.index: place for place, slot in enumerate(slots)}
        self.load = load
        self._loads = loads
        self._open = len(slots)
        self._failing = False

    def reached(self, conn: int, epoch: str, now: float) -> None:
        if not self._open:
            return
        if self.peer.epoch is not None and self.peer.epoch != epoch:
            self.fail(0, f"{self.peer.address} has restarted since it was chosen", now)
            return
        self.conn = conn
        self.watch.record_progress(now)
        slots = [slot for slot in self.slots if slot is not None]  # some may have been dropped meanwhile
        self.slots = list(slots)
        self._places = {slot.index: place for place, slot in enumerate(slots)}
        self._loads.ctx.actions.append(
            SendMessage(
                conn,
                ReadMessage(
                    transfer=self.peer.transfer,
                    keys=[slot.key for slot in slots],
                    total=max(self.peer.total, len(slots)),
                    traffic_class=TrafficClass.KV,
                ),
            )
        )

    def unreachable(self, why: str, now: float) -> None:
        self.fail(0, why, now)

    def unwanted(self, slot: BufferSlot, now: float) -> None:
        self._close(slot)
        if not self._open and not self._failing:
            self._loads.end_fetch(self, GIVEN_UP)

    def data(self, message: DataMessage, payload: memoryview, now: float) -> bool:
        """Copy one received layer of some blocks into their slots. Returns false if the message is invalid:
        an unknown block, a layer that is not the next of its block, or a wrong size."""
        ctx, size = self._loads.ctx, self._loads.ctx.memory.layer_bytes
        if len(payload) != len(message.indices) * size:
            return False
        for at, index in enumerate(message.indices):
            if not 0 <= index < len(self.slots):
                return False
            slot = self.slots[index]
            if slot is None:  # dropped or given up
                continue
            if slot.filled != message.layer or message.layer >= ctx.layers:
                return False
            ctx.memory.layer(slot.index, message.layer)[:] = payload[at * size : (at + 1) * size]
            if message.layer + 1 == ctx.layers:
                slot.filler = None
                self._close(slot)
            ctx.counts["bytes_fetched"] += size
            ctx.advance(slot, message.layer + 1, now)
        self.watch.record_progress(now)
        if not self._open:
            self._loads.end_fetch(self, "" if self.load in self._loads.loads else GIVEN_UP)
        return True

    def fail(self, index: int, why: str, now: float) -> None:
        """Give up the blocks from index ``index`` on that have not arrived, for the reason ``why``."""
        self._failing = True
        for slot in self.slots[max(0, index) :]:
            if slot is not None:
                self._close(slot)
                if slot.filler is self:
                    self._loads.ctx.fail(slot, why, now)
        self._failing = False
        if not self._open:
            self._loads.end_fetch(self, "")

    def _close(self, slot: BufferSlot) -> None:
        place = self._places.pop(slot.index, None)
        if place is not None:
            self.slots[place] = None
            self._open -= 1


class BlockLoad:
    """One load of blocks. Implements ``LeaseHolder`` for the lease ``name``."""

    def __init__(self, loads: LoadTable, load: str, keys: list[bytes], peer: ReadingPeer | None) -> None:
        self.id = load
        self.name = f"load {load}"
        self.keys = keys
        self.good = len(keys)
        """Number of leading blocks that have arrived or may still arrive."""
        self.why = ""
        self.state = LoadState.WAITING
        self.slots: list[BufferSlot] = []
        self.claimed = False
        self._loads = loads
        self._peer = peer
        self._instead: set[int] = set()
        """Indices of slots that this engine reads because the peer did not fill them."""
        self._places: dict[int, int] = {}
        """Slot index → position of the slot's block in the load."""
        self._layers = 0
        """Number of leading layers reported as loaded."""
        self._lacking: list[int] = []
        """For each layer, how many of the blocks in ``slots`` lack this layer."""

    def granted(self, now: float) -> None:
        ctx = self._loads.ctx
        self.state = LoadState.FILLING
        self.slots = [ctx.buffers.slot(self.name, key) for key in self.keys]
        self._places = {slot.index: place for place, slot in enumerate(self.slots)}
        self._count_lacking()
        if self._peer is None:
            for slot in self.slots:
                ctx.read(self.id, slot)
        else:
            self._fetch(self._peer, now)
        self._check(now)

    def layers_advanced(self, slot: BufferSlot, before: int, now: float) -> None:
        ctx = self._loads.ctx
        if self.state is not LoadState.FILLING:
            return
        for layer in range(before, slot.filled):
            self._lacking[layer] -= 1
        ctx.buffers.renew(self.name, now)
        self._check(now)

    def slot_lost(self, slot: BufferSlot, why: str, now: float) -> None:
        if self.state is not LoadState.FILLING:
            return
        place = self._places[slot.index]
        if slot.filler is not None and not slot.bad:
            return  # another holder of the slot reads it again
        if self._read_instead(slot):
            return
        self.why = why
        self.good = place
        for each in self.slots[place:]:
            self._loads.ctx.drop(self.name, each, now)
            self._places.pop(each.index, None)
        del self.slots[place:]
        self._count_lacking()
        self._check(now)

    def lease_expired(self, now: float) -> bool:
        if not self.claimed:
            self._loads.end(self.id, now, why="the lease on its buffers has expired")
        return not self.claimed

    def _fetch(self, peer: ReadingPeer, now: float) -> None:
        ctx = self._loads.ctx
        slots = [slot for slot in self.slots if not slot.filled and slot.filler is None]
        ctx.counts["blocks_merged"] += len(self.slots) - len(slots)
        if not slots:
            return
        fetch = PeerFetch(self._loads, self.id, peer, slots, now)
        for slot in slots:
            slot.filler = fetch
        self._loads.begin_fetch(fetch, now)

    def _read_instead(self, slot: BufferSlot) -> bool:
        """Read from storage a block that the peer did not send, at most once per slot, unless every block
        has its first layer. Returns whether the read was queued."""
        ctx = self._loads.ctx
        if self._peer is None or self._layers or slot.bad or slot.index in self._instead:
            return False
        self._instead.add(slot.index)
        ctx.counts["blocks_read_instead"] += 1
        ctx.read(self.id, slot)
        return True

    def _count_lacking(self) -> None:
        layers = self._loads.ctx.layers
        self._lacking = [sum(slot.filled <= layer for slot in self.slots) for layer in range(layers)]

    def _check(self, now: float) -> None:
        events = self._loads.ctx.events
        while self.slots and self._layers < len(self._lacking) and not self._lacking[self._layers]:
            events.append(LayerLoaded(self.id, self._layers))
            self._layers += 1
        if not any(self._lacking) and self.state is LoadState.FILLING:
            self.state = LoadState.OVER
            self._loads.over(self, now)


class LoadTable:
    """All loads of one engine."""

    def __init__(self, ctx: TransferContext, peers: PeerTable) -> None:
        self.ctx = ctx
        self._peers = peers
        self.loads: dict[str, BlockLoad] = {}
        self._fetches: dict[str, PeerFetch] = {}
        """Transfer → the blocks that a peer reads for it."""
        self._done = self._queue = -1
        """Largest values so far of the two progress counters that ``tick`` reads."""

    def __len__(self) -> int:
        return len(self.loads) + len(self._fetches)

    def begin(self, load: str, keys: Sequence[bytes], now: float, *, peer: ReadingPeer | None = None) -> int:
        """Start a load (``TransferManager.load``). Returns the number of blocks to load, at most the number
        of slots. Events: ``LayerLoaded`` for each layer, then ``LoadEnded``. After that, call ``blocks``, and
        then ``end`` in any case."""
        if load in self.loads:
            raise ValueError(f"load {load!r} is in progress already")
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"load {load!r} has {len(keys)} blocks, {len(set(keys))} of them distinct")
        if peer is not None and peer.transfer in self._fetches:
            raise ValueError(f"transfer {peer.transfer!r} is being fetched already")
        fits = list(keys[: self.ctx.limits.slots])
        if len(fits) < len(keys):
            self.ctx.counts["loads_cut"] += 1
        made = self.loads[load] = BlockLoad(self, load, fits, peer)
        self.ctx.counts["loads"] += 1
        self.ctx.lease(made.name, made, fits, 0, now)
        return len(fits)

    def blocks(self, load: str) -> list[memoryview]:
        """Return the leading blocks that have arrived for a load that is over. Their slots stay pinned until
        ``end``. Raises ``ValueError`` if the load is not over or unknown."""
        made = self.loads.get(load)
        if made is None or made.state is not LoadState.OVER:
            raise ValueError(f"load {load!r} is {'not over' if made else 'unknown'}")
        if not made.claimed:
            made.claimed = True
            for slot in made.slots:
                self.ctx.buffers.pin(slot)
        return [self.ctx.memory.block(slot.index) for slot in made.slots]

    def layer(self, load: str, layer: int) -> list[memoryview]:
        """Return one layer of each block of a load. Raises ``ValueError`` if a block lacks this layer, or if
        the load is unknown or has no blocks."""
        made = self.loads.get(load)
        if made is None or any(slot.filled <= layer for slot in made.slots) or not made.slots:
            raise ValueError(f"layer {layer} of load {load!r} has not arrived")
        return [self.ctx.memory.layer(slot.index, layer) for slot in made.slots]

    def end(self, load: str, now: float, *, why: str = "") -> None:
        """End a load, whether or not its blocks have arrived, and release its buffers. Ignores unknown loads.

        ``why``: reason for the event ``LoadEnded``. It is empty if the engine itself ends the load; there is
        no event then.
        """
        made = self.loads.pop(load, None)
        if made is None:
            return
        if made.state is not LoadState.OVER and not why:
            self.ctx.counts["loads_aborted"] += 1
        made.state = LoadState.OVER
        if made.claimed:
            for slot in made.slots:
                self.ctx.buffers.unpin(slot)
        self.ctx.release(made.name, now)
        self.ctx.reads.close(load)  # its remaining reads serve other loads
        if why:
            self.ctx.events.append(LoadEnded(load, 0, why))

    def end_all(self, why: str, now: float) -> None:
        for load in list(self.loads):
            self.end(load, now, why=why)

    def over(self, load: BlockLoad, now: float) -> None:
        self.ctx.counts["loads_short" if load.why else "loads_whole"] += 1
        self.ctx.events.append(LoadEnded(load.id, load.good, load.why))

    # -- from peers -----------------------------------------------------------------

    def begin_fetch(self, fetch: PeerFetch, now: float) -> None:
        self._fetches[fetch.peer.transfer] = fetch
        self._peers.reach(fetch.peer.address, fetch, now)

    def end_fetch(self, fetch: PeerFetch, why: str) -> None:
        """End a peer's part of a load. If ``why`` is not empty, send it to the peer as the reason."""
        if self._fetches.get(fetch.peer.transfer) is fetch:
            del self._fetches[fetch.peer.transfer]
            if why and fetch.conn is not None:
                self.ctx.actions.append(
                    SendMessage(fetch.conn, AbortMessage(transfer=fetch.peer.transfer, reason=why))
                )

    def data(self, conn: int, message: DataMessage, payload: memoryview, now: float) -> bool:
        """Copy data from a peer into a load's slots. Returns false if the data belong to no load. Unexpected
        data make the peer's part of the load fail, and the connection is closed."""
        fetch = self._fetches.get(message.transfer)
        if fetch is None or fetch.conn != conn:
            return False
        if not fetch.data(message, payload, now):
            self.ctx.counts["out_of_order"] += 1
            fetch.fail(0, "the peer sent unexpected data", now)
            self.ctx.actions.append(CloseConnection(conn))
        return True

    def failed(self, conn: int, message: FailedMessage | AbortMessage, now: float) -> None:
        fetch = self._fetches.get(message.transfer)
        if fetch is not None and fetch.conn == conn:
            fetch.watch.record_progress(now)
            fetch.fail(message.index if isinstance(message, FailedMessage) else 0, message.reason, now)

    def on_progress(self, conn: int, transfer: str, done: int, now: float) -> None:
        fetch = self._fetches.get(transfer)
        if fetch is not None and fetch.conn == conn and fetch.watch.record_counter(done, now):
            self.ctx.buffers.renew(f"load {fetch.load}", now)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Return the ids of the transfers for which the peer of ``conn`` still has to send data."""
        return [transfer for transfer, fetch in self._fetches.items() if fetch.conn == conn]

    def conns(self) -> set[int]:
        return {fetch.conn for fetch in self._fetches.values() if fetch.conn is not None}

    def connection_lost(self, conn: int, why: str, now: float) -> None:
        """Handle the end of a connection: give up the blocks that should have arrived over it."""
        for fetch in list(self._fetches.values()):
            if fetch.conn == conn:
                fetch.fail(0, why, now)

    def tick(self, now: float) -> None:
        # Waiting behind other loads is not a stall. A load with buffers keeps its lease while this engine
        # makes any progress. A load that waits for buffers keeps its place while reads complete or other
        # leases end.
        buffers = self.ctx.buffers
        done, queue = self.ctx.progress_counter, self.ctx.reads.moved_bytes + buffers.released
        for load in self.loads.values():
            filling = load.state is LoadState.FILLING and done > self._done
            if filling or (load.state is LoadState.WAITING and queue > self._queue):
                buffers.renew(load.name, now)
        self._done, self._queue = max(done, self._done), max(queue, self._queue)
        for fetch in list(self._fetches.values()):
            if fetch.conn is not None and fetch.watch.stalled(now):
                self.ctx.counts["stalls"] += 1
                # Send the peer no abort, because blocks that it has read are useful once it offers the
                # transfer.
                fetch.fail(0, "the peer shows no progress", now)
