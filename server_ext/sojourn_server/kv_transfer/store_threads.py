"""Threads that read blocks from the store and write blocks to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..kv_offload.block_file import OffloadError
from ..kv_offload.shared_store import SharedStore
from ..kv_offload.transfer_thread import TransferThread
from .transfer_limits import TransferLimits
from .transfer_resources import LinkMeter


class _BlockWrite(NamedTuple):
    key: bytes
    parent: bytes
    content: Sequence[memoryview]


logger = logging.getLogger(__name__)

LOOKUP_BATCH_KEYS = 16
"""Number of block keys per lookup in the store. The store counts as hung if a lookup takes ``patience_s``."""


class StoreThreads:
    """Runs one thread per concurrent read, one for all writes, and one for lookups."""

    def __init__(
        self, store: SharedStore, limits: TransferLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Writes by outcome: a ``PutOutcome`` value, ``failed``, or ``stalled`` if dropped; and refused
        writes."""
        self.writes = LinkMeter()
        self._store = store
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the state of writes, which the writer changes."""
        self._waiting: deque[_BlockWrite] = deque()
        self._write_began_s: float | None = None
        self._readers = [TransferThread(f"kv-read-{index}") for index in range(limits.read_width)]
        self._idle = list(self._readers)
        self._writer = TransferThread("kv-write")
        self._lookups = TransferThread("kv-look-up")
        self._lookup_order = asyncio.Lock()
        self._lookup_hangs = False

    def read(self, blocks: Sequence[tuple[bytes, memoryview]], report: Callable[[str | None], None]) -> None:
        """Read blocks in an idle thread (``ReadBlocks``). Call it in the event loop."""
        thread, call = self._idle.pop(), asyncio.get_running_loop().call_soon_threadsafe

        def read() -> int:
            for at, (key, memory) in enumerate(blocks):
                why: str | None = None
                try:
                    self._store.get_into(key, [memory])
                except OffloadError as error:
                    why = str(error)
                except Exception as error:  # the read is reported whatever a store raises
                    why = f"{type(error).__name__}: {error}"
                if at == len(blocks) - 1:
                    self._idle.append(thread)
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    call(report, why)
            return sum(memory.nbytes for _, memory in blocks)

        thread.submit(read)

    async def look_up(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has. If a lookup hangs, it and all others return 0 until
        the store answers."""
        async with self._lookup_order:
            if self._lookup_hangs:
                self.counts["looks_given_up"] += 1
                return 0
            loop, found, is_wanted = asyncio.get_running_loop(), [0], [True]
            done: asyncio.Future[None] = loop.create_future()

            def look_up() -> None:
                try:
                    for at in range(0, len(keys), LOOKUP_BATCH_KEYS):
                        some = keys[at : at + LOOKUP_BATCH_KEYS]
                        found[0] += self._store.leading(some) if is_wanted[0] else 0
                        if found[0] < at + len(some):
                            break
                except Exception as error:
                    logger.error("sojourn: could not look up blocks in the store", exc_info=error)
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(ended)

            def ended() -> None:
                self._lookup_hangs = False
                done.set_result(None)

            self._lookups.submit(look_up)
            try:
                before = -1
                while not done.done() and found[0] > before:
                    before = found[0]
                    await asyncio.wait({done}, timeout=self._limits.patience_s)
            finally:
                is_wanted[0] = False
            if not done.done():
                self._lookup_hangs = True
                self.counts["looks_given_up"] += 1
                return 0
            return found[0]

    def write(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> bool:
        """Queue a write of a block. Returns false, without queueing, if too many writes wait or the store
        hangs. If it hangs, the queued writes are dropped, because the engine needs their memory; the hanging
        write keeps its memory until the store returns."""
        with self._lock:
            began_s = self._write_began_s
            hangs = began_s is not None and self._clock() - began_s >= self._limits.patience_s
            if hangs and self._waiting:
                self.counts["stalls"] += 1
                self.counts["write_stalled"] += len(self._waiting)
                self.writes.queued_bytes -= sum(map(_size, self._waiting))
                self._waiting.clear()
            if hangs or len(self._waiting) >= self._limits.max_waiting_writes:
                self.counts["writes_refused"] += 1
                return False
            write = _BlockWrite(key, parent, content)
            self._waiting.append(write)
            self.writes.queued_bytes += _size(write)
        self._writer.submit(self._write_next)
        return True

    def close(self) -> bool:
        """Stop all threads; wait at most 5 s for each. Returns false if a thread still runs, in a hanging
        store."""
        threads = [*self._readers, self._writer, self._lookups]
        for thread in threads:
            thread.close()
        return not any(thread.is_alive for thread in threads)

    def _write_next(self) -> int:
        with self._lock:
            if not self._waiting:  # dropped
                return 0
            write = self._waiting.popleft()
            self._write_began_s = began_s = self._clock()
        try:
            outcome = self._store.put(write.key, write.content, parent=write.parent).value
        except Exception:
            outcome = "failed"
        with self._lock:
            self._write_began_s = None
            self.writes.moved(_size(write), began_s, self._clock())
            self.counts[f"write_{outcome}"] += 1
        return _size(write)


def _size(write: _BlockWrite) -> int:
    return sum(part.nbytes for part in write.content)
