"""The stores of other engines beside one's own: their blocks are found by key and read, never written.

Each engine writes one store, which nobody else does, and reads all that lie in the same root and are of the
same ``KvIdentity``: what one has written, the others need not compute. Nothing is agreed on with their
owners. A block that its owner deletes before it is read is missing; a file that is torn, or of something
else, is refused as in one's own store (``full_block``), and is left for its owner to remove.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from .block_file import (
    HEADER_BYTES,
    BlockCorrupt,
    Buffer,
    FileSystem,
    KvIdentity,
    LocalFileSystem,
    read_block,
)
from .disk_store import BlockNotFound, StoreError, block_path, block_payload
from .offload_jobs import ProbeResult
from .store_folder import find_identity_stores


class SiblingStores:
    """Stores of ``identity`` beside ``own``, which is the path of a store without links.

    Every call waits for the disk, and may come from any thread. Which stores there are is looked at anew by
    each ``leading``: engines start and stop.
    """

    def __init__(self, own: Path, identity: KvIdentity, files: FileSystem | None = None) -> None:
        self.own = own
        self.identity = identity
        self._digest = identity.digest()
        self._file_bytes = HEADER_BYTES + identity.block_bytes
        self._files = files or LocalFileSystem()
        self._lock = threading.Lock()
        self._stores: list[Path] = []
        """The one in which something was found last comes first: one engine wrote most of a context."""

    def leading(self, keys: Sequence[bytes]) -> ProbeResult:
        """How many of the leading ``keys`` are in these stores, whichever, and how many stores there are.

        Nothing of a block is read but its size. What cannot be looked at is not there.
        """
        self.look()
        found = 0
        for key in keys:
            if not self.has(key):
                break
            found += 1
        return ProbeResult(found, len(self._stores))

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, one after the other, with the block of ``key``, as ``DiskStore.get_into``.

        Raises ``BlockNotFound``, and where all that was found is no good the last ``BlockCorrupt`` or
        ``StoreError``; ``ValueError`` for buffers of another size, or that cannot be written.
        """
        payload = block_payload(self.identity, buffers, writable=True)
        failed: BlockCorrupt | StoreError | None = None
        for store in self._in_order():
            path = block_path(store, key)
            try:
                read_block(self._files, path, key, self._digest, payload)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except BlockCorrupt as error:
                failed = error
            except OSError as error:
                failed = StoreError("reading another engine's KV block", path, error)
            else:
                self._found_in(store)
                return
        raise failed or BlockNotFound(key)

    def look(self) -> int:
        """See which stores there are; how many."""
        try:
            there = find_identity_stores(self._files, self.own.parent, self.identity)
        except OSError:
            there = []
        there = [path for path in there if path != self.own]
        with self._lock:
            known = [store for store in self._stores if store in there]
            self._stores = known + [store for store in there if store not in known]
            return len(self._stores)

    def has(self, key: bytes) -> bool:
        """Whether one of the stores last seen has a block of ``key``; opens a file in each until one has."""
        for store in self._in_order():
            try:
                fd = self._files.open(block_path(store, key), os.O_RDONLY)
                try:
                    whole = self._files.size(fd) == self._file_bytes
                finally:
                    self._files.close(fd)
            except OSError:
                continue
            if whole:
                self._found_in(store)
                return True
        return False

    def _in_order(self) -> list[Path]:
        with self._lock:
            return list(self._stores)

    def _found_in(self, store: Path) -> None:
        with self._lock:
            if store in self._stores and self._stores[0] != store:
                self._stores.remove(store)
                self._stores.insert(0, store)
