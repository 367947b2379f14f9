"""Decides the KV transfers of one engine, without I/O: calls and messages in, actions and events out.

    engine ── load, offer, give, expect, store ──▶ ┌──────┐ ── actions ──▶ connections, storage
    engine ◀── events ──────────────────────────── │ core │ ◀── received, read_done, sent, lost ──
                                                   └──────┘ ◀── tick, at ``wake_at``

Every call gets ``now``, the seconds of a monotonic clock. It may add actions and events, which
``take_actions`` and ``take_events`` return. No call blocks. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kv_offload.block_file import KvIdentity
from .incoming_prompt import ReadChunk
from .incoming_prompt_table import IncomingPromptTable
from .load_table import LoadTable, ReadingPeer
from .peer_table import HANDSHAKE_MESSAGES, PeerTable
from .push_table import PushTable
from .transfer_actions import (
    GIVEN_UP,
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
from .transfer_link import TransferLink
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
    """The write of one block: the work of one item of the storage write link."""

    request: str
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


class TransferCore:
    """Decides what one engine's transfer manager does, without I/O. ``epoch`` identifies one run of the
    process and is never reused."""

    def __init__(
        self, identity: KvIdentity, limits: TransferLimits, rates: LinkRates, *, name: str, epoch: str
    ) -> None:
        """Raises ``ValueError`` if a block's bytes cannot be divided into layers of equal size."""
        self.ctx = TransferContext(identity, limits, rates)
        self.peers = PeerTable(self.ctx, name, epoch)
        self.loads = LoadTable(self.ctx, self.peers)
        self.pushes = PushTable(self.ctx, self.peers)
        self.prompts = IncomingPromptTable(self.ctx)
        self._written: dict[int, str] = {}
        self._checked_s = float("-inf")
        self._reported_s = float("-inf")
        self._check_s = min(limits.report_interval_s, limits.patience_s / 4)

    # -- what the engine asks for ---------------------------------------------------

    def load(self, load: str, keys: Sequence[bytes], now: float, *, peer: ReadingPeer | None = None) -> int:
        """Start to load the blocks ``keys`` from storage, or through a ``peer`` that reads them. ``load``: a
        new id. Returns the number of blocks to load, at most as many as fit the buffers.

        Events: ``LayerLoaded`` for each layer, then ``LoadEnded``. After that, call ``loads.blocks`` and then
        ``end_load``. Raises ``ValueError`` for an id or peer transfer in use, no keys, or a duplicate key.
        """
        count = self.loads.begin(load, keys, peer, now)
        self._advance_transfers(now)
        return count

    def end_load(self, load: str, now: float) -> None:
        """End a load, whether or not its blocks have arrived, and release its buffers."""
        self.loads.end(load, "", now)
        self._advance_transfers(now)

    def offer(
        self,
        transfer: str,
        address: str,
        keys: Sequence[bytes],
        now: float,
        *,
        epoch: str | None = None,
    ) -> None:
        """Start to push a whole prompt to the peer at ``address``. Then call ``give`` for each layer. Event:
        ``PushEnded``.

        ``keys``: the prompt's Full Blocks, in order. ``epoch``: the run of the peer's process that the router
        chose; ``None`` for any. Raises ``ValueError`` for an open transfer, no keys, or a duplicate key.
        """
        self.pushes.offer(transfer, address, keys, epoch, now)
        self._advance_transfers(now)

    def give(self, transfer: str, layer: int, blocks: Sequence[memoryview], now: float) -> bool:
        """Add the next layer of all blocks of a push. Returns whether the push is still open. Raises
        ``ValueError`` if ``layer`` is not the next, or the number or size of the blocks is wrong."""
        wanted = self.pushes.give(transfer, layer, blocks, now)
        self._advance_transfers(now)
        return wanted

    def abort_push(self, transfer: str, now: float) -> None:
        self.pushes.abort(transfer, GIVEN_UP, now)
        self._advance_transfers(now)

    def expect(self, transfer: str, now: float, *, epoch: str | None = None) -> bool:
        """Announce that the engine needs a prompt that a peer pushes to it. Event: ``PromptTransferEnded``.
        After that, call ``prompts.blocks`` if the prompt is complete. Then call ``end_prompt`` in any case.

        ``epoch``: the run of this engine's process to which the prompt is pushed; ``None`` if unknown. If
        ``epoch`` is an earlier run, its buffers are gone: the result is false, and there is no event. Raises
        ``ValueError`` if the prompt is expected already.
        """
        if self._is_stale(epoch):
            return False
        self.prompts.expect(transfer, now)
        self._advance_transfers(now)
        return True

    def discard(self, transfer: str, now: float, *, epoch: str | None = None) -> bool:
        """Release a pushed prompt that no request will ask for. If the engine expects it, keep it and
        return false. ``epoch``: the run of this engine's process to which the prompt is pushed; ``None``
        if unknown."""
        if self._is_stale(epoch):
            return True
        discarded = self.prompts.discard(transfer, now)
        self._advance_transfers(now)
        return discarded

    def _is_stale(self, epoch: str | None) -> bool:
        """Return whether ``epoch`` names another run of this engine's process, and count it if so."""
        stale = epoch is not None and epoch != self.peers.epoch
        self.ctx.counts["stale"] += stale
        return stale

    def want(self, transfers: Sequence[str], now: float) -> None:
        """Announce transfers that queued requests will ``expect``, in queue order. Their complete prompts
        stay in the buffers for ``lease_s`` seconds; repeat the call to keep them longer."""
        self.prompts.want(transfers, now)

    def end_prompt(self, transfer: str, now: float) -> None:
        """End a prompt's transfer, complete or not, and release its buffers."""
        self.prompts.forget(transfer, now)
        self._advance_transfers(now)

    def store(
        self, request: str, key: bytes, parent: bytes, content: Sequence[memoryview], now: float
    ) -> bool:
        """Queue a write of a block to the store. Event: ``BlockStoreEnded``; ``content`` must not change
        before it. ``parent``: key of the previous block of the context; empty if there is none.

        Returns false, without queueing, if too many writes wait or the store hangs. Raises ``ValueError`` if
        ``content`` does not have the size of a block."""
        block_bytes, found = self.ctx.memory.block_bytes, sum(part.nbytes for part in content)
        if found != block_bytes:
            raise ValueError(f"a block of {found} bytes; expected {block_bytes}")
        writes, limits = self.ctx.writes, self.ctx.limits
        if writes.waiting >= limits.max_waiting_writes or writes.stuck(now, limits.patience_s):
            self.ctx.counts["writes_refused"] += 1
            return False
        work = _StoreWrite(request, key, parent, content)
        writes.put(request, block_bytes, work, now)
        writes.close(request)
        self._advance_transfers(now)
        return True

    # -- what comes in --------------------------------------------------------------

    def dialled(self, dial: DialPeer, conn: int, now: float) -> None:
        self.peers.dialled(dial, conn, now)
        self._advance_transfers(now)

    def dial_failed(self, dial: DialPeer, why: str, now: float) -> None:
        self.peers.dial_failed(dial, why, now)
        self._advance_transfers(now)

    def accepted(self, conn: int, now: float) -> None:
        self.peers.accepted(conn, now)
        self._advance_transfers(now)

    def received(self, conn: int, message: WireMessage, payload: memoryview, now: float) -> None:
        """Handle a complete message from a peer. ``payload`` may be reused after the call."""
        if isinstance(message, HANDSHAKE_MESSAGES) or not self.peers.is_ready(conn):
            if not self.peers.received(conn, message, now):
                self.close_connection(conn, f"{type(message).__name__} is not allowed here now", now)
        elif isinstance(message, DataMessage):
            taken = self.loads.data(conn, message, payload, now)
            if not taken and not self.prompts.data(conn, message, payload, now):
                self.ctx.counts["stray"] += 1  # sent before the peer learned of the end
        elif isinstance(message, ReadMessage):
            self.prompts.read(conn, message, now)
        elif isinstance(message, OfferMessage):
            self.prompts.offer(conn, message, now)
        elif isinstance(message, FailedMessage):
            self.loads.failed(conn, message, now)
        elif isinstance(message, (NeedMessage, CompleteMessage)):
            if not self.pushes.received(conn, message, now):
                self.ctx.counts["stray"] += 1
        elif isinstance(message, AbortMessage):
            self.loads.failed(conn, message, now)
            self.pushes.received(conn, message, now)
            self.prompts.aborted(conn, message, now)
        elif isinstance(message, ProgressMessage):
            for transfer in message.transfers:
                self.loads.on_progress(conn, transfer, message.done, now)
                self.pushes.on_progress(conn, transfer, message.done, now)
                self.prompts.on_progress(conn, transfer, message.done, now)
        self._advance_transfers(now)

    def close_connection(self, conn: int, why: str, now: float) -> None:
        """Close a connection. The transfers that need it fail for the reason ``why``."""
        self.ctx.counts["hung_up"] += 1
        self.ctx.actions.append(CloseConnection(conn))
        self.connection_lost(conn, why, now)

    def stalled(self, conn: int, now: float) -> None:
        """Handle a peer that has accepted no data for ``patience_s`` seconds: the transfers that need its
        connection fail. The caller must close the connection."""
        self.ctx.counts["stalls"] += 1
        self.connection_lost(conn, "the peer accepts no data", now)

    def connection_lost(self, conn: int, why: str, now: float) -> None:
        """Handle the end of a connection. The transfers that need it fail for the reason ``why``."""
        for part in (self.peers, self.loads, self.pushes, self.prompts):
            part.connection_lost(conn, why, now)
        self._advance_transfers(now)

    def sent(self, item: int, now: float) -> None:
        """Handle the end of a ``SendMessage``, sent or not. Its payload is no longer read."""
        self.ctx.peer_send.end_io(item, now)
        self._advance_transfers(now)

    def read_done(self, item: int, why: str | None, now: float) -> None:
        """Handle the end of a ``ReadBlock``. ``why``: its error; ``None`` for a success."""
        self.ctx.read_done(item, why, now)
        self._advance_transfers(now)

    def write_done(self, item: int, outcome: str, now: float) -> None:
        """Handle the end of a ``WriteBlock``. ``outcome``: a ``PutOutcome`` value, or ``failed``."""
        self._written[item] = outcome
        self.ctx.writes.end_io(item, now)
        self._advance_transfers(now)

    def close(self, now: float) -> None:
        """Abort all transfers and close all connections. Each transfer of the engine ends with an event."""
        why = "the engine is closing"
        for conn in self.peers.conns():
            self.close_connection(conn, why, now)
        self.loads.end_all(why, now)
        self.pushes.end_all(why, now)
        self.prompts.end_all(why, now)
        self._advance_transfers(now)

    def tick(self, now: float) -> None:
        """Handle what is due at ``now``: items of rate-limited links, timeouts and expired leases."""
        if now - self._checked_s >= self._check_s:
            self._checked_s = now
            self._check(now)
        self._advance_transfers(now)

    def wake_at(self) -> float:
        """Return the time at which ``tick`` must be called next; infinity if nothing is open."""
        due = min(link.wake_at() for link in self.ctx.links)
        return min(due, self._checked_s + self._check_s) if self.busy else due

    # -- what goes out --------------------------------------------------------------

    def take_actions(self) -> list[TransferAction]:
        actions, self.ctx.actions = self.ctx.actions, []
        return actions

    def take_events(self) -> list[TransferEvent]:
        events, self.ctx.events = self.ctx.events, []
        return events

    @property
    def busy(self) -> bool:
        """Whether any transfer is open, so that ``tick`` is needed."""
        ctx = self.ctx
        return bool(
            self.peers.busy
            or len(self.loads)
            or len(self.pushes)
            or len(self.prompts)
            or self.prompts.wanted
            or ctx.buffers.leases
            or any(link.in_flight or link.waiting for link in ctx.links)
        )

    @property
    def is_clean(self) -> bool:
        """Whether nothing is open, and no lease, slot or queue entry is left over."""
        places = sum(link.requests for link in self.ctx.links)
        return not self.busy and not self.ctx.buffers.used and not places

    def stats(self, now: float) -> dict[str, Any]:
        """Return the use of buffers, the state of each link by its name, and counters, for operators.

        ``queued_s`` of a link: estimated seconds until a new item would begin; ``None`` if items are queued
        and the speed is unknown. It is at least ``patience_s`` if some of the link's I/O hangs, and at least
        the seconds of the hang if all of it hangs. ``received_bytes``: bytes received from peers.
        ``block_s``: seconds to read a Full Block from storage; 0 while the speed is unknown.
        """
        ctx, buffers = self.ctx, self.ctx.buffers
        return {
            "slots": buffers.slots,
            "slots_used": buffers.used,
            "most_slots_used": buffers.most_used,
            "leases": buffers.leases,
            "leases_waiting": buffers.waiting,
            "links": {
                link.name: {
                    "queued_bytes": link.queued_bytes(now),
                    "queued_s": self._queued_s(link, now),
                    "moved_bytes": link.moved_bytes,
                }
                for link in ctx.links
            },
            "received_bytes": ctx.counts["bytes_fetched"] + ctx.counts["bytes_taken"],
            "block_s": ctx.reads.seconds_for(ctx.memory.block_bytes) or 0.0,
            "counts": dict(sorted(ctx.counts.items())),
        }

    # -- inside ---------------------------------------------------------------------

    def _queued_s(self, link: TransferLink, now: float) -> float | None:
        # Reads that hang for this long are given up and leave the queue, so the queue alone would look short.
        hung_s = link.hung_s(now, self.ctx.limits.patience_s / 2)
        queued_s = link.queued_s(now)
        return max(queued_s or 0.0, hung_s, self.ctx.limits.patience_s) if hung_s else queued_s

    def _check(self, now: float) -> None:
        ctx = self.ctx
        self.peers.tick(now)
        ctx.give_up_stuck_reads(now)
        self._give_up_writes(now)
        self.loads.tick(now)
        self.pushes.tick(now)
        self.prompts.tick(now)
        ctx.expire(now)
        if now - self._reported_s >= ctx.limits.report_interval_s:
            self._reported_s = now
            self._report_progress(now)

    def _give_up_writes(self, now: float) -> None:
        """If a write hangs, drop the queued writes, because the engine needs their memory. The hanging write
        keeps its memory until the store returns."""
        writes = self.ctx.writes
        if writes.stuck(now, self.ctx.limits.patience_s):
            self.ctx.counts["stalls"] += 1
            for item in writes.in_queue():
                writes.cancel(item.number)
                self.ctx.counts["write_stalled"] += 1
                self.ctx.events.append(BlockStoreEnded(item.work.request, item.work.key, "stalled"))

    def _report_progress(self, now: float) -> None:
        """Send each peer this engine's progress counter and the open transfers shared with that peer."""
        done = self.ctx.progress_counter(now)
        parts = (self.loads, self.pushes, self.prompts)
        for conn in sorted(set().union(*(part.conns() for part in parts))):
            transfers = list(dict.fromkeys(name for part in parts for name in part.open_transfers_on(conn)))
            if transfers:
                self.ctx.actions.append(SendMessage(conn, ProgressMessage(transfers=transfers, done=done)))

    def _advance_transfers(self, now: float) -> None:
        """Start and finish everything that can start or finish now."""
        ctx = self.ctx
        goes_on = True
        while goes_on:
            goes_on = self._finish(now)
            ctx.grant(now)
            ctx.start_reads(now)
            for item in ctx.writes.take(now):
                write: _StoreWrite = item.work
                ctx.actions.append(WriteBlock(item.number, write.key, write.parent, write.content))
            for item in ctx.peer_send.take(now):
                if isinstance(item.work, ReadChunk):
                    self.prompts.begin(item, now)
                else:
                    self.pushes.begin(item, now)

    def _finish(self, now: float) -> bool:
        """Handle finished link items. Returns whether there were any."""
        ctx = self.ctx
        moved = ctx.reads.moved_bytes
        ctx.complete_reads(now)
        written = ctx.writes.take_finished(now)
        for item in written:
            write: _StoreWrite = item.work
            outcome = self._written.pop(item.number)
            ctx.counts[f"write_{outcome}"] += 1
            ctx.events.append(BlockStoreEnded(write.request, write.key, outcome))
        sent = ctx.peer_send.take_finished(now)
        for item in sent:
            if isinstance(item.work, ReadChunk):
                self.prompts.finished(item, now)
            else:
                self.pushes.finished(item, now)
        return bool(written or sent or ctx.reads.moved_bytes > moved)
