"""Decides the KV transfers of one engine, without I/O: calls and messages in, actions and events out.

    engine ── loads, pushes, prompts, store ─▶ ┌──────┐ ── actions ──▶ connections, storage
    engine ◀── events ──────────────────────── │ core │ ◀── received, read_done, sent, lost ──
                                               └──────┘ ◀── tick, at ``wake_at``

The engine's side calls the tables ``loads``, ``pushes`` and ``prompts``, and connections call ``peers``.
Every call gets ``now``, the seconds of a monotonic clock. After each call, ``take`` starts what can start,
and returns the resulting actions and events. No call blocks. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kv_offload.block_file import KvIdentity
from .incoming_prompt_table import IncomingPromptTable
from .load_table import LoadTable
from .peer_table import HANDSHAKE_MESSAGES, PeerTable
from .push_table import PushTable
from .transfer_actions import (
    CloseConnection,
    SendMessage,
    TransferAction,
    TransferEvent,
    WriteBlock,
)
from .transfer_context import TransferContext
from .transfer_limits import TransferLimits
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

    key: bytes
    parent: bytes
    content: Sequence[memoryview]


class TransferCore:
    """Decides what one engine's transfer manager does, without I/O. ``epoch`` identifies one run of the
    process and is never reused."""

    def __init__(self, identity: KvIdentity, limits: TransferLimits, *, name: str, epoch: str) -> None:
        """Raises ``ValueError`` if a block's bytes cannot be divided into layers of equal size."""
        self.ctx = TransferContext(identity, limits)
        self.peers = PeerTable(self.ctx, name, epoch)
        self.loads = LoadTable(self.ctx, self.peers)
        self.pushes = PushTable(self.ctx, self.peers)
        self.prompts = IncomingPromptTable(self.ctx, epoch)
        self._checked_s = float("-inf")
        self._reported_s = float("-inf")
        self._check_s = min(limits.report_interval_s, limits.patience_s / 4)

    def store(self, key: bytes, parent: bytes, content: Sequence[memoryview], now: float) -> bool:
        """Queue a write of a block to the store (``TransferManager.store``). Returns false, without queueing,
        if too many writes wait or the store hangs."""
        block_bytes, found = self.ctx.memory.block_bytes, sum(part.nbytes for part in content)
        if found != block_bytes:
            raise ValueError(f"a block of {found} bytes; expected {block_bytes}")
        writes, limits = self.ctx.writes, self.ctx.limits
        if writes.waiting >= limits.max_waiting_writes or writes.stuck(now, limits.patience_s):
            self.ctx.counts["writes_refused"] += 1
            return False
        writes.put("writes", block_bytes, _StoreWrite(key, parent, content))
        writes.close("writes")
        return True

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
                for part in (self.loads, self.pushes, self.prompts):
                    part.on_progress(conn, transfer, message.done, now)

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

    def write_done(self, item: int, outcome: str, now: float) -> None:
        """Handle the end of a ``WriteBlock``. ``outcome``: a ``PutOutcome`` value, or ``failed``."""
        self.ctx.writes.finish(item, now)
        self.ctx.counts[f"write_{outcome}"] += 1

    def close(self, now: float) -> None:
        """Abort all transfers and close all connections. Each transfer of the engine ends with an event."""
        why = "the engine is closing"
        for conn in self.peers.conns():
            self.close_connection(conn, why, now)
        for part in (self.loads, self.pushes, self.prompts):
            part.end_all(why, now)

    def tick(self, now: float) -> None:
        """Handle what is due at ``now``: timeouts, expired leases and progress reports."""
        if now - self._checked_s >= self._check_s:
            self._checked_s = now
            self._check(now)

    def wake_at(self) -> float:
        """Return the time at which ``tick`` must be called next; infinity if nothing is open."""
        return self._checked_s + self._check_s if self.busy else float("inf")

    def take(self, now: float) -> tuple[list[TransferAction], list[TransferEvent]]:
        """Start everything that can start now. Return the actions and events since the last call."""
        ctx = self.ctx
        ctx.grant(now)
        ctx.start_reads(now)
        for item in ctx.writes.take(now):
            write: _StoreWrite = item.work
            ctx.actions.append(WriteBlock(item.number, write.key, write.parent, write.content))
        ctx.start_sends(now)
        actions, events = ctx.actions, ctx.events
        ctx.actions, ctx.events = [], []
        return actions, events

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
                    "queued_bytes": link.queued_bytes,
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
        queued_s = link.queued_s
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

    def _report_progress(self, now: float) -> None:
        """Send each peer this engine's progress counter and the open transfers shared with that peer."""
        done = self.ctx.progress_counter
        parts = (self.loads, self.pushes, self.prompts)
        for conn in sorted(set().union(*(part.conns() for part in parts))):
            transfers = list(dict.fromkeys(name for part in parts for name in part.open_transfers_on(conn)))
            if transfers:
                self.ctx.actions.append(SendMessage(conn, ProgressMessage(transfers=transfers, done=done)))
