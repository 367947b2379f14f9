"""One engine's traffic, without any I/O: what is asked for and what comes in goes in, actions come out.

            engine ── begin, offer, give, expect, store ──▶ ┌──────┐ ── actions ──▶ connections, storage
            engine ◀── events ───────────────────────────── │ core │ ◀── received, read_done, sent, lost ──
                                                            └──────┘ ◀── tick, at ``wake_at``

Every call takes ``now``, seconds of a monotonic clock, and may add to ``take_actions`` and ``take_events``.
None blocks. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..kv_offload.block_file import KvIdentity
from .incoming_prompt import ReadChunk as StreamedChunk
from .incoming_prompt_table import IncomingPromptTable
from .load_table import LoadTable, ReadingPeer
from .peer_table import HANDSHAKE_MESSAGES, PeerTable
from .push_table import PushTable
from .transfer_actions import (
    BlockStoreEnded,
    CloseConnection,
    DialPeer,
    SendMessage,
    TransferAction,
    TransferEvent,
    WriteBlock,
)
from .transfer_context import TransferContext
from .transfer_limits import LinkRates, TransferLimits
from .transfer_link import TrafficClass, TransferLink
from .transfer_wire import (
    AbortMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    ProgressMessage,
    ReadMessage,
    WireMessage,
)


class _StoreWrite(NamedTuple):
    """The work of an item of the link to storage."""

    request: str
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """One link at this moment."""

    queued_bytes: int
    queued_s: float | None
    """Seconds until what comes now would begin; ``None``: not known. Of a link whose I/O does not come back
    it is at least as long as that has lasted."""
    moved_bytes: int


class TransferCore:
    """The traffic manager's rules. ``epoch`` is of one life of one process, and never used again."""

    def __init__(
        self, identity: KvIdentity, limits: TransferLimits, rates: LinkRates, *, name: str, epoch: str
    ) -> None:
        """Raises ``ValueError`` for layers of different sizes."""
        self.transfer_context = TransferContext(identity, limits, rates)
        self.peers = PeerTable(self.transfer_context, name, epoch)
        self.loads = LoadTable(self.transfer_context, self.peers)
        self.pushes = PushTable(self.transfer_context, self.peers)
        self.prompts = IncomingPromptTable(self.transfer_context)
        self._written: dict[int, str] = {}
        self._checked_s = float("-inf")
        self._beat_s = float("-inf")
        self._check_s = min(limits.beat_s, limits.patience_s / 4)

    # -- what the engine asks for ---------------------------------------------------

    def load(
        self,
        load: str,
        keys: Sequence[bytes],
        now: float,
        *,
        peer: ReadingPeer | None = None,
        traffic_class: TrafficClass = TrafficClass.KV,
    ) -> int:
        """Bring blocks here, from storage or by a ``peer`` that reads them. Returns of how many: of no more
        than fit the buffers.

        Events: ``LayerLoaded`` of each layer, ``LoadEnded``. Then ``load_blocks`` and ``end_load``.
        """
        count = self.loads.begin(load, keys, peer, traffic_class, now)
        self._settle(now)
        return count

    def load_blocks(self, load: str) -> list[memoryview]:
        """The blocks of a load that is over, until ``end_load``. Raises ``ValueError``."""
        return self.loads.blocks(load)

    def load_layer(self, load: str, layer: int) -> list[memoryview]:
        """One layer of a load, once it was told to be here. Raises ``ValueError``."""
        return self.loads.layer(load, layer)

    def renew_load(self, load: str, now: float) -> None:
        """The engine will come for it."""
        self.loads.renew(load, now)

    def end_load(self, load: str, now: float) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        self.loads.end(load, "", now)
        self._settle(now)

    def offer(
        self,
        transfer: str,
        address: str,
        keys: Sequence[bytes],
        now: float,
        *,
        epoch: str | None = None,
        traffic_class: TrafficClass = TrafficClass.KV,
    ) -> None:
        """Begin a push of a whole context; its layers follow by ``give``. Event: ``PushEnded``."""
        self.pushes.offer(transfer, address, keys, epoch, traffic_class, now)
        self._settle(now)

    def give(self, transfer: str, layer: int, blocks: Sequence[memoryview], now: float) -> bool:
        """The next layer of a push, of all its blocks; whether it is still wanted. Raises ``ValueError``."""
        wanted = self.pushes.give(transfer, layer, blocks, now)
        self._settle(now)
        return wanted

    def abort_push(self, transfer: str, now: float) -> None:
        self.pushes.abort(transfer, "the engine has given it up", now)
        self._settle(now)

    def expect(self, transfer: str, now: float, *, epoch: str | None = None) -> bool:
        """Wait for a context that is pushed here. Event: ``PromptTransferEnded``. False: it was meant for an
        earlier process of this engine. Raises ``ValueError`` if it is expected already."""
        if epoch is not None and epoch != self.peers.epoch:
            self.transfer_context.counts["stale"] += 1
            return False
        self.prompts.expect(transfer, now)
        self._settle(now)
        return True

    def want(self, transfers: Sequence[str], now: float) -> None:
        """Requests in the engine's own queue will expect these, the first first. To be said again within
        ``lease_s``, until each is expected or ended."""
        self.prompts.want(transfers, now)

    def prompt_blocks(self, transfer: str) -> list[memoryview]:
        """The blocks of a context that is complete, until ``end_prompt``. Raises ``ValueError``."""
        return self.prompts.blocks(transfer)

    def end_prompt(self, transfer: str, now: float) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        self.prompts.forget(transfer, now)
        self._settle(now)

    def store(
        self, request: str, key: bytes, parent: bytes, content: Sequence[memoryview], now: float
    ) -> bool:
        """Store a block; its content must not change until ``BlockStoreEnded``. False: too many blocks wait
        already, or the store does not answer."""
        if sum(part.nbytes for part in content) != self.transfer_context.memory.block_bytes:
            raise ValueError(f"a block has {self.transfer_context.memory.block_bytes} bytes")
        writes, limits = self.transfer_context.writes, self.transfer_context.limits
        if writes.waiting >= limits.max_waiting_writes or writes.stuck(now, limits.patience_s):
            self.transfer_context.counts["writes_refused"] += 1
            return False
        work = _StoreWrite(request, key, parent, content)
        self.transfer_context.writes.put(request, self.transfer_context.memory.block_bytes, work, now)
        self.transfer_context.writes.close(request)
        self._settle(now)
        return True

    # -- what comes in --------------------------------------------------------------

    def dialled(self, dial: DialPeer, conn: int, now: float) -> None:
        self.peers.dialled(dial, conn, now)
        self._settle(now)

    def dial_failed(self, dial: DialPeer, why: str, now: float) -> None:
        self.peers.dial_failed(dial, why, now)
        self._settle(now)

    def accepted(self, conn: int, now: float) -> None:
        self.peers.accepted(conn, now)
        self._settle(now)

    def received(self, conn: int, message: WireMessage, payload: memoryview, now: float) -> None:
        """A message has come whole. ``payload`` is copied before this returns."""
        if isinstance(message, HANDSHAKE_MESSAGES) or not self.peers.is_ready(conn):
            if not self.peers.received(conn, message, now):
                self.hang_up(conn, f"{type(message).__name__} has no business here now", now)
        elif isinstance(message, DataMessage):
            if not (self.loads.data(conn, message, payload, now) or self._taken(conn, message, payload, now)):
                self.transfer_context.counts["stray"] += 1  # sent before the peer knew
        elif isinstance(message, ReadMessage):
            self.prompts.read(conn, message, now)
        elif isinstance(message, OfferMessage):
            self.prompts.offer(conn, message, now)
        elif isinstance(message, FailedMessage):
            self.loads.failed(conn, message, now)
        elif isinstance(message, (NeedMessage, CompleteMessage)):
            if not self.pushes.received(conn, message, now):
                self.transfer_context.counts["stray"] += 1
        elif isinstance(message, AbortMessage):
            self.loads.failed(conn, message, now)
            self.pushes.received(conn, message, now)
            self.prompts.aborted(conn, message, now)
        elif isinstance(message, ProgressMessage):
            for transfer in message.transfers:
                self.loads.told(conn, transfer, message.done, now)
                self.pushes.told(conn, transfer, message.done, now)
                self.prompts.told(conn, transfer, message.done, now)
        self._settle(now)

    def hang_up(self, conn: int, why: str, now: float) -> None:
        """End a connection on which something was said that cannot be."""
        self.transfer_context.counts["hung_up"] += 1
        self.transfer_context.actions.append(CloseConnection(conn))
        self.lost(conn, why, now)

    def stalled(self, conn: int, now: float) -> None:
        """The peer has taken nothing of what it is sent for ``patience_s``; its connection is closed."""
        self.transfer_context.counts["stalls"] += 1
        self.lost(conn, "the peer takes nothing", now)

    def lost(self, conn: int, why: str, now: float) -> None:
        """A connection has ended."""
        for part in (self.peers, self.loads, self.pushes, self.prompts):
            part.lost(conn, why, now)
        self._settle(now)

    def sent(self, item: int, now: float) -> None:
        """What ``Send`` gave is out of memory's reach: sent, or never will be."""
        self.transfer_context.compute.over(item, now)
        self._settle(now)

    def read_done(self, item: int, why: str | None, now: float) -> None:
        """A block was read, or not, and ``why``."""
        self.transfer_context.read_done(item, why, now)
        self._settle(now)

    def write_done(self, item: int, outcome: str, now: float) -> None:
        """What the store said."""
        self._written[item] = outcome
        self.transfer_context.writes.over(item, now)
        self._settle(now)

    def close(self, now: float) -> None:
        """The engine goes: everything that is open ends, and everybody who waits is told."""
        why = "the engine is closing"
        for conn in self.peers.conns():
            self.hang_up(conn, why, now)
        self.loads.end_all(why, now)
        self.pushes.end_all(why, now)
        self.prompts.end_all(why, now)
        self._settle(now)

    def tick(self, now: float) -> None:
        """See what time has done: items that the rate lets finish, patience that is at an end, leases."""
        if now - self._checked_s >= self._check_s:
            self._checked_s = now
            self._check(now)
        self._settle(now)

    def wake_at(self) -> float:
        """When ``tick`` is to be called next; infinity: nothing is open."""
        transfer_context = self.transfer_context
        due = min(
            link.wake_at()
            for link in (transfer_context.reads, transfer_context.writes, transfer_context.compute)
        )
        return min(due, self._checked_s + self._check_s) if self.busy else due

    # -- what goes out --------------------------------------------------------------

    def take_actions(self) -> list[TransferAction]:
        actions, self.transfer_context.actions = self.transfer_context.actions, []
        return actions

    def take_events(self) -> list[TransferEvent]:
        events, self.transfer_context.events = self.transfer_context.events, []
        return events

    @property
    def busy(self) -> bool:
        """Anything is open, so that time matters."""
        transfer_context = self.transfer_context
        return bool(
            self.peers.busy
            or len(self.loads)
            or len(self.pushes)
            or len(self.prompts)
            or self.prompts.wanted
            or transfer_context.buffers.leases
            or any(
                link.in_flight or link.waiting
                for link in (transfer_context.reads, transfer_context.writes, transfer_context.compute)
            )
        )

    @property
    def is_clean(self) -> bool:
        """Nothing is open, and nothing has leaked: no lease, no slot, no place in a queue."""
        transfer_context = self.transfer_context
        places = sum(
            link.requests
            for link in (transfer_context.reads, transfer_context.writes, transfer_context.compute)
        )
        return not self.busy and not transfer_context.buffers.used and not places

    def links(self, now: float) -> Mapping[str, LinkState]:
        """The state of each link, by name."""
        found: list[TransferLink] = [
            self.transfer_context.reads,
            self.transfer_context.writes,
            self.transfer_context.compute,
        ]
        return {
            link.name: LinkState(
                queued_bytes=link.queued_bytes(now),
                queued_s=self._queued_s(link, now),
                moved_bytes=link.moved_bytes,
            )
            for link in found
        }

    def stats(self, now: float) -> dict[str, Any]:
        """For people: buffers, links, what became of things."""
        buffers = self.transfer_context.buffers
        return {
            "slots": buffers.slots,
            "slots_used": buffers.used,
            "most_slots_used": buffers.most_used,
            "leases": buffers.leases,
            "leases_waiting": buffers.waiting,
            "links": {
                name: {
                    "queued_bytes": link.queued_bytes,
                    "queued_s": link.queued_s,
                    "moved_bytes": link.moved_bytes,
                }
                for name, link in self.links(now).items()
            },
            "counts": dict(sorted(self.transfer_context.counts.items())),
        }

    # -- inside ---------------------------------------------------------------------

    def _queued_s(self, link: TransferLink, now: float) -> float | None:
        # As long as for giving up reads: from then on nothing of them is in any queue.
        hung_s = link.hung_s(now, self.transfer_context.limits.patience_s / 2)
        queued_s = link.queued_s(now)
        return max(queued_s or 0.0, hung_s, self.transfer_context.limits.patience_s) if hung_s else queued_s

    def _taken(self, conn: int, message: DataMessage, payload: memoryview, now: float) -> bool:
        return self.prompts.data(conn, message, payload, now)

    def _check(self, now: float) -> None:
        transfer_context = self.transfer_context
        self.peers.tick(now)
        transfer_context.give_up_stuck_reads(now)
        self._give_up_writes(now)
        self.loads.tick(now)
        self.pushes.tick(now)
        self.prompts.tick(now)
        transfer_context.expire(now)
        if now - self._beat_s >= transfer_context.limits.beat_s:
            self._beat_s = now
            self._beat(now)

    def _give_up_writes(self, now: float) -> None:
        """Behind a write that does not come back nothing is written; the engine needs its memory. What the
        store is inside of stays with it until it returns."""
        writes = self.transfer_context.writes
        if writes.stuck(now, self.transfer_context.limits.patience_s):
            self.transfer_context.counts["stalls"] += 1
            for item in writes.in_queue():
                writes.cancel(item.number)
                self.transfer_context.counts["write_stalled"] += 1
                self.transfer_context.events.append(
                    BlockStoreEnded(item.work.request, item.work.key, "stalled")
                )

    def _beat(self, now: float) -> None:
        """Tell each peer that what it shares with us is not forgotten, and how much goes on here."""
        done = self.transfer_context.done(now)
        parts = (self.loads, self.pushes, self.prompts)
        for conn in sorted(self.loads.conns() | self.pushes.conns() | self.prompts.all_conns()):
            transfers = list(dict.fromkeys(name for part in parts for name in part.open_transfers_on(conn)))
            if transfers:
                self.transfer_context.actions.append(
                    SendMessage(conn, ProgressMessage(transfers=transfers, done=done))
                )

    def _settle(self, now: float) -> None:
        """Let everything that can go on do so."""
        transfer_context = self.transfer_context
        goes_on = True
        while goes_on:
            goes_on = self._finish(now)
            transfer_context.grant(now)
            transfer_context.start_reads(now)
            for item in transfer_context.writes.take(now):
                write: _StoreWrite = item.work
                transfer_context.actions.append(
                    WriteBlock(item.number, write.key, write.parent, write.content)
                )
            for item in transfer_context.compute.take(now):
                if isinstance(item.work, StreamedChunk):
                    self.prompts.begin(item, now)
                else:
                    self.pushes.begin(item, now)

    def _finish(self, now: float) -> bool:
        """Take in what is through; whether anything was."""
        transfer_context = self.transfer_context
        moved = transfer_context.reads.moved_bytes
        transfer_context.complete_reads(now)
        written = transfer_context.writes.finished(now)
        for item in written:
            write: _StoreWrite = item.work
            outcome = self._written.pop(item.number)
            transfer_context.counts[f"write_{outcome}"] += 1
            transfer_context.events.append(BlockStoreEnded(write.request, write.key, outcome))
        sent = transfer_context.compute.finished(now)
        for item in sent:
            if isinstance(item.work, StreamedChunk):
                self.prompts.finished(item, now)
            else:
                self.pushes.finished(item, now)
        return bool(written or sent or transfer_context.reads.moved_bytes > moved)
