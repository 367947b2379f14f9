"""Threads that read blocks from the store and write blocks to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ..kv_offload.block_file import OffloadError
from ..kv_offload.shared_store import SharedStore
from ..kv_offload.transfer_thread import TransferThread
from .transfer_actions import ReadBlock, WriteBlock


class StoreThreads:
    """Runs one thread per concurrent read, and one for all writes. Every read and write is reported once.

    A thread reports the end of a read with ``read_done(item, why)``; ``why`` is the error, or ``None`` for a
    success. It reports the end of a write with ``write_done(item, outcome)``; ``outcome`` is a ``PutOutcome``
    value, or ``failed``.
    """

    def __init__(
        self,
        store: SharedStore,
        readers: int,
        *,
        read_done: Callable[[int, str | None], object],
        write_done: Callable[[int, str], object],
    ) -> None:
        self._store = store
        self._read_done = read_done
        self._write_done = write_done
        self._lock = threading.Lock()
        self._readers = [TransferThread(f"kv-read-{index}") for index in range(readers)]
        self._idle = list(self._readers)
        self._writer = TransferThread("kv-write")

    def read(self, action: ReadBlock) -> None:
        """Read a block in an idle thread. The caller must have at most ``readers`` reads open at a time."""
        with self._lock:
            thread = self._idle.pop()
        thread.submit(partial(self._read, thread, action))

    def write(self, action: WriteBlock) -> None:
        """Queue a write; ``write_done`` reports its end."""
        self._writer.submit(partial(self._write, action))

    def close(self) -> bool:
        """Stop all threads; wait at most 5 s for each. Returns false if a thread still runs, in a hanging
        store."""
        threads = [*self._readers, self._writer]
        for thread in threads:
            thread.close()
        return not any(thread.is_alive for thread in threads)

    def _read(self, thread: TransferThread, action: ReadBlock) -> int:
        why: str | None = None
        try:
            self._store.get_into(action.key, action.into)
        except OffloadError as error:
            why = str(error)
        except Exception as error:  # the read is reported whatever a store raises
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            self._idle.append(thread)
        self._read_done(action.item, why)
        return sum(part.nbytes for part in action.into)

    def _write(self, action: WriteBlock) -> int:
        try:
            outcome = self._store.put(action.key, action.content, parent=action.parent).value
        except Exception:
            outcome = "failed"
        self._write_done(action.item, outcome)
        return sum(part.nbytes for part in action.content)
