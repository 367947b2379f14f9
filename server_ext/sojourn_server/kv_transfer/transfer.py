"""The transfers of one engine in one event loop: their tables and buffers, and the coroutine of each.

A transfer is a load, a push, or a prompt that a peer sends. The node starts it, hands it the messages of its
peer, and finds out whether peers are alive. Nothing here opens a socket or a file, or has a clock other than
the loop's: tests run two nodes in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..kv_offload.shared_store import KvIdentity
from ..metrics.rate_limited_log import RateLimitedLog
from .peer_connection import PeerConnection, PeerTable, TransferFailed
from .peer_transport import SocketStream
from .staging_buffers import BufferPool, BufferSlot, TransferLimits
from .store_threads import StorageReads, StoreThreads
from .transfer_wire import (
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    PingMessage,
    ReadMessage,
    TransferMessage,
    WireMessage,
)

logger = logging.getLogger(__name__)

GIVEN_UP = "the engine has given it up"
"""Reason of a transfer that its engine has cancelled, for example for an aborted request."""
STALLED = "the peer has sent nothing for too long"
LEASE_EXPIRED = "the lease on its buffers has expired"
UNEXPECTED_DATA = "the peer sent unexpected data"
COMPUTE_LEASES = 4
"""A live peer may compute for so many times ``lease_s`` between its read and its offer of a prompt."""
CLOSE_GRACE_S = 1.0
"""Maximum seconds for sending the last messages when the node closes."""
CLOSING = "the engine is closing"
EVICTED = "evicted before any request asked for it: other transfers waited for its buffers"
PINGS = 4
"""A peer that has not answered so many pings counts as dead. They are counted, so that a pause of this
process is not taken for a dead peer."""

ResultT = TypeVar("ResultT")


class TransferOutcome(NamedTuple):
    """How a transfer has ended."""

    good: int
    """Number of leading blocks that have arrived. The other blocks will not arrive."""
    why: str = ""
    """Why blocks are missing; empty if all have arrived."""


class ReadingPeer(NamedTuple):
    """A peer that reads blocks from storage for this engine."""

    address: str
    total: int
    """Number of blocks of the whole prompt, for which the peer reserves buffers."""


class TransferNode:
    """All transfers of one engine, and what they share. Create it in its event loop, which owns all of it
    except ``changed``. ``load``, ``offer``, ``expect``, ``give_up`` and ``post`` are also for other threads.
    The first three raise ``ValueError`` once the node is closing."""

    def __init__(
        self,
        identity: KvIdentity,
        limits: TransferLimits,
        *,
        name: str,
        storage: StoreThreads,
        dial: Callable[[str], Coroutine[Any, Any, SocketStream]],
    ) -> None:
        """``name``: this engine's name, for peers and logs. ``dial`` connects to an address."""
        self.identity = identity
        self.limits = limits
        self.name = name
        self.storage = storage
        self.dial = dial
        self.layers = identity.layers
        self.layer_bytes = identity.block_bytes // identity.layers
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()
        """Guards what the engine's threads read of transfers; notified at each change."""
        self.is_closing = False
        self.buffers = BufferPool(limits.slots, identity.block_bytes, identity.layers)
        self.reads = StorageReads(storage, self.buffers, limits, self.counts)
        self.queued_send_bytes = 0
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.loads: set[Transfer] = set()
        self.fetches: dict[str, BlockLoad] = {}
        """Transfer → the load whose blocks a peer reads for it."""
        self.pushes: dict[str, BlockPush] = {}
        self.prompts: dict[str, IncomingPrompt] = {}
        """Prompts that peers send, or that the engine expects. Guarded by ``changed``."""
        self.peers = PeerTable(self)
        self._log = RateLimitedLog(logger)
        self._services = [self.spawn(self.reads.run()), self.spawn(self._beat())]

    # -- what the engine asks for -----------------------------------------------------

    def load(self, name: str, keys: Sequence[bytes], peer: ReadingPeer | None = None) -> BlockLoad:
        """Start to load the leading blocks of ``keys`` that are stored, from storage or through a ``peer``
        that reads them for the transfer ``name``. Returns a handle to wait for them; its ``end`` must be
        called. If a peer reads for another load of the transfer, this engine reads the blocks."""
        load = BlockLoad(self, name, keys, peer)
        self._post_start(self._start_load, load)
        return load

    def offer(self, transfer: str, address: str, keys: Sequence[bytes]) -> BlockPush:
        """Start to push a prompt, whose Full Blocks are ``keys``, to the peer at ``address``; the handle's
        ``give`` adds the layers. A push of a transfer that is open already fails."""
        push = BlockPush(self, transfer, address, keys)
        self._post_start(self._start_push, push)
        return push

    def give_up(self, transfer: str, address: str) -> None:
        """End the push of a prompt, or tell the peer at ``address``, which may have read for it, that there
        will be none."""
        self.post(lambda: self.spawn(self._give_up(transfer, address)))

    def expect(self, transfer: str) -> IncomingPrompt:
        """Announce that the engine needs a prompt that a peer pushes to it, and return a handle to wait for
        it; its ``end`` must be called. Until then a complete prompt stays in the buffers. Raises
        ``ValueError`` if the prompt is expected already."""
        with self.changed:
            prompt = self.prompts.get(transfer)
            if prompt is not None and prompt.is_expected:
                raise ValueError(f"transfer {transfer!r} is expected already")
            if prompt is None or prompt.is_ending:
                prompt = self.prompts[transfer] = IncomingPrompt(self, transfer)
            prompt.is_expected = True
        self._post_start(prompt.expected)
        return prompt

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
        await asyncio.sleep(0)  # the others are cancelled with the loop

    @property
    def is_clean(self) -> bool:
        """Whether nothing is open, and no buffer or queued read is left over."""
        return not (self._transfers() or len(self.reads) or self.buffers.used or self.buffers.waiting)

    # -- for transfers and connections ------------------------------------------------

    def forget(self, transfer: Transfer) -> None:
        """Remove a transfer that has ended."""
        self.loads.discard(transfer)
        tables: tuple[dict[str, Any], ...] = (self.fetches, self.pushes, self.prompts)
        with self.changed:
            for table in tables:
                if table.get(transfer.name) is transfer:
                    del table[transfer.name]

    def received(self, conn: PeerConnection, message: AnyWireMessage, payload: bytes) -> None:
        """Handle a message of an identified peer."""
        if isinstance(message, PingMessage):
            if not message.is_answer:
                conn.post(PingMessage(is_answer=True))
        elif isinstance(message, ReadMessage | OfferMessage):
            self._asked(conn, message)
        elif isinstance(message, TransferMessage):
            name = message.transfer
            parts = self.fetches.get(name), self.pushes.get(name), self.prompts.get(name)
            shared = [part for part in parts if part is not None and part.conn is conn]
            self.counts["stray"] += not shared  # sent before the peer learned of the end
            for each in shared:
                each.received(message, payload)
        else:
            self.peers.drop(conn, f"{type(message).__name__} is not allowed here now")

    def lost(self, conn: PeerConnection, why: str) -> None:
        """Handle the end of a connection."""
        for transfer in self._transfers():
            if transfer.conn is conn:
                transfer.lost(why)

    @property
    def moved(self) -> int:
        """A counter that grows whenever a transfer of this engine moves on."""
        return self.reads.ended + self.counts["bytes_sent"] + self.buffers.released

    def post(self, what: Callable[..., object], *arguments: object) -> bool:
        """Call ``what`` in the event loop, from any thread. Returns false if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(what, *arguments)
            return True
        return False

    def spawn(self, coroutine: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a task. Its unexpected errors go to ``threading.excepthook``."""
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, but not the same one again and again."""
        self._log.log(logging.WARNING, message, *arguments)

    # -- inside -----------------------------------------------------------------------

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferFailed):
            found = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(found))

    def _transfers(self) -> list[Transfer]:
        with self.changed:
            return [*self.loads, *self.pushes.values(), *self.prompts.values()]

    def _post_start(self, start: Callable[..., None], *arguments: object) -> None:
        if self.is_closing or not self.post(start, *arguments):
            raise ValueError(f"the transfer manager of {self.name} is closed")

    def _start_load(self, load: BlockLoad) -> None:
        if load.name in self.fetches:
            load.peer = None
        if load.peer is not None:
            self.fetches[load.name] = load
        self.loads.add(load)
        load.start()

    def _start_push(self, push: BlockPush) -> None:
        if push.name in self.pushes:
            push.finish(TransferOutcome(0, f"transfer {push.name!r} was offered already"))
        else:
            self.pushes[push.name] = push
            push.start()

    async def _give_up(self, transfer: str, address: str) -> None:
        push = self.pushes.get(transfer)
        if push is not None:
            push.stop(GIVEN_UP)
        else:
            conn = await self.peers.reach(address)
            conn.post(AbortMessage(transfer=transfer, reason=GIVEN_UP))

    def _asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        if self.is_closing:
            conn.post(AbortMessage(transfer=message.transfer, reason=CLOSING))
        else:
            with self.changed:
                prompt = self.prompts.get(message.transfer) or IncomingPrompt(self, message.transfer)
                self.prompts[message.transfer] = prompt
            prompt.asked(conn, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.limits.patience_s / PINGS)
            self.loop.call_soon(self._ping_peers)  # the loop logs an error of either, and the beat goes on
            self.loop.call_soon(self._make_room)

    def _ping_peers(self) -> None:
        """Close the connections of peers that do not answer, while a transfer or a message waits for them."""
        in_use = {transfer.conn for transfer in self._transfers()}
        for conn in list(self.peers.conns):
            if conn.unanswered >= PINGS:
                self.counts["stalls"] += 1
                self.peers.drop(conn, "the peer does not answer")
            elif conn in in_use or conn.sending.locked():
                conn.unanswered += 1
                conn.post(PingMessage())

    def _make_room(self) -> None:
        """While a transfer waits for buffers, evict prompts that no request has asked for, the longest
        complete first. A prompt is kept for half of ``patience_s``, because its request may still be on the
        way."""
        lacking = self.buffers.lacking
        until_s = self.loop.time() - self.limits.patience_s / 2
        with self.changed:
            prompts = sorted(self.prompts.values(), key=lambda each: each.complete_since_s or 0.0)
        for prompt in prompts:
            if prompt.is_abandoned and lacking > 0 and (prompt.complete_since_s or 0.0) <= until_s:
                self.counts["prompts_evicted"] += 1
                lacking -= len(prompt.slots)
                prompt.stop(EVICTED)


class Transfer:
    """One transfer. The methods of the first section and ``outcome`` are for the engine's threads; all else
    belongs to the event loop."""

    kind = ""
    received_as = ""
    """Name of the count of received bytes."""

    def __init__(self, node: TransferNode, name: str) -> None:
        self.name = name
        self.outcome: TransferOutcome | None = None
        """Outcome of the transfer; ``None`` while it is open."""
        self.node = node
        self.conn: PeerConnection | None = None
        """Connection over which the transfer waits for a peer, or a peer waits for it."""
        self.slots: list[BufferSlot] = []
        """Slots of the blocks, in order. Empty before they are leased and after they are released."""
        self.awaited: dict[int, BufferSlot] = {}
        """Slots of the blocks that the peer is to send, by their index in its messages."""
        self._leased: list[BufferSlot] = []
        self._has_begun = False
        self._why_ended: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    # -- for the engine's threads -----------------------------------------------------

    def blocks(self) -> list[memoryview]:
        """Return the leading blocks that have arrived, valid until ``end``. Empty while the transfer is open,
        and after it has failed or has released its buffers."""
        with self.node.changed:
            return (
                [slot.memory for slot in self.slots[: self.outcome.good]] if self.outcome is not None else []
            )

    def ready(self, layerwise: bool) -> int | None:
        """Return how many leading blocks a request can use now; ``None`` if it must wait until the transfer
        is over. ``layerwise``: blocks can be used once their first layer has arrived."""
        return None if self.outcome is None else len(self.blocks())

    def end(self) -> None:
        """End the transfer, whether or not its blocks have arrived, and release its buffers."""
        self.node.post(self.stop, GIVEN_UP)

    # -- what each kind of transfer supplies ------------------------------------------

    async def run(self) -> None:
        """Do the transfer, and keep its blocks until they are not needed any more."""
        raise NotImplementedError

    def received(self, message: WireMessage, payload: bytes) -> None:
        """Handle a message of the peer. Messages that are not for this side of a transfer are ignored,
        because an engine may have both sides of transfers with one id."""
        raise NotImplementedError

    def ended(self, why: str) -> None:
        """Handle the end of ``run``. ``why``: the reason of a failure, or why the transfer was stopped."""
        raise NotImplementedError

    def lost(self, why: str) -> None:
        """Handle the end of the connection, or an abort by the peer, which is not told of the end."""
        self.conn = None
        self.stop(why)

    # -- life -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the coroutine, unless it runs or has been stopped."""
        if self._task is None and not self.is_ending:
            self._task = self.node.spawn(self._live())

    @property
    def is_ending(self) -> bool:
        """Whether the buffers are released, or will be soon."""
        return self._why_ended is not None

    def stop(self, why: str) -> None:
        """End the transfer for the reason ``why``. Does nothing if it is ending already."""
        if self._why_ended is None:
            self._why_ended = why
            if self._task is not None:
                self._task.cancel()  # at once, so that it does not end well before it is cancelled
            if not self._has_begun:
                self._end(why)

    async def _live(self) -> None:
        self._has_begun, why = True, "an error of sojourn"
        try:
            await self.run()
            why = ""
        except asyncio.CancelledError:
            why = self._why_ended or GIVEN_UP
        except TimeoutError:
            self.node.counts["stalls"] += 1
            why = STALLED
        except TransferFailed as error:
            why = str(error)
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self._why_ended = why
        self.ended(why)
        self.finish(TransferOutcome(0, why))
        with self.node.changed:
            self.slots = []
        self.node.buffers.release(self._leased)
        self.node.forget(self)

    def finish(self, outcome: TransferOutcome) -> None:
        """Report the outcome to the engine, if there is none yet."""
        if self.outcome is None:
            with self.node.changed:
                self.outcome = outcome
                self.node.changed.notify_all()
            if outcome.why and not self.node.is_closing and GIVEN_UP not in outcome.why:
                message = "%s: a %s of KV (%s) failed, so missing blocks are computed: %s"
                self.node.warn(message, self.node.name, self.kind, self.name, outcome.why)

    async def news(self, patience_s: float | None = None) -> None:
        """Wait for a call of ``wake`` since the last wait. If a peer has a part in the transfer, raises
        ``TimeoutError`` after ``patience_s`` (``None``: ``lease_s``)."""
        async with asyncio.timeout(None if self.conn is None else patience_s or self.node.limits.lease_s):
            await self._news.wait()
        self._news.clear()

    def wake(self) -> None:
        """Let the coroutine look at its slots again."""
        self._news.set()

    # -- buffers and messages -----------------------------------------------------------

    async def lease_slots(self, count: int, patience_s: float) -> list[BufferSlot]:
        """Wait for buffers, as long as any transfer of this engine moves on in ``patience_s`` seconds."""
        node = self.node
        if count > node.limits.slots:
            node.counts["too_large"] += 1
            raise TransferFailed(
                f"a context of {count} Full Blocks does not fit buffers of {node.limits.slots}; make them "
                "larger"
            )
        granted = node.buffers.lease(count)
        try:
            while not granted.done():
                moved = node.moved
                await asyncio.wait({granted}, timeout=patience_s)
                if node.moved == moved and not granted.done():
                    node.counts["leases_expired"] += 1
                    raise TransferFailed(LEASE_EXPIRED)
        finally:
            self._leased = node.buffers.end_wait(granted)
        return list(self._leased)

    def was_read(self, slot: BufferSlot, why: str | None) -> None:
        """Handle the end of a read from storage. ``why``: the reason of its failure."""
        if not slot.why:  # otherwise the read was given up
            slot.filled, slot.why = (slot.layers, "") if why is None else (0, why)
            self.wake()

    def take(self, message: DataMessage, payload: bytes) -> bool:
        """Copy one received layer of some blocks. Returns false for a wrong size, a block that is not
        awaited, or a layer that is not the next of its block."""
        size, is_whole = self.node.layer_bytes, len(payload) == len(message.indices) * self.node.layer_bytes
        for at, index in enumerate(message.indices):
            slot = self.awaited.get(index)
            if not is_whole or slot is None or slot.is_full or slot.filled != message.layer:
                self.node.counts["out_of_order"] += 1
                return False
            slot.layer(message.layer)[:] = payload[at * size : (at + 1) * size]
            slot.filled += 1
            self.node.counts[f"bytes_{self.received_as}"] += size
        self.wake()
        return True

    async def send_layer(
        self, conn: PeerConnection, transfer: str, layer: int, blocks: Sequence[tuple[int, memoryview]]
    ) -> None:
        """Send one layer of some blocks to a peer, in chunks. ``blocks``: (index within the transfer, memory
        of the layer)."""
        node, size = self.node, self.node.layer_bytes
        per = max(1, node.limits.chunk_bytes // size)
        for start in range(0, len(blocks), per):
            part = blocks[start : start + per]
            message = DataMessage(transfer=transfer, layer=layer, indices=[index for index, _ in part])
            node.queued_send_bytes += len(part) * size
            try:
                await conn.send(message, [memory.cast("B") for _, memory in part])
                node.counts["bytes_sent"] += len(part) * size
            finally:
                node.queued_send_bytes -= len(part) * size


class BlockLoad(Transfer):
    """A load of the leading blocks that the store has into this engine's buffers. If the peer that reads them
    fails before each has its first layer, this engine reads the missing blocks. Later they stay missing,
    because a step may already wait for layers."""

    kind = "load"
    received_as = "fetched"

    def __init__(
        self, node: TransferNode, name: str, keys: Sequence[bytes], peer: ReadingPeer | None
    ) -> None:
        self.keys = list(keys)
        self.peer = peer
        self.layers_loaded = 0
        """Number of leading layers that have arrived for all blocks that the load still expects."""
        super().__init__(node, name)

    # -- for the engine's threads -----------------------------------------------------

    def ready(self, layerwise: bool) -> int | None:
        with self.node.changed:
            if self.outcome is None and layerwise and self.layers_loaded:
                return len(self.slots)
        return super().ready(layerwise)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> list[memoryview]:
        """Wait for a layer or the end of the load, at most ``timeout_s`` seconds (``None``: without limit).
        Returns the layer of each block of the load; empty if it has not arrived."""
        with self.node.changed:
            self.node.changed.wait_for(
                lambda: self.layers_loaded > layer or self.outcome is not None, timeout_s
            )
            return [slot.layer(layer) for slot in self.slots] if self.layers_loaded > layer else []

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node, why = self.node, ""
        self.keys = self.keys[: node.limits.slots]
        self.keys = self.keys[: await node.storage.look_up(self.keys)]
        if not self.keys:
            self.finish(TransferOutcome(0))
            return
        self.slots = await self.lease_slots(len(self.keys), node.limits.lease_s)
        if self.peer is not None:
            await self._fetch_from(self.peer)
        else:
            for slot, key in zip(self.slots, self.keys, strict=True):
                node.reads.put(slot, key, self.was_read)
        for layer in range(node.layers):
            place = 0
            while place < len(self.slots):
                slot = self.slots[place]
                if slot.filled > layer:
                    place += 1
                elif slot.why:
                    why = slot.why
                    self._cut(place)
                else:
                    try:  # once a layer has arrived, a step of the engine may wait for the next
                        await self.news(node.limits.patience_s if layer else None)
                    except TimeoutError:
                        node.counts["stalls"] += 1
                        self._give_up_peer(STALLED)
            with node.changed:
                self.layers_loaded += bool(self.slots)
                node.changed.notify_all()
        node.counts["loads_short" if why else "loads_whole"] += 1
        self.finish(TransferOutcome(len(self.slots), why))
        await node.loop.create_future()  # until ``end``

    def ended(self, why: str) -> None:
        if self.outcome is None and why == GIVEN_UP:
            self.node.counts["loads_aborted"] += 1
        if self.conn is not None:
            self.conn.post(FailedMessage(transfer=self.name, index=0, reason=why))

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage):
            if not self.take(message, payload):
                self._give_up_peer(UNEXPECTED_DATA)
        elif isinstance(message, FailedMessage | AbortMessage):
            self._not_sent(message.index if isinstance(message, FailedMessage) else 0, message.reason)
        last = next(reversed(self.awaited.values()), None)
        if last is None or last.is_full:  # layers are sent in order
            self.conn = None

    def lost(self, why: str) -> None:
        self.conn = None
        self._not_sent(0, why)

    async def _fetch_from(self, peer: ReadingPeer) -> None:
        """Ask a peer to read the blocks and send them."""
        self.awaited = dict(enumerate(self.slots))
        try:
            self.conn = await self.node.peers.reach(peer.address)
            total = max(peer.total, len(self.keys))
            await self.conn.send(ReadMessage(transfer=self.name, keys=self.keys, total=total))
        except TransferFailed as error:
            self.lost(str(error))

    def _not_sent(self, first: int, why: str) -> None:
        """Give up the blocks from index ``first`` on that the peer has not sent, for the reason ``why``. Read
        them here if no layer is in use."""
        for index in [index for index in self.awaited if index >= first]:
            slot = self.awaited.pop(index)
            if not slot.filled and not self.layers_loaded:
                self.node.counts["blocks_read_instead"] += 1
                self.node.reads.put(slot, self.keys[index], self.was_read)
            elif not slot.is_full:
                slot.why = why
        self.wake()

    def _give_up_peer(self, why: str) -> None:
        """End the peer's part of the transfer."""
        if self.conn is not None:
            self.conn.post(FailedMessage(transfer=self.name, index=0, reason=why))
        self.lost(why)

    def _cut(self, place: int) -> None:
        """Release the blocks from index ``place`` on, which are useless."""
        with self.node.changed:
            dropped, self.slots = self.slots[place:], self.slots[:place]
        self.node.buffers.release(dropped)


class BlockPush(Transfer):
    """A push of a prompt's blocks to a peer."""

    kind = "push"

    def __init__(self, node: TransferNode, name: str, address: str, keys: Sequence[bytes]) -> None:
        self.keys = list(keys)
        self._inbox: asyncio.Queue[NeedMessage | CompleteMessage | int] = asyncio.Queue()
        """Answers of the peer, and numbers of layers that the engine has given."""
        self.announced = 0
        """Number of layers that the engine has begun to ``give``. Belongs to the engine's thread."""
        self._address = address
        self._layers: list[Sequence[memoryview]] = []
        """The layers given so far, each with one buffer per offered block."""
        super().__init__(node, name)

    def give(self, layer: int, blocks: Sequence[memoryview]) -> None:
        """Add the next layer of all blocks, from the engine's threads. The memory of ``blocks`` must be
        contiguous, and must not change until ``outcome`` is set."""
        if self.outcome is not None:
            return
        assert layer == len(self._layers) < self.node.layers
        assert [block.nbytes for block in blocks] == [self.node.layer_bytes] * len(self.keys)
        self._layers.append(blocks)
        self.node.post(self._inbox.put_nowait, layer)

    async def run(self) -> None:
        self.node.counts["pushes"] += 1
        self.conn = conn = await self.node.peers.reach(self._address)
        await conn.send(OfferMessage(transfer=self.name, keys=self.keys))
        needed: set[int] = set()
        given = 0
        while True:
            async with asyncio.timeout(self.node.limits.lease_s):
                event = await self._inbox.get()
            if isinstance(event, CompleteMessage):
                self.finish(TransferOutcome(len(self.keys)))
                return
            if isinstance(event, int):
                given = event + 1
                await self._send(conn, [event], needed)
                continue
            added = set(event.indices) - needed
            needed |= added
            await self._send(conn, range(given), added)

    async def _send(self, conn: PeerConnection, layers: Iterable[int], indices: Collection[int]) -> None:
        async with conn.lane:
            for layer in layers if indices else ():
                blocks = [(index, self._layers[layer][index]) for index in sorted(indices)]
                await self.send_layer(conn, self.name, layer, blocks)
                self.node.counts["bytes_pushed"] += len(blocks) * self.node.layer_bytes

    def ended(self, why: str) -> None:
        self.node.counts["pushes_failed" if why else "pushes_complete"] += 1
        if why and self.conn is not None:
            self.conn.post(AbortMessage(transfer=self.name, reason=why))

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, NeedMessage | CompleteMessage):
            self._inbox.put_nowait(message)
        elif isinstance(message, AbortMessage):
            self.lost(message.reason)


class IncomingPrompt(Transfer):
    """One prompt that a peer sends to this engine."""

    kind = "prompt"
    received_as = "taken"

    def __init__(self, node: TransferNode, name: str) -> None:
        self.is_expected = False
        """Whether the engine waits for the prompt. Set by ``TransferNode.expect``, in any thread."""
        self.complete_since_s: float | None = None
        self.keys: list[bytes] = []
        """Keys of the blocks, in order."""
        self._inbox: asyncio.Queue[ReadMessage | OfferMessage] = asyncio.Queue()
        self._asked: set[type] = set()
        """Kinds of the messages that the peer has sent, each at most once."""
        self._read: dict[bytes, BufferSlot] = {}
        """Slots of the blocks that are read from storage."""
        super().__init__(node, name)

    # -- what the engine and the peer ask for --------------------------------------------

    def expected(self) -> None:
        """Fail if the peer does not offer the prompt within ``patience_s`` seconds from now."""
        self.start()
        self.node.loop.call_later(self.node.limits.patience_s, self._check_offer)

    @property
    def is_abandoned(self) -> bool:
        """Whether the prompt may be evicted: it is complete, and the engine does not wait for it."""
        return self.complete_since_s is not None and not self.is_expected and not self.is_ending

    def asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        """Handle a request of a peer, or tell the peer why it is refused."""
        if self.is_ending or OfferMessage in self._asked or type(message) in self._asked:
            conn.post(AbortMessage(transfer=self.name, reason="the transfer is in progress already"))
        elif self.conn not in (None, conn):
            conn.post(AbortMessage(transfer=self.name, reason="another engine sends the prompt"))
        else:
            self.conn = conn
            self._asked.add(type(message))
            self._inbox.put_nowait(message)
            self.start()

    def received(self, message: WireMessage, payload: bytes) -> None:
        if isinstance(message, DataMessage):
            if not self.take(message, payload):
                self.stop(UNEXPECTED_DATA)
        elif isinstance(message, AbortMessage):
            self.lost(message.reason)
        elif isinstance(message, FailedMessage) and OfferMessage not in self._asked:
            self.lost(message.reason)  # the peer needs no read any more

    # -- the coroutine ----------------------------------------------------------------

    async def run(self) -> None:
        node = self.node
        while True:
            async with asyncio.timeout(COMPUTE_LEASES * node.limits.lease_s):
                message = await self._inbox.get()
            if isinstance(message, OfferMessage):
                break
            await self._stream(message)
        await self._take_offer(message)
        self.conn = None
        self.finish(TransferOutcome(len(self.slots)))
        node.counts["prompts_complete"] += 1
        self.complete_since_s = node.loop.time()
        while True:
            await asyncio.sleep(node.limits.lease_s)
            if not self.is_expected:
                node.counts["leases_expired"] += 1
                raise TransferFailed(LEASE_EXPIRED)

    def ended(self, why: str) -> None:
        self.node.counts["prompts_failed"] += self.outcome is None
        if self.conn is not None:
            self.conn.post(AbortMessage(transfer=self.name, reason=why))

    def _check_offer(self) -> None:
        if OfferMessage not in self._asked and not self.is_ending:
            self.node.counts["stalls"] += 1
            self.stop(STALLED)

    async def _stream(self, message: ReadMessage) -> None:
        """Read blocks from storage and send them to the peer."""
        conn = self.conn
        assert conn is not None
        total = max(message.total, len(message.keys))
        self.slots = await self.lease_slots(total, self.node.limits.patience_s)
        self._read = dict(zip(message.keys, self.slots, strict=False))
        for key, slot in self._read.items():
            self.node.reads.put(slot, key, self.was_read)
        good = []
        for place, slot in enumerate(self._read.values()):
            while not slot.is_full and not slot.why:
                await self.news()
            if slot.why:
                conn.post(FailedMessage(transfer=self.name, index=place, reason=slot.why))
                break  # the blocks after it stay here, because the peer offers them once it has computed them
            good.append(slot)
        async with conn.lane:
            for layer in range(self.node.layers) if good else ():
                blocks = [(index, slot.layer(layer)) for index, slot in enumerate(good)]
                await self.send_layer(conn, self.name, layer, blocks)
                self.node.counts["bytes_streamed"] += len(blocks) * self.node.layer_bytes

    async def _take_offer(self, offer: OfferMessage) -> None:
        """Take the offered blocks: ask for those that are missing, and wait for all."""
        conn, self.keys = self.conn, offer.keys
        assert conn is not None
        free = self.slots[len(self._read) :]
        new = [key for key in self.keys if key not in self._read]
        if not self.slots:
            free = await self.lease_slots(len(new), self.node.limits.patience_s)
        slots = {**self._read, **dict(zip(new, free, strict=False))}
        self.slots = [slots[key] for key in self.keys]
        self.node.counts["blocks_offered"] += len(self.slots)
        self._need(conn, [index for index, key in enumerate(self.keys) if key not in self._read])
        for index, slot in enumerate(self.slots):
            while not slot.is_full:
                if slot.why and index not in self.awaited:  # its read has failed
                    if slot.is_written:
                        raise TransferFailed(f"a block did not arrive: {slot.why}")
                    self._need(conn, [index])
                await self.news()
        conn.post(CompleteMessage(transfer=self.name))

    def _need(self, conn: PeerConnection, indices: list[int]) -> None:
        self.awaited |= {index: self.slots[index] for index in indices}
        self.node.counts["blocks_needed"] += len(indices)
        conn.post(NeedMessage(transfer=self.name, indices=indices))
