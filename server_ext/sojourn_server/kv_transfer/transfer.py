"""What all transfers have in common: a coroutine in the node's event loop, and a handle for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from ..kv_offload.block_file import KvIdentity
from ..metrics.rate_limited_log import RateLimitedLog
from .peer_connection import PeerConnection, PeerTable, TransferFailed
from .peer_transport import SocketStream
from .staging_buffers import BufferPool, BufferSlot
from .store_threads import StorageReads, StoreThreads
from .transfer_limits import TransferLimits
from .transfer_wire import DataMessage, WireMessage

logger = logging.getLogger(__name__)

GIVEN_UP = "the engine has given it up"
"""Reason of a transfer that its engine has cancelled, for example for an aborted request."""
STALLED = "the peer has sent nothing for too long"
LEASE_EXPIRED = "the lease on its buffers has expired"

ResultT = TypeVar("ResultT")


class TransferOutcome(NamedTuple):
    """How a transfer has ended."""

    good: int
    """Number of leading blocks that have arrived. The other blocks will not arrive."""
    why: str = ""
    """Why blocks are missing; empty if all have arrived."""


class TransferContext:
    """What the transfers of one engine share. Its event loop owns all of it, except ``changed``."""

    peers: PeerTable

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
        self._log = RateLimitedLog(logger)

    @property
    def moved(self) -> int:
        """A counter that grows whenever a transfer of this engine moves on."""
        return self.reads.moved_bytes + self.counts["bytes_sent"] + self.buffers.released

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

    def forget(self, transfer: Transfer) -> None:
        """Remove a transfer that has ended."""
        raise NotImplementedError

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferFailed):
            found = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(found))


class Transfer:
    """One transfer. The methods of the first section and ``outcome`` are for the engine's threads; all else
    belongs to the event loop."""

    kind = ""
    received_as = ""
    """Name of the count of received bytes."""

    def __init__(self, node: TransferContext, name: str) -> None:
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
        self._news: asyncio.Future[None] | None = None

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
        """Wait until ``wake`` is called. If a peer has a part in the transfer, raises ``TimeoutError`` after
        ``patience_s`` (``None``: ``lease_s``)."""
        self._news = self.node.loop.create_future()
        async with asyncio.timeout(None if self.conn is None else patience_s or self.node.limits.lease_s):
            await self._news

    def wake(self) -> None:
        """Let the coroutine look at its slots again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

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
        size = self.node.layer_bytes
        if len(payload) != len(message.indices) * size:
            return False
        for at, index in enumerate(message.indices):
            slot = self.awaited.get(index)
            if slot is None or slot.is_full or slot.filled != message.layer:
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
