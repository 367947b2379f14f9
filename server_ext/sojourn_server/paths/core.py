"""One engine's traffic, without any I/O: what is asked for and what comes in goes in, actions come out.

            engine ── begin, offer, give, expect, store ──▶ ┌──────┐ ── actions ──▶ connections, storage
            engine ◀── events ───────────────────────────── │ core │ ◀── received, read_over, sent, lost ──
                                                            └──────┘ ◀── tick, at ``wake_at``

Every call takes ``now``, seconds of a monotonic clock, and may add to ``take_actions`` and ``take_events``.
None blocks. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tiers.full_block import KvIdentity
from .actions import Action, Dial, Event, HangUp, Send, Stored, WriteBlock
from .depot import Depot
from .limits import LinkRates, PathLimits
from .link import Link
from .loads import Loads, Peer
from .peers import HANDSHAKE, Peers
from .prompt import Chunk as StreamedChunk
from .prompts import Prompts
from .pushes import Pushes
from .traffic_class import TrafficClass
from .wire import Abort, Complete, Data, Failed, Message, Need, Offer, Progress, Read


class _Write(NamedTuple):
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


class TrafficCore:
    """The traffic manager's rules. ``epoch`` is of one life of one process, and never used again."""

    def __init__(
        self, identity: KvIdentity, limits: PathLimits, rates: LinkRates, *, name: str, epoch: str
    ) -> None:
        """Raises ``ValueError`` for layers of different sizes."""
        self.depot = Depot(identity, limits, rates)
        self.peers = Peers(self.depot, name, epoch)
        self.loads = Loads(self.depot, self.peers)
        self.pushes = Pushes(self.depot, self.peers)
        self.prompts = Prompts(self.depot)
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
        peer: Peer | None = None,
        traffic_class: TrafficClass = TrafficClass.KV,
    ) -> int:
        """Bring blocks here, from storage or by a ``peer`` that reads them. Returns of how many: of no more
        than fit the buffers.

        Events: ``LayerHere`` of each layer, ``LoadOver``. Then ``load_blocks`` and ``end_load``.
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
        """Begin a push of a whole context; its layers follow by ``give``. Event: ``PushOver``."""
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
        """Wait for a context that is pushed here. Event: ``PromptOver``. False: it was for an earlier life of
        this engine, of which nothing is left. Raises ``ValueError`` where it is expected already."""
        if epoch is not None and epoch != self.peers.epoch:
            self.depot.counts["stale"] += 1
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
        """Have a block stored; its content stays unchanged until ``Stored``. False: too many wait already, or
        the store does not answer."""
        if sum(part.nbytes for part in content) != self.depot.memory.block_bytes:
            raise ValueError(f"a block has {self.depot.memory.block_bytes} bytes")
        writes, limits = self.depot.writes, self.depot.limits
        if writes.waiting >= limits.max_waiting_writes or writes.stuck(now, limits.patience_s):
            self.depot.counts["writes_refused"] += 1
            return False
        work = _Write(request, key, parent, content)
        self.depot.writes.put(request, self.depot.memory.block_bytes, work, now)
        self.depot.writes.close(request)
        self._settle(now)
        return True

    # -- what comes in --------------------------------------------------------------

    def dialled(self, dial: Dial, conn: int, now: float) -> None:
        self.peers.dialled(dial, conn, now)
        self._settle(now)

    def undialable(self, dial: Dial, why: str, now: float) -> None:
        self.peers.undialable(dial, why, now)
        self._settle(now)

    def accepted(self, conn: int, now: float) -> None:
        self.peers.accepted(conn, now)
        self._settle(now)

    def received(self, conn: int, message: Message, payload: memoryview, now: float) -> None:
        """A message has come whole. ``payload`` is copied before this returns."""
        if isinstance(message, HANDSHAKE) or not self.peers.is_ready(conn):
            if not self.peers.received(conn, message, now):
                self.hang_up(conn, f"{type(message).__name__} has no business here now", now)
        elif isinstance(message, Data):
            if not (self.loads.data(conn, message, payload, now) or self._taken(conn, message, payload, now)):
                self.depot.counts["stray"] += 1  # sent before the peer knew
        elif isinstance(message, Read):
            self.prompts.read(conn, message, now)
        elif isinstance(message, Offer):
            self.prompts.offer(conn, message, now)
        elif isinstance(message, Failed):
            self.loads.failed(conn, message, now)
        elif isinstance(message, (Need, Complete)):
            if not self.pushes.received(conn, message, now):
                self.depot.counts["stray"] += 1
        elif isinstance(message, Abort):
            self.loads.failed(conn, message, now)
            self.pushes.received(conn, message, now)
            self.prompts.aborted(conn, message, now)
        elif isinstance(message, Progress):
            for transfer in message.transfers:
                self.loads.told(conn, transfer, message.done, now)
                self.pushes.told(conn, transfer, message.done, now)
                self.prompts.told(conn, transfer, message.done, now)
        self._settle(now)

    def hang_up(self, conn: int, why: str, now: float) -> None:
        """End a connection on which something was said that cannot be."""
        self.depot.counts["hung_up"] += 1
        self.depot.actions.append(HangUp(conn))
        self.lost(conn, why, now)

    def stalled(self, conn: int, now: float) -> None:
        """The peer has taken nothing of what it is sent for ``patience_s``; its connection is closed."""
        self.depot.counts["stalls"] += 1
        self.lost(conn, "the peer takes nothing", now)

    def lost(self, conn: int, why: str, now: float) -> None:
        """A connection has ended."""
        for part in (self.peers, self.loads, self.pushes, self.prompts):
            part.lost(conn, why, now)
        self._settle(now)

    def sent(self, item: int, now: float) -> None:
        """What ``Send`` gave is out of memory's reach: sent, or never will be."""
        self.depot.compute.over(item, now)
        self._settle(now)

    def read_over(self, item: int, why: str | None, now: float) -> None:
        """A block was read, or not, and ``why``."""
        self.depot.read_over(item, why, now)
        self._settle(now)

    def write_over(self, item: int, outcome: str, now: float) -> None:
        """What the store said."""
        self._written[item] = outcome
        self.depot.writes.over(item, now)
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
        depot = self.depot
        due = min(link.wake_at() for link in (depot.reads, depot.writes, depot.compute))
        return min(due, self._checked_s + self._check_s) if self.busy else due

    # -- what goes out --------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        actions, self.depot.actions = self.depot.actions, []
        return actions

    def take_events(self) -> list[Event]:
        events, self.depot.events = self.depot.events, []
        return events

    @property
    def busy(self) -> bool:
        """Anything is open, so that time matters."""
        depot = self.depot
        return bool(
            self.peers.busy
            or len(self.loads)
            or len(self.pushes)
            or len(self.prompts)
            or self.prompts.wanted
            or depot.buffers.leases
            or any(link.in_flight or link.waiting for link in (depot.reads, depot.writes, depot.compute))
        )

    @property
    def is_clean(self) -> bool:
        """Nothing is open, and nothing has leaked: no lease, no slot, no place in a queue."""
        depot = self.depot
        places = sum(link.requests for link in (depot.reads, depot.writes, depot.compute))
        return not self.busy and not depot.buffers.used and not places

    def links(self, now: float) -> Mapping[str, LinkState]:
        """The state of each link, by name."""
        found: list[Link] = [self.depot.reads, self.depot.writes, self.depot.compute]
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
        buffers = self.depot.buffers
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
            "counts": dict(sorted(self.depot.counts.items())),
        }

    # -- inside ---------------------------------------------------------------------

    def _queued_s(self, link: Link, now: float) -> float | None:
        # As long as for giving up reads: from then on nothing of them is in any queue.
        hung_s = link.hung_s(now, self.depot.limits.patience_s / 2)
        queued_s = link.queued_s(now)
        return max(queued_s or 0.0, hung_s, self.depot.limits.patience_s) if hung_s else queued_s

    def _taken(self, conn: int, message: Data, payload: memoryview, now: float) -> bool:
        return self.prompts.data(conn, message, payload, now)

    def _check(self, now: float) -> None:
        depot = self.depot
        self.peers.tick(now)
        depot.give_up_stuck_reads(now)
        self._give_up_writes(now)
        self.loads.tick(now)
        self.pushes.tick(now)
        self.prompts.tick(now)
        depot.expire(now)
        if now - self._beat_s >= depot.limits.beat_s:
            self._beat_s = now
            self._beat(now)

    def _give_up_writes(self, now: float) -> None:
        """Behind a write that does not come back nothing is written; the engine needs its memory. What the
        store is inside of stays with it until it returns."""
        writes = self.depot.writes
        if writes.stuck(now, self.depot.limits.patience_s):
            self.depot.counts["stalls"] += 1
            for item in writes.in_line():
                writes.cancel(item.number)
                self.depot.counts["write_stalled"] += 1
                self.depot.events.append(Stored(item.work.request, item.work.key, "stalled"))

    def _beat(self, now: float) -> None:
        """Tell each peer that what it shares with us is not forgotten, and how much goes on here."""
        done = self.depot.done(now)
        parts = (self.loads, self.pushes, self.prompts)
        for conn in sorted(self.loads.conns() | self.pushes.conns() | self.prompts.all_conns()):
            transfers = list(dict.fromkeys(name for part in parts for name in part.open_on(conn)))
            if transfers:
                self.depot.actions.append(Send(conn, Progress(transfers=transfers, done=done)))

    def _settle(self, now: float) -> None:
        """Let everything that can go on do so."""
        depot = self.depot
        goes_on = True
        while goes_on:
            goes_on = self._finish(now)
            depot.grant(now)
            depot.pump_reads(now)
            for item in depot.writes.take(now):
                write: _Write = item.work
                depot.actions.append(WriteBlock(item.number, write.key, write.parent, write.content))
            for item in depot.compute.take(now):
                if isinstance(item.work, StreamedChunk):
                    self.prompts.begin(item, now)
                else:
                    self.pushes.begin(item, now)

    def _finish(self, now: float) -> bool:
        """Take in what is through; whether anything was."""
        depot = self.depot
        moved = depot.reads.moved_bytes
        depot.finish_reads(now)
        written = depot.writes.finished(now)
        for item in written:
            write: _Write = item.work
            outcome = self._written.pop(item.number)
            depot.counts[f"write_{outcome}"] += 1
            depot.events.append(Stored(write.request, write.key, outcome))
        sent = depot.compute.finished(now)
        for item in sent:
            if isinstance(item.work, StreamedChunk):
                self.prompts.finished(item, now)
            else:
                self.pushes.finished(item, now)
        return bool(written or sent or depot.reads.moved_bytes > moved)
