"""What the transfers of one engine share: buffers, links, reads from storage, counters and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..kv_offload.block_file import KvIdentity
from ..metrics.rate_limited_log import RateLimitedLog
from .peer_connection import PeerStream, PeerTable, TransferFailed
from .staging_buffers import BufferPool, BufferSlot
from .transfer_limits import TransferLimits

logger = logging.getLogger(__name__)

GIVEN_UP = "the engine has given it up"
"""Reason of a transfer that its engine has cancelled, for example for an aborted request."""
STORAGE_HANGS = "storage has not answered"
NEWEST_READ_WEIGHT = 0.1
"""Weight of the newest read in the moving mean of the seconds of a read."""


class Storage(Protocol):
    """The store of blocks, as the event loop sees it (``StoreThreads``)."""

    def read(self, key: bytes, memory: memoryview) -> asyncio.Future[str | None]:
        """Read a block. The result is the reason of a failure, or ``None``."""
        ...

    async def look_up(self, keys: list[bytes]) -> int:
        """Return how many leading ``keys`` are stored."""
        ...


class StorageReads:
    """Reads blocks from storage into slots, in the order of requests, ``read_width`` at a time.

    A read that takes half of ``patience_s`` counts as failed, so that a peer that waits for the block learns
    of it before it gives up itself. Its slot stays pinned until the reader returns. If all readers hang, the
    queued reads fail too.
    """

    def __init__(self, node: TransferResources, storage: Storage) -> None:
        self.moved_bytes = 0
        self.block_s = 0.0
        """Mean seconds of the newest reads; 0 if there was none."""
        self.active: dict[BufferSlot, float] = {}
        """Slot whose read is under way → time at which it began."""
        self._node = node
        self._storage = storage
        self._width = node.limits.read_width
        self._queue: asyncio.Queue[BufferSlot] = asyncio.Queue()
        self._hung = 0
        self.tasks = [node.spawn(self._run()) for _ in range(self._width)]

    def __len__(self) -> int:
        return self._queue.qsize() + len(self.active)

    def put(self, slot: BufferSlot) -> None:
        """Queue a read of a slot's block."""
        if self._hung == self._width:
            self._node.buffers.fail(slot, STORAGE_HANGS)
        else:
            slot.filler = self
            self._queue.put_nowait(slot)

    def queued_s(self, now: float) -> float | None:
        """Return the estimated seconds until a new read begins; ``None`` if reads are queued and the speed is
        unknown. It is at least the time for which a read has hung, so that a hanging store is not chosen."""
        if len(self) and not self.block_s and not self._hung:
            return None
        began_s = min(self.active.values(), default=now)
        return max(len(self) * self.block_s / self._width, now - began_s if self._hung else 0.0)

    async def _run(self) -> None:
        node, loop = self._node, self._node.loop
        while True:
            slot = await self._queue.get()
            if slot.filler is not self:  # given up meanwhile
                continue
            slot.pins += 1
            self.active[slot] = began_s = loop.time()
            reading = self._storage.read(slot.key, slot.memory)
            await asyncio.wait({reading}, timeout=node.limits.patience_s / 2)
            if not reading.done():
                self._give_up(slot)
                await asyncio.wait({reading})
                self._hung -= 1
            took_s = loop.time() - began_s
            self.block_s += (took_s - self.block_s) * (NEWEST_READ_WEIGHT if self.block_s else 1.0)
            self.moved_bytes += slot.memory.nbytes
            del self.active[slot]
            self._ended(slot, reading.result())

    def _ended(self, slot: BufferSlot, why: str | None) -> None:
        self._node.counts["blocks_read" if why is None else "blocks_unread"] += 1
        slot.pins -= 1  # nothing writes to it any more
        if slot.filler is self:  # otherwise the read was given up
            if why is None:
                slot.advance(slot.layers)
            else:
                self._node.buffers.fail(slot, why)
        slot.pins += 1
        self._node.buffers.unpin(slot)

    def _give_up(self, slot: BufferSlot) -> None:
        """Give up a read that hangs, and all that are queued if no reader is left."""
        self._hung += 1
        failed = [slot]
        while self._hung == self._width and not self._queue.empty():
            failed.append(self._queue.get_nowait())
        for each in failed:
            if each.filler is self:
                self._node.counts["stalls"] += 1
                self._node.buffers.fail(each, STORAGE_HANGS)


class TransferResources:
    """What transfers use of their ``TransferNode``. Its event loop owns all of it, except ``changed``."""

    def __init__(
        self,
        identity: KvIdentity,
        limits: TransferLimits,
        *,
        name: str,
        epoch: str,
        storage: Storage,
        dial: Callable[[str], Coroutine[Any, Any, PeerStream]],
    ) -> None:
        """``epoch`` identifies one run of the process and is never reused. ``dial`` connects to an
        address."""
        self.identity = identity
        self.limits = limits
        self.name = name
        self.epoch = epoch
        self.dial = dial
        self.storage = storage
        self.layers = identity.layers
        self.layer_bytes = identity.block_bytes // identity.layers
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()
        """Guards what the engine's threads read of transfers; notified at each change."""
        self.is_closing = False
        self.buffers = BufferPool(limits.slots, identity.block_bytes, identity.layers)
        self.queued_send_bytes = 0
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[object]] = set()
        self._log = RateLimitedLog(logger)
        self.reads = StorageReads(self, storage)
        self.peers = PeerTable(self)

    def post(self, what: Callable[..., object], *arguments: object) -> bool:
        """Call ``what`` in the event loop, from any thread. Returns false if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(what, *arguments)
            return True
        return False

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Start a task. Its unexpected errors go to ``threading.excepthook``."""
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def received(self, conn: Any, message: Any, payload: bytes) -> None:
        """Handle a message of an identified peer."""
        raise NotImplementedError

    def lost(self, conn: Any, why: str) -> None:
        """Handle the end of a connection."""
        raise NotImplementedError

    def forget(self, transfer: object) -> None:
        """Remove a transfer that has ended."""
        raise NotImplementedError

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, but not the same one again and again."""
        self._log.log(logging.WARNING, message, *arguments)

    def _task_ended(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferFailed):
            found = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(found))
