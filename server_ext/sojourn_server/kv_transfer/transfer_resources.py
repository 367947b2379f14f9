"""What the transfers of one engine share: buffers, links, reads from storage, counters and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ..kv_offload.block_file import KvIdentity
from ..metrics.rate_limited_log import RateLimitedLog
from .peer_connection import PeerTable, TransferFailed
from .staging_buffers import BufferPool, BufferSlot
from .transfer_limits import TransferLimits

logger = logging.getLogger(__name__)

GIVEN_UP = "the engine has given it up"
"""Reason of a transfer that its engine has cancelled, for example for an aborted request."""
SPEED_SAMPLE_BYTES = 64 << 20
"""The speed of a link is a mean over about this many of its newest bytes."""
STORAGE_HANGS = "storage has not answered"
READ_AHEAD = 8
"""Number of blocks that a single reader gets at a time. Several readers get one each, so that reads begin in
the order of requests."""

ReadBlocks = Callable[[Sequence[tuple[bytes, memoryview]], Callable[[str | None], None]], None]
"""Starts to read blocks, given as (key, memory), one after the other. After each it calls the function in the
event loop, with the reason of a failure or ``None``. At most ``read_width`` calls are under way at a time."""


class LinkMeter:
    """Counts the bytes of a link to storage or to peers, and measures its speed."""

    def __init__(self) -> None:
        self.queued_bytes = self.moved_bytes = 0
        self._seconds = self._bytes = 0.0
        self._ended_s = -math.inf

    def moved(self, nbytes: int, began_s: float, now: float) -> None:
        """Record the end of a transfer of ``nbytes`` queued bytes, well or not. Time in which several
        transfers were under way counts once."""
        self.queued_bytes -= nbytes
        self.moved_bytes += nbytes
        kept = math.exp(-nbytes / SPEED_SAMPLE_BYTES)
        self._seconds = kept * self._seconds + now - max(began_s, self._ended_s)
        self._bytes = kept * self._bytes + nbytes
        self._ended_s = now

    def seconds_for(self, nbytes: int) -> float | None:
        """Return the seconds for ``nbytes`` at the measured speed; ``None`` if it is unknown."""
        if not nbytes:
            return 0.0
        return nbytes * self._seconds / self._bytes if self._seconds > 0 else None


class StorageReads:
    """Reads blocks from storage into slots, in the order of requests, ``width`` at a time.

    A read that takes half of ``patience_s`` counts as failed, so that a peer that waits for the block learns
    of it before it gives up itself. Its slot stays pinned until the reader returns. If all readers hang, the
    queued reads fail too.
    """

    def __init__(
        self,
        limits: TransferLimits,
        buffers: BufferPool,
        counts: Counter[str],
        read: ReadBlocks,
        spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[object]],
    ) -> None:
        self.meter = LinkMeter()
        self.active: dict[BufferSlot, float] = {}
        """Slot whose read is under way → time at which it began."""
        self._limits = limits
        self._buffers = buffers
        self._counts = counts
        self._read = read
        self._queue: asyncio.Queue[BufferSlot] = asyncio.Queue()
        self._hung: set[BufferSlot] = set()
        self.tasks = [spawn(self._run()) for _ in range(limits.read_width)]

    def __len__(self) -> int:
        return self._queue.qsize() + len(self.active)

    def put(self, slot: BufferSlot) -> None:
        """Queue a read of a slot's block."""
        if len(self._hung) == self._limits.read_width:
            self._buffers.fail(slot, STORAGE_HANGS)
            return
        slot.filler = self
        self.meter.queued_bytes += self._buffers.block_bytes
        self._queue.put_nowait(slot)

    def queued_s(self, now: float) -> float | None:
        """Return the estimated seconds until a new read begins; ``None`` if reads are queued and the speed is
        unknown. If reads hang, it is at least ``patience_s``; if all do, as long as the delay."""
        queued_s = self.meter.seconds_for(self.meter.queued_bytes)
        if not self._hung:
            return queued_s
        all_hang = len(self._hung) == self._limits.read_width
        return max(queued_s or 0.0, self._limits.patience_s, max(self.delays(now)) if all_hang else 0.0)

    def delays(self, now: float) -> list[float]:
        return [now - began_s for began_s in self.active.values()]

    async def _run(self) -> None:
        """Hand blocks to a reader: some at a time, so that it does not wait for the event loop after each."""
        loop, size = asyncio.get_running_loop(), self._buffers.block_bytes
        most = READ_AHEAD if self._limits.read_width == 1 else 1
        while True:
            slots = [await self._queue.get()]
            while len(slots) < most and not self._queue.empty():
                slots.append(self._queue.get_nowait())
            wanted = [slot for slot in slots if slot.filler is self]
            self.meter.queued_bytes -= size * (len(slots) - len(wanted))
            if not wanted:  # a reader of no blocks would never be free again
                continue
            for slot in wanted:
                slot.pins += 1
            results: asyncio.Queue[str | None] = asyncio.Queue()
            self._read([(slot.key, slot.memory) for slot in wanted], results.put_nowait)
            for at, slot in enumerate(wanted):
                self.active[slot] = began_s = loop.time()
                try:
                    async with asyncio.timeout(self._limits.patience_s / 2):
                        why = await results.get()
                except TimeoutError:
                    if results.empty():  # otherwise this process has paused
                        self._give_up(slot, wanted[at:])
                    why = await results.get()
                    self._hung.discard(slot)
                self.meter.moved(size, began_s, loop.time())
                del self.active[slot]
                self._ended(slot, why)

    def _ended(self, slot: BufferSlot, why: str | None) -> None:
        self._counts["blocks_read" if why is None else "blocks_unread"] += 1
        slot.pins -= 1  # nothing writes to it any more
        if slot.filler is self:  # otherwise the read was given up
            if why is None:
                slot.advance(slot.layers)
            else:
                self._buffers.fail(slot, why)
        slot.pins += 1
        self._buffers.unpin(slot)

    def _give_up(self, slot: BufferSlot, behind: list[BufferSlot]) -> None:
        """Give up a read that hangs, and those behind it in the same reader."""
        self._hung.add(slot)
        if len(self._hung) == self._limits.read_width:
            while not self._queue.empty():
                behind.append(self._queue.get_nowait())
                self.meter.queued_bytes -= self._buffers.block_bytes
        for each in behind:
            if each.filler is self:
                self._counts["stalls"] += 1
                self._buffers.fail(each, STORAGE_HANGS)


class TransferResources:
    """What transfers use of their ``TransferNode``. Its event loop owns all of it, except ``changed``."""

    peers: PeerTable

    def __init__(
        self,
        identity: KvIdentity,
        limits: TransferLimits,
        name: str,
        read: ReadBlocks,
        look_up: Callable[[Sequence[bytes]], Awaitable[int]],
    ) -> None:
        self.name = name
        self.look_up = look_up
        """Returns how many leading blocks of a list the store has."""
        self.identity = identity
        self.limits = limits
        self.layers = identity.layers
        self.layer_bytes = identity.block_bytes // identity.layers
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()
        """Guards what the engine's threads read of transfers; notified at each change."""
        self.is_closing = False
        self.buffers = BufferPool(limits.slots, identity.block_bytes, identity.layers)
        self.sending = LinkMeter()
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[object]] = set()
        self._log = RateLimitedLog(logger)
        self.reads = StorageReads(limits, self.buffers, self.counts, read, self.spawn)

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

    def forget(self, transfer: object) -> None:
        """Remove a transfer that has ended."""
        raise NotImplementedError

    def remember(self, transfer: str, why: str) -> None:
        """Keep the reason why a prompt is gone, so that a later ``expect`` of it fails at once."""
        raise NotImplementedError

    def log_failure(self, what: str, name: str, why: str) -> None:
        """Log why a transfer has ended without all its blocks."""
        # Not logged: an engine has cancelled the transfer, or a logged refusal has ended it. A peer's abort
        # contains the peer's reason.
        if not self.is_closing and GIVEN_UP not in why and why not in self.peers.refusals:
            message = "%s: a %s of KV (%s) failed, so missing blocks are computed: %s"
            self._log.log(logging.WARNING, message, self.name, what, name, why)

    def _task_ended(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TransferFailed):
            found = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(found))
