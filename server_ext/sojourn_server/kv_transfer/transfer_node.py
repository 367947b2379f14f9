"""The transfers of one engine in one event loop: their tables, buffers, links and peers.

A transfer is a coroutine (``BlockLoad``, ``BlockPush``, ``IncomingPrompt``). The node starts it, hands it the
messages of its peer, reads blocks from storage in the order of requests, and reports progress to peers.
Nothing here opens a socket or a file, or has a clock other than the loop's: tests run two nodes in virtual
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..kv_offload.block_file import KvIdentity
from .block_load import BlockLoad, ReadingPeer
from .block_push import BlockPush
from .incoming_prompt import IncomingPrompt, refuse
from .peer_connection import PeerConnection, PeerStream, PeerTable
from .staging_buffers import BufferSlot
from .transfer import Transfer, TransferOutcome
from .transfer_limits import TransferLimits
from .transfer_resources import GIVEN_UP, LinkMeter, ReadBlocks, TransferResources
from .transfer_wire import (
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    ProgressMessage,
    ReadMessage,
)

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0
"""Maximum seconds for sending the last messages when the node closes."""
CLOSING = "the engine is closing"
MAX_PROMPTS = 4096
"""Maximum number of open prompts of all peers together, and of ended ones whose reason is remembered."""
QUEUE_SHARE = 0.75
"""While other transfers wait for slots, complete prompts of queued requests keep at most this share of the
slots. The prompt of the first queued request is always kept."""
EVICTED_UNCLAIMED = "evicted before any request asked for it: other transfers waited for its buffers"
EVICTED_LOW_PRIORITY = "its request was among the last in the queue, and others waited for its buffers"


class TransferNode(TransferResources):
    """All transfers of one engine. Create it in its event loop. Other threads use ``post``, and the parts of
    transfers that are for the engine."""

    def __init__(
        self,
        identity: KvIdentity,
        limits: TransferLimits,
        *,
        name: str,
        epoch: str,
        read: ReadBlocks,
        look_up: Callable[[Sequence[bytes]], Awaitable[int]],
        dial: Callable[[str], Awaitable[PeerStream]],
    ) -> None:
        """``epoch`` identifies one run of the process and is never reused. ``read`` starts to read stored
        blocks, and ``look_up`` returns how many leading blocks of a list are stored. ``dial`` connects to an
        address. Raises ``ValueError`` if a block's bytes cannot be divided into layers of equal size."""
        super().__init__(identity, limits, name, read, look_up)
        self.epoch = epoch
        self.loads: set[Transfer] = set()
        self.fetches: dict[str, BlockLoad] = {}
        """Transfer → the load whose blocks a peer reads for it."""
        self.pushes: dict[str, BlockPush] = {}
        self.prompts: dict[str, IncomingPrompt] = {}
        self.wanted: dict[str, float] = {}
        """Transfer that a queued request will ``expect`` → time until which it is kept. In queue order."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Failed transfer that the engine had not asked for → reason."""
        self.peers = PeerTable(
            identity, limits, name=name, epoch=epoch, counts=self.counts, dial=dial, spawn=self.spawn,
            received=self._received, lost=self._lost,
        )  # fmt: skip
        self._services = [*self.reads.tasks, self.spawn(self._beat())]

    # -- what the engine asks for -----------------------------------------------------

    def load(
        self, name: str, keys: Sequence[bytes], peer: ReadingPeer | None = None, look_up: bool = False
    ) -> BlockLoad:
        """Start to load the blocks ``keys`` (``TransferManager.load``), from any thread."""
        _check_keys(name, keys)
        load = BlockLoad(self, name, keys, peer, look_up)
        self._post_start(self._start_load, load)
        return load

    def offer(
        self, transfer: str, address: str, keys: Sequence[bytes], epoch: str | None = None
    ) -> BlockPush:
        """Start to push a prompt (``TransferManager.offer``), from any thread."""
        _check_keys(transfer, keys)
        push = BlockPush(self, transfer, address, keys, epoch)
        self._post_start(self._start_push, push)
        return push

    def expect(self, transfer: str, epoch: str | None = None) -> IncomingPrompt:
        """Wait for a prompt that a peer pushes (``TransferManager.expect``)."""
        self._check_open()
        prompt = self.prompts.get(transfer) or self._open_prompt(transfer)
        prompt.expect()
        self.wanted.pop(transfer, None)
        if self._is_stale(epoch):
            prompt.stop("this engine has restarted since the prompt was pushed")
        elif transfer in self._gone:
            prompt.stop(self._gone.pop(transfer))
        return prompt

    def want(self, transfers: Sequence[str]) -> None:
        """Keep the complete prompts of these transfers for queued requests (``TransferManager.want``)."""
        for transfer in transfers:
            prompt = self.prompts.get(transfer)
            if prompt is None or not prompt.is_expected:
                self.wanted.pop(transfer, None)  # the order of the latest call counts
                self.wanted[transfer] = self.loop.time() + self.limits.lease_s
                if prompt is not None and prompt.outcome is not None:
                    prompt.renew()

    def discard(self, transfer: str, epoch: str | None = None) -> bool:
        """Remove a prompt that no request asks for (``TransferManager.discard``). If the engine expects it,
        keep it and return false."""
        if self._is_stale(epoch):
            return True
        prompt = self.prompts.get(transfer)
        if prompt is not None and prompt.is_expected:
            return False
        self.wanted.pop(transfer, None)
        if prompt is not None:
            prompt.stop(GIVEN_UP)
        self._gone.pop(transfer, None)
        return True

    async def close(self) -> None:
        """Abort all transfers and close all connections. Each transfer ends with an outcome."""
        self.is_closing = True
        for transfer in self._transfers():
            transfer.stop(CLOSING)
        work = self.tasks.difference(self._services, [asyncio.current_task()])
        if work:  # let final messages be sent
            await asyncio.wait(work, timeout=CLOSE_GRACE_S)
        for conn in list(self.peers.conns):
            self.peers.drop(conn, CLOSING)
        for service in self._services:
            service.cancel()
        rest = self.tasks.difference([asyncio.current_task()])
        if rest:
            await asyncio.wait(rest, timeout=CLOSE_GRACE_S)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is open, and no buffer or queued read is left over."""
        buffers = self.buffers
        return not (self._transfers() or self.wanted or len(self.reads) or buffers.used or buffers.waiting)

    def stats(self) -> dict[str, Any]:
        """Return the use of buffers, the state of each link by its name, and counters, for operators.

        ``queued_s`` of a link: estimated seconds until a new item would begin; ``None`` if items are queued
        and the speed is unknown. ``block_s``: seconds of the read of a block; 0 if unknown.
        """
        buffers, reads, sending = self.buffers, self.reads, self.sending
        return {
            "slots": buffers.slots,
            "slots_used": buffers.used,
            "most_slots_used": buffers.most_used,
            "leases": buffers.leases + buffers.waiting,
            "leases_waiting": buffers.waiting,
            "links": {
                "storage read": link_stats(reads.meter, reads.queued_s(self.loop.time())),
                "compute network": link_stats(sending, sending.seconds_for(sending.queued_bytes)),
            },
            "received_bytes": self.counts["bytes_fetched"] + self.counts["bytes_taken"],
            "block_s": reads.meter.seconds_for(buffers.block_bytes) or 0.0,
            "counts": dict(self.counts),
        }

    # -- for transfers ----------------------------------------------------------------

    def forget(self, transfer: object) -> None:
        assert isinstance(transfer, Transfer)
        self.loads.discard(transfer)
        name = transfer.wire_name
        tables: tuple[dict[str, Any], ...] = (self.fetches, self.pushes, self.prompts)
        for table in tables:
            if table.get(name) is transfer:
                del table[name]

    def remember(self, transfer: str, why: str) -> None:
        """Keep the reason why a prompt is gone, so that a later ``expect`` of it fails at once."""
        self._gone[transfer] = why
        if len(self._gone) > MAX_PROMPTS:
            self._gone.popitem(last=False)

    # -- inside -----------------------------------------------------------------------

    def _transfers(self) -> list[Transfer]:
        return [*self.loads, *self.pushes.values(), *self.prompts.values()]

    def _check_open(self) -> None:
        if self.is_closing:
            raise ValueError(f"the transfer manager of {self.name} is closed")

    def _post_start(self, start: Callable[..., None], transfer: Transfer) -> None:
        self._check_open()
        if not self.post(start, transfer):
            self.is_closing = True
            self._check_open()

    def _start_load(self, load: BlockLoad) -> None:
        if load.peer is not None and load.peer.transfer in self.fetches:
            load.peer = None  # the peer reads for another load of this transfer, and would refuse
        self.loads.add(load)
        if load.peer is not None:
            self.fetches[load.peer.transfer] = load
        load.start()

    def _start_push(self, push: BlockPush) -> None:
        if push.name in self.pushes:
            push.finish(TransferOutcome(0, f"transfer {push.name!r} was offered already"))
        else:
            self.pushes[push.name] = push
            push.start()

    def _is_stale(self, epoch: str | None) -> bool:
        """Return whether ``epoch`` names another run of this engine's process, and count it if so."""
        stale = epoch is not None and epoch != self.epoch
        self.counts["stale"] += stale
        return stale

    def _open_prompt(self, transfer: str) -> IncomingPrompt:
        prompt = self.prompts[transfer] = IncomingPrompt(self, transfer)
        prompt.start()
        return prompt

    def _received(self, conn: PeerConnection, message: AnyWireMessage, payload: bytes) -> None:
        """Handle a message of an identified peer."""
        if isinstance(message, ReadMessage | OfferMessage):
            self._asked(conn, message)
        elif isinstance(message, ProgressMessage):
            for name in message.transfers:
                for each in self._shared(conn, name):
                    each.on_progress(message.done)
        elif isinstance(message, DataMessage | FailedMessage | NeedMessage | CompleteMessage | AbortMessage):
            shared = self._shared(conn, message.transfer)
            self.counts["stray"] += not shared  # sent before the peer learned of the end
            for each in shared:
                each.received(conn, message, payload)
        else:
            self.peers.drop(conn, f"{type(message).__name__} is not allowed here now")

    def _asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        prompt = self.prompts.get(message.transfer)
        if not message.keys or len(set(message.keys)) != len(message.keys):
            refuse(conn, message, "no blocks, or a duplicate block")
        elif self.is_closing or (prompt is None and len(self.prompts) >= MAX_PROMPTS):
            self.counts["contexts_refused"] += 1
            refuse(conn, message, f"peers may have {MAX_PROMPTS} contexts here at a time")
        else:
            self._gone.pop(message.transfer, None)
            (prompt or self._open_prompt(message.transfer)).asked(conn, message)

    def _shared(self, conn: PeerConnection, name: str) -> list[Transfer]:
        """Return this engine's parts of the transfer ``name`` with the peer of ``conn``."""
        parts = self.fetches.get(name), self.pushes.get(name), self.prompts.get(name)
        return [part for part in parts if part is not None and conn in part.conns()]

    def _lost(self, conn: PeerConnection, why: str) -> None:
        for transfer in self._transfers():
            if conn in transfer.conns():
                transfer.lost(conn, why)

    def _progress(self) -> int:
        """Return a counter that grows whenever any transfer of this engine makes progress."""
        return self.reads.meter.moved_bytes + self.sending.moved_bytes + self.buffers.released

    async def _beat(self) -> None:
        """Report progress to peers, and let transfers wait that wait for this engine's own progress."""
        seen = -1
        while True:
            await asyncio.sleep(self.limits.report_interval_s)
            now, done = self.loop.time(), self._progress()
            shared: dict[PeerConnection, list[str]] = {}
            for transfer in self._transfers():
                if transfer.is_waiting_here and done > seen:
                    transfer.moved_here()
                for conn in transfer.conns() if transfer.outcome is None else ():
                    shared.setdefault(conn, []).append(transfer.wire_name)
            for conn, names in shared.items():
                conn.post(ProgressMessage(transfers=list(dict.fromkeys(names)), done=done))
            seen = done
            self.wanted = {name: until_s for name, until_s in self.wanted.items() if until_s > now}
            await self._make_room(now)

    async def _make_room(self, now: float) -> None:
        """Evict idle prompts while other transfers wait for buffers: first those that no queued request
        wants, longest idle first. Then those of queued requests, from the end of the queue, until the rest
        fits ``QUEUE_SHARE`` of the slots.

        A prompt is kept for half of ``patience_s`` after it became idle, because its request may still be on
        the way. Keeping it longer would let the waiting transfers time out.
        """
        idle = {
            prompt.name: prompt.idle_since_s
            for prompt in self.prompts.values()
            if prompt.is_abandoned
            and prompt.idle_since_s is not None
            and now - prompt.idle_since_s >= self.limits.patience_s / 2
        }
        wanted = [name for name in self.wanted if name in idle and self.prompts[name].outcome is not None]
        unwanted = sorted((name for name in idle if name not in wanted), key=lambda name: idle[name])
        slots: set[BufferSlot] = set()
        beyond = []
        for name in wanted:
            slots.update(self.prompts[name].slots)
            if len(slots) > QUEUE_SHARE * self.limits.slots and name != wanted[0]:
                beyond.append(name)
        whys = [*((name, EVICTED_UNCLAIMED) for name in unwanted)]
        whys += [(name, EVICTED_LOW_PRIORITY) for name in reversed(beyond)]
        for name, why in whys:
            prompt = self.prompts.get(name)
            if prompt is not None and self.buffers.waiting:
                self.counts["prompts_evicted"] += 1
                await prompt.evicted(why)


def _check_keys(name: str, keys: Sequence[bytes]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"transfer {name!r} has {len(keys)} blocks, {len(set(keys))} of them distinct")


def link_stats(meter: LinkMeter, queued_s: float | None) -> dict[str, float | None]:
    return {"queued_bytes": meter.queued_bytes, "queued_s": queued_s, "moved_bytes": meter.moved_bytes}
