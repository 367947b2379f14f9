"""Threads that read blocks from the store, look them up, and write blocks to it, and the queue of reads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ..kv_offload.shared_store import SharedStore
from ..kv_offload.transfer_thread import TransferThread
from .staging_buffers import BufferPool, BufferSlot, TransferLimits

LOOKUP_BATCH_KEYS = 16
"""Number of block keys per lookup in the store. The store counts as hung if a lookup takes ``patience_s``."""

MAX_KNOWN_KEYS = 1 << 17
"""Maximum number of keys that are known to be stored. Blocks of older keys are copied once more."""

STORAGE_HANGS = "storage has not answered"
NEWEST_READ_WEIGHT = 0.1
"""Weight of the newest read in the moving mean of the seconds of a read."""

ReadEnded = Callable[[BufferSlot, str | None], None]
"""Function that is called when a read ends, with the reason of a failure."""
ResultT = TypeVar("ResultT")


class StorageReads:
    """Reads blocks from storage into slots, one at a time, in the order of requests.

    A read that takes half of ``patience_s`` counts as failed, and with it all that are queued until it
    returns. Its slot stays in use until then.
    """

    def __init__(
        self, storage: StoreThreads, buffers: BufferPool, limits: TransferLimits, counts: Counter[str]
    ) -> None:
        self.block_s = 0.0
        """Mean seconds of the newest reads; 0 if there was none."""
        self._storage = storage
        self._buffers = buffers
        self._limits = limits
        self._counts = counts
        self._queue: asyncio.Queue[tuple[BufferSlot, bytes, ReadEnded]] = asyncio.Queue()
        self._began_s: float | None = None
        """Time at which the present read began."""
        self._hangs = False

    def __len__(self) -> int:
        return self._queue.qsize() + (self._began_s is not None)

    @property
    def ended(self) -> int:
        """Number of blocks that have been read, or could not be read."""
        return self._counts["blocks_read"] + self._counts["blocks_unread"]

    def put(self, slot: BufferSlot, key: bytes, ended: ReadEnded) -> None:
        """Queue a read of a block into a slot."""
        if self._hangs:
            ended(slot, STORAGE_HANGS)
        else:
            self._queue.put_nowait((slot, key, ended))

    def queued_s(self, now: float) -> float | None:
        """Return the estimated seconds until a new read begins; ``None`` if reads are queued and the speed is
        unknown. It is at least the time for which a read has hung, so that a hanging store is not chosen."""
        hung_s = now - self._began_s if self._hangs and self._began_s is not None else 0.0
        if len(self) and not self.block_s and not self._hangs:
            return None
        return max(len(self) * self.block_s, hung_s)

    async def run(self) -> None:
        """Carry out the reads."""
        loop = asyncio.get_running_loop()
        while True:
            slot, key, ended = await self._queue.get()
            if not slot.is_leased:  # given up meanwhile
                continue
            slot.is_written = True
            began_s = self._began_s = loop.time()
            reading = self._storage.read(key, slot.memory)
            await asyncio.wait({reading}, timeout=self._limits.patience_s / 2)
            if not reading.done():
                self._hangs = True
                self._counts["stalls"] += 1
                ended(slot, STORAGE_HANGS)
                while not self._queue.empty():
                    behind, _, its_end = self._queue.get_nowait()
                    its_end(behind, STORAGE_HANGS)
                await asyncio.wait({reading})
                self._hangs = False
            took_s = loop.time() - began_s
            self.block_s += (took_s - self.block_s) * (NEWEST_READ_WEIGHT if self.block_s else 1.0)
            self._began_s = None
            why = reading.result()
            self._counts["blocks_read" if why is None else "blocks_unread"] += 1
            self._buffers.written(slot)
            ended(slot, why)


class StoreThreads:
    """Runs one thread for reads, one for writes, and one for lookups."""

    def __init__(self, store: SharedStore, limits: TransferLimits) -> None:
        self.counts: Counter[str] = Counter()
        """Writes by outcome (of ``SharedStore.put``, or ``failed``), and lookups that were given up."""
        self.queued_writes = 0
        self.written_bytes = 0
        self._lookups = 0
        """Number of lookups that have ended."""
        self._store = store
        self._limits = limits
        self._lock = threading.Lock()
        """Guards ``_known`` and ``queued_writes``."""
        self._known: dict[bytes, None] = {}
        """Keys of blocks that the store has, or that are queued to be written."""
        self._reader, self._writer, self._finder = self._threads = [
            TransferThread(f"kv-{name}") for name in ("read", "write", "look-up")
        ]

    # -- for the event loop -------------------------------------------------------------

    def read(self, key: bytes, memory: memoryview) -> asyncio.Future[str | None]:
        """Read a block, after earlier reads. The result is the reason of a failure, or ``None``."""

        def read() -> str | None:
            try:
                self._store.get_into(key, [memory])
            except Exception as error:  # the read is reported whatever a store raises
                return f"{type(error).__name__}: {error}"
            return None

        return _run_in(self._reader, read)

    async def look_up(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has; 0 if no lookup ends in ``patience_s``."""
        found = 0
        while found < len(keys):
            some = keys[found : found + LOOKUP_BATCH_KEYS]
            lookup = _run_in(self._finder, partial(self._leading, some))
            while not lookup.done():
                before = self._lookups
                await asyncio.wait({lookup}, timeout=self._limits.patience_s)
                if not lookup.done() and self._lookups == before:
                    self.counts["looks_given_up"] += 1
                    return 0
            found += lookup.result()
            if lookup.result() < len(some):
                break
        with self._lock:
            for key in keys[:found]:
                self._note(key)
            for key in keys[found:]:
                self._known.pop(key, None)
        return found

    def _leading(self, keys: Sequence[bytes]) -> int:
        try:
            return self._store.leading(keys)
        except Exception:
            return 0
        finally:
            self._lookups += 1

    # -- for the engine's thread --------------------------------------------------------

    def knows(self, key: bytes) -> bool:
        """Whether the block is stored, as far as is known, or will be."""
        with self._lock:
            return key in self._known

    @property
    def has_room(self) -> bool:
        """Whether another block may be queued to be written. Its memory stays in use until it is written."""
        return self.queued_writes < self._limits.max_waiting_writes

    def write(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> None:
        """Queue a write of a block. ``content`` must not change any more. ``parent``: key of the previous
        block of the context; empty if there is none."""
        with self._lock:
            self._note(key)
            self.queued_writes += 1
        self._writer.submit(partial(self._write, key, parent, content))

    def close(self) -> bool:
        """Stop all threads; wait at most 5 s for each. Returns false if a thread still runs, in a hanging
        store."""
        for thread in self._threads:
            thread.close()
        return not any(thread.is_alive for thread in self._threads)

    def _write(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> None:
        try:
            outcome = self._store.put(key, content, parent=parent).value
        except Exception:
            outcome = "failed"
        self.counts[f"write_{outcome}"] += 1
        with self._lock:
            self.queued_writes -= 1
            self.written_bytes += sum(part.nbytes for part in content)
            if outcome not in ("stored", "already"):
                self._known.pop(key, None)

    def _note(self, key: bytes) -> None:
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > MAX_KNOWN_KEYS:
            del self._known[next(iter(self._known))]


def _run_in(thread: TransferThread, call: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Make a call, which must not raise, in a thread. Returns a future of the running event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def run() -> None:
        result = call()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(future.set_result, result)

    thread.submit(run)
    return future
