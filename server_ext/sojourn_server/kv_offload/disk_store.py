"""Stores Full Blocks on a disk, within a budget. Blocks outlive the process and are verified when read.

Folders
-------
    ROOT/
      3f9a0c51d2e47b68/     a store; its name has the first 16 hex digits of the digest of its ``KvIdentity``
      3f9a0c51d2e47b68-b/   another store of the same identity, named b
        manifest.json       the ``KvIdentity`` in full, and the version of the format
        lock                held by the one process that has the store open
        a7/a7c0….kv         a block; its name is the key in hex, its folder the key's first byte
        a7/a7c0….partial    a block being written

The manifest, not the folder's name, identifies the store. A folder with another manifest is refused.

Stores of several identities can share a root. By default ``open`` refuses a root that has only stores of
other identities. After a change of model or block size, a second set of blocks on the disk is usually a
mistake; ``alongside`` permits it. In this check, identities that differ only in the rank count as the same.
Files and folders that are not sojourn's are never deleted.

Errors
------
    OffloadError
     ├ StoreError          the operating system reported the error ``errno``
     ├ StoreInUse          another process has the store open
     ├ IncompatibleStore   the store has another model, block size, …, listed in ``differences``
     ├ BlockNotFound       there is no such block (any more)
     └ BlockCorrupt        the block was damaged; it has been removed

Wrong arguments raise ``ValueError``. Every error outside ``open`` concerns one block, and the engine can
compute that block again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType

from .block_file import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    NO_SPACE,
    BlockCorrupt,
    Buffer,
    KvIdentity,
    OffloadError,
    byte_views,
    read_block,
    read_parent,
    write_block,
)
from .file_system import FileSystem, check_private
from .store_folder import StoreLock, claim_folder, folder_name, is_store_name, matching_stores

CLOSE_WAIT_S = 5.0
"""Maximum seconds that ``close`` waits for running calls. A disk may hang."""
_FANOUT = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){%d,%d})\.(kv|partial)" % (MIN_KEY_BYTES, MAX_KEY_BYTES))  # noqa: UP031

_NOT_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Error numbers of reads that fail because the process or machine has too many open files or too little
memory. The block's file may be intact."""


def block_path(store: Path, key: bytes) -> Path:
    """Return the path of the file of ``key``'s block. Raises ``ValueError`` for an invalid key."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(key)}")
    name = key.hex()
    return store / name[:2] / f"{name}.kv"


def block_payload(identity: KvIdentity, buffers: Sequence[Buffer], *, writable: bool) -> list[memoryview]:
    """Return ``byte_views`` of the buffers of one block. Raises ``ValueError`` if ``buffers`` do not have
    ``identity.block_bytes`` bytes in total, or if ``writable`` is set and a buffer is read-only."""
    views = byte_views(buffers, writable=writable)
    found = sum(view.nbytes for view in views)
    if found != identity.block_bytes:
        raise ValueError(f"buffers of {found} bytes; expected {identity.block_bytes}, the size of a block")
    return views


class StoreError(OffloadError):
    """Raised for an error of the operating system, which is in ``errno`` and ``__cause__``."""

    def __init__(self, doing: str, path: Path, cause: OSError) -> None:
        super().__init__(f"{doing} {path} failed: {cause.strerror or cause}")
        self.path = path
        self.errno = cause.errno


class BlockNotFound(OffloadError):
    """Raised if the store has no such block (any more)."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"no block {key.hex()} in this store")
        self.key = key


class PutOutcome(Enum):
    """Outcome of writing a block to a store."""

    STORED = "stored"
    ALREADY = "already"
    """The store already had a block of this key. The given content was ignored."""
    FULL = "full"
    """The block would exceed the budget. Nothing was written."""
    DISK_FULL = "disk_full"
    """The disk or a quota is full. Nothing of the block is left."""


class DiskStore:
    """Stores blocks of one ``KvIdentity`` as files in a folder, at most ``budget_bytes`` in total.

    Thread-safe. Calls for one key are serialised. Calls for different keys run concurrently. Calls wait for
    the disk, except ``has``, ``keys``, ``len`` and ``used_bytes``. These read only the index, which is never
    locked during I/O, so the scheduler's thread may call them.

    An open store evicts no blocks. If a block would exceed the budget, ``put`` first removes unusable files,
    and returns ``FULL`` if these do not make enough room.
    """

    def __init__(
        self,
        path: Path,
        identity: KvIdentity,
        *,
        budget_bytes: int,
        files: FileSystem,
        clock_ns: Callable[[], int],
        lock: StoreLock,
    ) -> None:
        """Only ``open`` calls this, after it has made, locked and checked the folder ``path``."""
        self.path = path
        self.identity = identity
        self.budget_bytes = budget_bytes
        self.file_bytes = HEADER_BYTES + identity.block_bytes
        """Size of every block's file. It counts against the budget."""
        self._digest = identity.digest()
        self._files = files
        self._clock_ns = clock_ns
        self._store_lock = lock
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._index: OrderedDict[bytes, None] = OrderedDict()
        """Keys of all readable blocks, least recently used first."""
        self._busy: set[bytes] = set()
        """Keys being read, written or removed."""
        self._unusable: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose files cannot be read or removed. They still count against the budget."""
        self._used_bytes = 0
        """Bytes of indexed files, unusable files and files being written."""
        self._last_use_ns = 0

    @classmethod
    def open(
        cls,
        root: str | Path,
        identity: KvIdentity,
        *,
        budget_bytes: int,
        name: str | None = None,
        alongside: bool = False,
        files: FileSystem | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> DiskStore:
        """Open or create the store of ``identity`` in ``root``.

        ``name`` distinguishes the stores of engines with the same identity (``is_store_name``); ``None`` for
        a store without a name. ``alongside``: accept a root that has stores of other identities only.
        ``clock_ns``: clock for the times of last use, which become the files' modification times; it may
        jump.

        Partial files and files of the wrong size are removed, then the least recently used files beyond the
        budget. Payloads are not verified until they are read.

        Raises ``IncompatibleStore``, ``StoreInUse``, ``StoreError``, and ``ValueError`` for a negative budget
        or an invalid name.
        """
        if budget_bytes < 0:
            raise ValueError(f"a budget of {budget_bytes} bytes; expected 0 or more")
        if name is not None and not is_store_name(name):
            raise ValueError(f"a store cannot be named {name!r}; expected letters, digits, '.', '_' and '-'")
        files = files or FileSystem()
        # The same store must be recognised if it is opened by another path.
        path = Path(os.path.realpath(root)) / folder_name(identity, name)
        try:
            if not alongside and not os.path.lexists(path):  # ``claim_folder`` checks an existing store
                known = asdict(identity)
                del known["tp_rank"]  # the stores of another rank are the same engine's
                matching_stores(files, path.parent, known)
            files.mkdir(path, parents=True)
            check_private(path)
            lock = StoreLock(path)
        except OSError as error:
            raise StoreError("opening the KV store", path, error) from error
        try:
            claim_folder(files, path, identity)
            store = cls(path, identity, budget_bytes=budget_bytes, files=files, clock_ns=clock_ns, lock=lock)
            store._find_blocks()
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise StoreError("opening the KV store", path, error) from error
            raise
        return store

    def close(self) -> None:
        """Wait for running calls to end, at most ``CLOSE_WAIT_S``, and release the store's lock. If a call
        still runs then, the process keeps the lock, because the call may write. Later calls that read, write
        or remove a block raise ``ValueError``."""
        with self._changed:
            self._closed = True
            is_idle = self._changed.wait_for(lambda: not self._busy, CLOSE_WAIT_S)
        if is_idle:
            self._store_lock.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers``, in order, as the block of ``key``. If the store already has the block, mark it
        as the most recently used.

        ``parent``: key of the previous block of the context, for ``parent_of``; empty if there is none. The
        buffers must not change during the call. Raises ``StoreError``, after which ``has`` is false for the
        block. Raises ``ValueError`` if the buffers do not have ``identity.block_bytes`` bytes in total, if
        ``key`` is invalid, or if the store is closed.
        """
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=False)
        with self._exclusive_use(key):
            if self.has(key):
                self._touch(key)
                return PutOutcome.ALREADY
            self._remove_unusable(key)
            if not self._reserve():
                return PutOutcome.FULL
            try:
                self._write(key, path, payload, parent)
            except BaseException as error:
                self._erase(key)
                if not isinstance(error, OSError):
                    raise
                if error.errno in NO_SPACE:
                    return PutOutcome.DISK_FULL
                raise StoreError("writing the KV block", path, error) from error
            self._touch(key)
            return PutOutcome.STORED

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, in order, with the block of ``key``, and mark it as the most recently used. The
        block may be divided into buffers differently than for ``put``.

        After any exception the content of ``buffers`` is undefined. Raises:

            ``BlockNotFound``   the store has no such block
            ``BlockCorrupt``    the file was damaged; it has been removed
            ``StoreError``      the file cannot be read. If open files or memory ran out, ``has`` stays true.
                                Otherwise ``has`` is false until the block is stored again or the store is
                                opened again
            ``ValueError``      read-only buffers, wrong total size, invalid key, or the store is closed
        """
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=True)
        with self._exclusive_use(key):
            if not self.has(key):
                raise BlockNotFound(key)
            try:
                read_block(self._files, path, key, self._digest, payload)
            except BlockCorrupt:
                self._forget(key)
                self._erase(key)
                raise
            except FileNotFoundError as error:  # another process has deleted the file
                self._forget(key)
                self._erase(key)
                raise BlockNotFound(key) from error
            except OSError as error:
                if error.errno not in _NOT_THE_FILE:
                    self._forget(key)
                    with self._changed:
                        self._unusable[key] = None
                raise StoreError("reading the KV block", path, error) from error
            self._touch(key)

    def drop(self, key: bytes) -> bool:
        """Remove the block of ``key``, once running calls for this key have ended. Returns whether there was
        a block.

        Raises ``StoreError`` if the file cannot be removed. Then ``has`` is false, but the file still counts
        against the budget. Raises ``ValueError`` if ``key`` is invalid or the store is closed.
        """
        path = self._path(key)
        with self._exclusive_use(key):
            if self.has(key):
                self._forget(key)
            elif not self._take_unusable(key):
                return False
            error = self._erase(key)
            if error is not None:
                raise StoreError("removing the KV block", path, error) from error
            return True

    def has(self, key: bytes) -> bool:
        """Return whether the store has a readable block of ``key``. Does not change the LRU order."""
        with self._changed:
            return key in self._index

    def parent_of(self, key: bytes) -> bytes | None:
        """Return the first 16 bytes of the parent's key. The parent is the previous block of the context.

        Returns ``None`` if the block of ``key`` has no parent, or if its file is missing, damaged or
        unreadable. Does not change the LRU order. Raises ``ValueError`` if ``key`` is invalid or the store is
        closed."""
        path = self._path(key)
        with self._exclusive_use(key):
            try:
                return read_parent(self._files, path, key, self._digest)
            except (BlockCorrupt, OSError):
                return None

    def keys(self) -> list[bytes]:
        """Return the keys of all readable blocks, least recently used first."""
        with self._changed:
            return list(self._index)

    def __len__(self) -> int:
        with self._changed:
            return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the budget: all blocks' files, including partial and unusable ones."""
        with self._changed:
            return self._used_bytes

    def _path(self, key: bytes) -> Path:
        return block_path(self.path, key)

    @contextlib.contextmanager
    def _exclusive_use(self, key: bytes) -> Iterator[None]:
        """Context manager that gives the calling thread exclusive use of ``key``'s files and index entry.
        Waits while another thread uses them. Raises ``ValueError`` if the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._busy)
            if self._closed:
                raise ValueError(f"the KV store {self.path} is closed")
            self._busy.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(key)
                self._changed.notify_all()

    def _write(self, key: bytes, path: Path, payload: list[memoryview], parent: bytes) -> None:
        write = partial(
            write_block, self._files, path, path.with_suffix(".partial"), key, self._digest, payload
        )
        try:
            write(parent=parent)
        except FileNotFoundError:  # first block of its folder
            self._files.mkdir(path.parent, parents=False)
            write(parent=parent)

    def _touch(self, key: bytes) -> None:
        """Mark the block as the most recently used, also for the next process that opens the store."""
        with self._changed:
            self._index[key] = None
            self._index.move_to_end(key)
            # The times must keep the order of uses, although the clock may jump back.
            self._last_use_ns = now_ns = max(self._clock_ns(), self._last_use_ns + 1)
        with contextlib.suppress(OSError):  # a wrong order after a restart costs little
            self._files.set_mtime(self._path(key), now_ns)

    def _forget(self, key: bytes) -> None:
        with self._changed:
            del self._index[key]

    def _take_unusable(self, key: bytes) -> bool:
        with self._changed:
            if key not in self._unusable:
                return False
            del self._unusable[key]
            return True

    def _remove_unusable(self, key: bytes) -> None:
        """Remove the file of ``key`` if it is marked as unusable, since the block is about to be written
        again. Raises ``StoreError`` if the file cannot be removed."""
        if self._take_unusable(key):
            error = self._erase(key)
            if error is not None:
                raise StoreError("removing the KV block", self._path(key), error) from error

    def _reserve(self) -> bool:
        """Reserve budget for one more file, if necessary by removing an unusable one. Returns whether the
        file fits."""
        while True:
            with self._changed:
                if self._used_bytes + self.file_bytes <= self.budget_bytes:
                    self._used_bytes += self.file_bytes
                    return True
                # Skip keys in use, because two threads that wait for each other's keys would deadlock.
                victim = next((key for key in self._unusable if key not in self._busy), None)
                if victim is None:
                    return False
                del self._unusable[victim]
                self._busy.add(victim)
            try:
                if self._erase(victim) is not None:
                    return False
            finally:
                with self._changed:
                    self._busy.discard(victim)
                    self._changed.notify_all()

    def _erase(self, key: bytes) -> OSError | None:
        """Remove the files of ``key``, which must not be in the index, and release their budget. If that
        fails, mark the key as unusable and return the error."""
        path = self._path(key)
        for name in (path.with_suffix(".partial"), path):
            try:
                self._files.unlink(name)
            except FileNotFoundError:
                pass
            except OSError as error:
                with self._changed:
                    self._unusable[key] = None
                return error
        with self._changed:
            self._used_bytes -= self.file_bytes
        return None

    def _find_blocks(self) -> None:
        """Build the index from the names, sizes and times of the files. Remove partial files, files of the
        wrong size, and the least recently used files beyond the budget."""
        found: list[tuple[int, bytes]] = []
        torn: set[bytes] = set()
        for folder in self._files.scan(self.path):
            if not _FANOUT.fullmatch(folder.name) or not folder.is_folder:
                continue
            for file in self._files.scan(self.path / folder.name):
                match = _BLOCK.fullmatch(file.name)
                if match is None or not file.is_file or not file.name.startswith(folder.name):
                    continue
                key = bytes.fromhex(match[1])
                if match[2] == "kv" and file.size == self.file_bytes:
                    found.append((file.mtime_ns, key))
                else:
                    torn.add(key)
        # A block may exist beside a partial file that could not be removed. Then only the partial file is
        # removed.
        for key in torn - {key for _, key in found}:
            self._used_bytes += self.file_bytes
            self._erase(key)
        for mtime_ns, key in sorted(found):
            self._index[key] = None
            self._used_bytes += self.file_bytes
            self._last_use_ns = max(self._last_use_ns, mtime_ns)
            if key in torn:
                with contextlib.suppress(OSError):
                    self._files.unlink(self._path(key).with_suffix(".partial"))
        while self._used_bytes > self.budget_bytes and self._index:
            key, _ = self._index.popitem(last=False)
            if self._erase(key) is not None:
                break  # on a read-only file system, no file can be removed
