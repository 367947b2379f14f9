"""Threads that read blocks from the store, look them up, and write blocks to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ..kv_offload.block_file import OffloadError
from ..kv_offload.shared_store import SharedStore
from ..kv_offload.transfer_thread import TransferThread
from .transfer_limits import TransferLimits

LOOKUP_BATCH_KEYS = 16
"""Number of block keys per lookup in the store. The store counts as hung if a lookup takes ``patience_s``."""

MAX_KNOWN_KEYS = 1 << 17
"""Maximum number of keys that are known to be stored. Blocks of older keys are copied once more."""

ResultT = TypeVar("ResultT")


class StoreThreads:
    """Runs one thread per concurrent read, one for all writes, and one for lookups."""

    def __init__(self, store: SharedStore, limits: TransferLimits) -> None:
        self.counts: Counter[str] = Counter()
        """Writes by outcome (of ``SharedStore.put``, or ``failed``), and lookups that were given up."""
        self.queued_writes = 0
        self.written_bytes = 0
        self._store = store
        self._limits = limits
        self._lock = threading.Lock()
        """Guards ``_known`` and ``queued_writes``."""
        self._known: dict[bytes, None] = {}
        """Keys of blocks that the store has, or that are queued to be written."""
        self._readers = [TransferThread(f"kv-read-{index}") for index in range(limits.read_width)]
        self._idle = list(self._readers)
        self._writer = TransferThread("kv-write")
        self._lookups = TransferThread("kv-look-up")
        self._lookup_order = asyncio.Lock()
        self._lookup: asyncio.Future[int] | None = None
        """The newest lookup."""
        self._lookup_hangs = False

    # -- for the event loop -------------------------------------------------------------

    def read(self, key: bytes, memory: memoryview) -> asyncio.Future[str | None]:
        """Read a block in an idle thread. The result is the reason of a failure, or ``None``."""
        thread = self._idle.pop()

        def read() -> str | None:
            try:
                self._store.get_into(key, [memory])
            except OffloadError as error:
                return str(error)
            except Exception as error:  # the read is reported whatever a store raises
                return f"{type(error).__name__}: {error}"
            finally:
                self._idle.append(thread)
            return None

        return _run_in(thread, read)

    async def look_up(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has. If a lookup hangs, it and all others return 0 until
        the store answers."""
        async with self._lookup_order:
            found = 0
            while found < len(keys):
                some: Sequence[bytes] = ()
                lookup = self._lookup
                if lookup is None or lookup.done():  # otherwise its transfer was cancelled, or it hangs
                    some = keys[found : found + LOOKUP_BATCH_KEYS]
                    lookup = self._lookup = _run_in(self._lookups, partial(self._leading, some))
                timeout_s = 0.0 if self._lookup_hangs else self._limits.patience_s
                await asyncio.wait({lookup}, timeout=timeout_s)
                self._lookup_hangs = not lookup.done()
                if self._lookup_hangs:
                    self.counts["looks_given_up"] += 1
                    return 0
                if some:
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
            self.counts["looks_failed"] += 1
            return 0

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
        threads = [*self._readers, self._writer, self._lookups]
        for thread in threads:
            thread.close()
        return not any(thread.is_alive for thread in threads)

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
