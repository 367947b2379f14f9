"""Bringing blocks into one's own buffers: from storage, or by a peer that reads them from storage.

    waiting ── lease ──▶ filling ── all are there, or as many as will come ──▶ over ── taken ──▶ gone

A load ends well with as many *leading* blocks as came: what lies behind a gap is of no use. A block that is
on its way for another load is waited for and not read again. What a peer does not bring may be read here
instead, in the buffers that are held for it: asked for anew it would stand at the end of the line, behind
others who hold half of what they need as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .buffer_pool import BufferSlot
from .peer_table import PeerTable
from .transfer_actions import CloseConnection, LayerLoaded, LoadEnded, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_link import TrafficClass
from .transfer_wire import AbortMessage, DataMessage, FailedMessage, ReadMessage

NO_WAITER = "nobody waits for it any more"


class LoadState(Enum):
    WAITING = "waiting"
    FILLING = "filling"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPeer:
    """Who is to read blocks, and for which transfer."""

    address: str
    transfer: str
    total: int
    """Blocks that the transfer will have in all."""
    epoch: str | None = None
    """Whom the router meant: a peer that has started anew since is another one."""
    or_read_locally: bool = False
    """What it does not bring is read from storage here, unless a layer of all of it has come: from then on
    a step may stand still for it."""


class PeerFetch:
    """The blocks of one load that a peer reads: the ``SlotFiller`` of its slots, a ``PeerCaller`` of the
    peer."""

    def __init__(
        self,
        loads: LoadTable,
        load: str,
        peer: ReadingPeer,
        slots: list[BufferSlot],
        traffic_class: TrafficClass,
        now: float,
    ) -> None:
        self.peer = peer
        self.traffic_class = traffic_class
        self.conn: int | None = None
        self.watch = StallDetector(loads.transfer_context.limits.patience_s, now)
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
            self.fail(0, f"{self.peer.address} has started anew since it was chosen", now)
            return
        self.conn = conn
        self.watch.seen(now)
        slots = [slot for slot in self.slots if slot is not None]  # some may be unwanted by now
        self.slots = list(slots)
        self._places = {slot.index: place for place, slot in enumerate(slots)}
        self._loads.transfer_context.actions.append(
            SendMessage(
                conn,
                ReadMessage(
                    transfer=self.peer.transfer,
                    keys=[slot.key for slot in slots],
                    total=max(self.peer.total, len(slots)),
                    traffic_class=self.traffic_class,
                ),
            )
        )

    def unreachable(self, why: str, now: float) -> None:
        self.fail(0, why, now)

    def unwanted(self, slot: BufferSlot, now: float) -> None:
        self._close(slot)
        if not self._open and not self._failing:
            self._loads.end_fetch(self, NO_WAITER)

    def data(self, message: DataMessage, payload: memoryview, now: float) -> bool:
        """Take in a layer of some blocks; False: it is not what comes next."""
        transfer_context, size = self._loads.transfer_context, self._loads.transfer_context.memory.layer_bytes
        if len(payload) != len(message.indices) * size:
            return False
        for at, index in enumerate(message.indices):
            if not 0 <= index < len(self.slots):
                return False
            slot = self.slots[index]
            if slot is None:  # unwanted, or given up
                continue
            if slot.filled != message.layer or message.layer >= transfer_context.layers:
                return False
            transfer_context.memory.layer(slot.index, message.layer)[:] = payload[at * size : (at + 1) * size]
            if message.layer + 1 == transfer_context.layers:
                slot.filler = None
                self._close(slot)
            transfer_context.counts["bytes_fetched"] += size
            transfer_context.advance(slot, message.layer + 1, now)
        self.watch.seen(now)
        if not self._open:
            self._loads.end_fetch(self, "" if self._loads.has(self.load) else NO_WAITER)
        return True

    def fail(self, index: int, why: str, now: float) -> None:
        """What has not come yet, from the block at ``index`` on, will not."""
        self._failing = True
        for slot in self.slots[max(0, index) :]:
            if slot is not None:
                self._close(slot)
                if slot.filler is self:
                    self._loads.transfer_context.fail(slot, why, now)
        self._failing = False
        if not self._open:
            self._loads.end_fetch(self, "")

    def _close(self, slot: BufferSlot) -> None:
        place = self._places.pop(slot.index, None)
        if place is not None:
            self.slots[place] = None
            self._open -= 1


class BlockLoad:
    """One context's blocks on their way here; a ``LeaseHolder`` of the lease ``name``."""

    def __init__(
        self,
        loads: LoadTable,
        load: str,
        keys: list[bytes],
        peer: ReadingPeer | None,
        traffic_class: TrafficClass,
    ) -> None:
        self.id = load
        self.name = f"load {load}"
        self.keys = keys
        self.good = len(keys)
        self.why = ""
        self.state = LoadState.WAITING
        self.slots: list[BufferSlot] = []
        self.claimed = False
        self._loads = loads
        self._peer = peer
        self._class = traffic_class
        self._instead: set[int] = set()
        """Indices of slots that are read here because the peer did not bring them."""
        self._places: dict[int, int] = {}
        """Index of a slot → the place of its block."""
        self._layers = 0
        """Leading layers that were told to be there."""
        self._lacking: list[int] = []
        """Of each layer, how many of the first ``good`` blocks lack it."""

    def granted(self, now: float) -> None:
        transfer_context = self._loads.transfer_context
        self.state = LoadState.FILLING
        self.slots = [transfer_context.buffers.slot(self.name, key) for key in self.keys]
        self._places = {slot.index: place for place, slot in enumerate(self.slots)}
        self._count_lacking()
        if self._peer is None:
            for slot in self.slots:
                transfer_context.read(self.id, slot, now, self._class)
        else:
            self._fetch(self._peer, now)
        self._check(now)

    def layers_advanced(self, slot: BufferSlot, before: int, now: float) -> None:
        transfer_context = self._loads.transfer_context
        if self.state is not LoadState.FILLING:
            return
        for layer in range(before, slot.filled):
            self._lacking[layer] -= 1
        transfer_context.buffers.renew(self.name, now)
        self._check(now)

    def lost(self, slot: BufferSlot, why: str, now: float) -> None:
        if self.state is not LoadState.FILLING:
            return
        place = self._places[slot.index]
        if slot.filler is not None and not slot.bad:
            return  # another who holds it sees to it
        if self._read_instead(slot, now):
            return
        self.why = why
        self.good = place
        for each in self.slots[place:]:
            self._loads.transfer_context.drop(self.name, each, now)
            self._places.pop(each.index, None)
        del self.slots[place:]
        self._count_lacking()
        self._check(now)

    def lease_expired(self, now: float) -> bool:
        if not self.claimed:
            self._loads.end(self.id, "the lease on its buffers has expired", now)
        return not self.claimed

    def _fetch(self, peer: ReadingPeer, now: float) -> None:
        transfer_context = self._loads.transfer_context
        slots = [slot for slot in self.slots if not slot.filled and slot.filler is None]
        transfer_context.counts["blocks_merged"] += len(self.slots) - len(slots)
        if not slots:
            return
        fetch = PeerFetch(self._loads, self.id, peer, slots, self._class, now)
        for slot in slots:
            slot.filler = fetch
        self._loads.begin_fetch(fetch, now)

    def _read_instead(self, slot: BufferSlot, now: float) -> bool:
        """Whether a slot that the peer left empty is filled from storage, once."""
        transfer_context = self._loads.transfer_context
        if self._peer is None or not self._peer.or_read_locally or self._layers:
            return False
        if slot.bad or slot.index in self._instead:
            return False
        self._instead.add(slot.index)
        transfer_context.counts["blocks_read_instead"] += 1
        transfer_context.read(self.id, slot, now, self._class)
        return True

    def _count_lacking(self) -> None:
        layers = self._loads.transfer_context.layers
        self._lacking = [sum(slot.filled <= layer for slot in self.slots) for layer in range(layers)]

    def _check(self, now: float) -> None:
        events = self._loads.transfer_context.events
        while self.slots and self._layers < len(self._lacking) and not self._lacking[self._layers]:
            events.append(LayerLoaded(self.id, self._layers))
            self._layers += 1
        if not any(self._lacking) and self.state is LoadState.FILLING:
            self.state = LoadState.OVER
            self._loads.over(self, now)


class LoadTable:
    """All loads of one engine."""

    def __init__(self, transfer_context: TransferContext, peers: PeerTable) -> None:
        self.transfer_context = transfer_context
        self._peers = peers
        self._loads: dict[str, BlockLoad] = {}
        self._fetches: dict[str, PeerFetch] = {}
        """By transfer."""
        self._done = self._line = -1

    def __len__(self) -> int:
        return len(self._loads) + len(self._fetches)

    def begin(
        self,
        load: str,
        keys: Sequence[bytes],
        peer: ReadingPeer | None,
        traffic_class: TrafficClass,
        now: float,
    ) -> int:
        """Bring blocks here; returns of how many, which is fewer than asked for where buffers are smaller.

        Raises ``ValueError`` for an id in use, no keys, or a key twice.
        """
        if load in self._loads:
            raise ValueError(f"load {load!r} is under way already")
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"load {load!r} is of {len(keys)} blocks, {len(set(keys))} of them different")
        if peer is not None and peer.transfer in self._fetches:
            raise ValueError(f"transfer {peer.transfer!r} is being fetched already")
        fits = list(keys[: self.transfer_context.limits.slots])
        if len(fits) < len(keys):
            self.transfer_context.counts["loads_cut"] += 1
        made = self._loads[load] = BlockLoad(self, load, fits, peer, traffic_class)
        self.transfer_context.counts["loads"] += 1
        self.transfer_context.lease(made.name, made, fits, 0, now)
        return len(fits)

    def has(self, load: str) -> bool:
        return load in self._loads

    def blocks(self, load: str) -> list[memoryview]:
        """The blocks of a load that is over, in order; nobody else gets their slots before ``end``.

        Raises ``ValueError`` for one that is not over, or no longer there.
        """
        made = self._loads.get(load)
        if made is None or made.state is not LoadState.OVER:
            raise ValueError(f"load {load!r} is {'not over' if made else 'gone, or was never there'}")
        if not made.claimed:
            made.claimed = True
            for slot in made.slots:
                self.transfer_context.buffers.pin(slot)
        return [self.transfer_context.memory.block(slot.index) for slot in made.slots]

    def layer(self, load: str, layer: int) -> list[memoryview]:
        """One layer of a load's blocks, once it has been told to be there. Raises ``ValueError``."""
        made = self._loads.get(load)
        if made is None or any(slot.filled <= layer for slot in made.slots) or not made.slots:
            raise ValueError(f"layer {layer} of load {load!r} is not there")
        return [self.transfer_context.memory.layer(slot.index, layer) for slot in made.slots]

    def renew(self, load: str, now: float) -> None:
        """Its engine lives, and will take it."""
        made = self._loads.get(load)
        if made is not None:
            self.transfer_context.buffers.renew(made.name, now)

    def end(self, load: str, why: str, now: float) -> None:
        """A load was taken, or is not wanted any more, however far it is. Nothing for one that is gone.

        With a ``why`` the engine is told, since it did not ask for it.
        """
        made = self._loads.pop(load, None)
        if made is None:
            return
        if made.state is not LoadState.OVER and not why:
            self.transfer_context.counts["loads_aborted"] += 1
        made.state = LoadState.OVER
        if made.claimed:
            for slot in made.slots:
                self.transfer_context.buffers.unpin(slot)
        self.transfer_context.release(made.name, now)
        self.transfer_context.reads.close(load)  # what is left there is read for others
        if why:
            self.transfer_context.events.append(LoadEnded(load, 0, why))

    def end_all(self, why: str, now: float) -> None:
        for load in list(self._loads):
            self.end(load, why, now)

    def over(self, load: BlockLoad, now: float) -> None:
        self.transfer_context.counts["loads_short" if load.why else "loads_whole"] += 1
        self.transfer_context.events.append(LoadEnded(load.id, load.good, load.why))

    # -- from peers -----------------------------------------------------------------

    def begin_fetch(self, fetch: PeerFetch, now: float) -> None:
        self._fetches[fetch.peer.transfer] = fetch
        self._peers.reach(fetch.peer.address, fetch, now)

    def end_fetch(self, fetch: PeerFetch, why: str) -> None:
        """It has all that it will get; the peer is told ``why``, if it does not know."""
        if self._fetches.get(fetch.peer.transfer) is fetch:
            del self._fetches[fetch.peer.transfer]
            if why and fetch.conn is not None:
                self.transfer_context.actions.append(
                    SendMessage(fetch.conn, AbortMessage(transfer=fetch.peer.transfer, reason=why))
                )

    def data(self, conn: int, message: DataMessage, payload: memoryview, now: float) -> bool:
        """A layer from a peer; whether it is of a fetch at all."""
        fetch = self._fetches.get(message.transfer)
        if fetch is None or fetch.conn != conn:
            return False
        if not fetch.data(message, payload, now):
            self.transfer_context.counts["out_of_order"] += 1
            fetch.fail(0, "the peer sent what was not asked for", now)
            self.transfer_context.actions.append(CloseConnection(conn))
        return True

    def failed(self, conn: int, message: FailedMessage | AbortMessage, now: float) -> None:
        fetch = self._fetches.get(message.transfer)
        if fetch is not None and fetch.conn == conn:
            fetch.watch.seen(now)
            fetch.fail(message.index if isinstance(message, FailedMessage) else 0, message.reason, now)

    def told(self, conn: int, transfer: str, done: int, now: float) -> None:
        fetch = self._fetches.get(transfer)
        if fetch is not None and fetch.conn == conn and fetch.watch.told(done, now):
            self.renew(fetch.load, now)

    def open_transfers_on(self, conn: int) -> list[str]:
        """Transfers of which this peer is to send us something."""
        return [transfer for transfer, fetch in self._fetches.items() if fetch.conn == conn]

    def conns(self) -> set[int]:
        return {fetch.conn for fetch in self._fetches.values() if fetch.conn is not None}

    def lost(self, conn: int, why: str, now: float) -> None:
        """A connection has ended."""
        for fetch in list(self._fetches.values()):
            if fetch.conn == conn:
                fetch.fail(0, why, now)

    def tick(self, now: float) -> None:
        # Whoever waits in a line here has not been forgotten: for storage, while anything goes on, and for
        # buffers, while those who have them get their blocks or give them back.
        buffers = self.transfer_context.buffers
        done, line = (
            self.transfer_context.done(now),
            self.transfer_context.reads.moved(now) + buffers.released,
        )
        for load in self._loads.values():
            filling = load.state is LoadState.FILLING and done > self._done
            if filling or (load.state is LoadState.WAITING and line > self._line):
                buffers.renew(load.name, now)
        self._done, self._line = max(done, self._done), max(line, self._line)
        for fetch in list(self._fetches.values()):
            if fetch.conn is not None and fetch.watch.stalled(now):
                self.transfer_context.counts["stalls"] += 1
                # It is not told: what it has of the transfer by then is of use when that is offered.
                fetch.fail(0, "the peer shows no progress", now)
