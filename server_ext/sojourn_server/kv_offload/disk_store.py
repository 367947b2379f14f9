"""Full Blocks on a disk, over the end of the process: found by key, checked on reading, within a budget.

Folders
-------
    ROOT/
      3f9a0c51d2e47b68/     one store: 16 hex digits of the digest of a ``KvIdentity``
      3f9a0c51d2e47b68-b/   another of the same, whose name is b: see ``siblings``
        manifest.json       that identity in full, and the version of the format
        lock                held by the one process that has the store open
        a7/a7c0….kv         a block; its name is the key in hex, its folder the key's first byte
        a7/a7c0….partial    one being written

The name finds the folder, the manifest decides: a folder that was renamed, copied or made by something
else is refused, whatever its name. Stores of several identities can lie side by side. But who restarts
with another model or block size most often did not mean to fill the disk a second time, so a root in
which there are only other stores is refused as well, unless ``alongside`` is said. The ranks of one server
are no others to each other. Nothing foreign is ever deleted, nor files whose names are not ours.

Errors
------
    OffloadError
     ├ StoreError     the operating system said no; ``errno`` says why
     ├ StoreInUse     another process has it open
     ├ IncompatibleStore   it is for another model, block size, …; ``differences`` say which
     ├ BlockNotFound   there is no such block, or no longer
     └ BlockCorrupt   there was one, but it cannot be trusted; it has been removed

A caller's mistake is a ``ValueError``. All but mistakes in opening can be met by computing the block again.
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
from enum import Enum
from functools import partial
from itertools import islice
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
    sync_folder,
    write_block,
)
from .file_system import FileSystem, LocalFileSystem
from .store_folder import StoreLock, check_store_root, claim_folder, folder_name, is_store_name

_FANOUT = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){%d,%d})\.(kv|partial)" % (MIN_KEY_BYTES, MAX_KEY_BYTES))  # noqa: UP031

_NOT_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What a read can fail of that says nothing about the block."""


def block_path(store: Path, key: bytes) -> Path:
    """Where a store has the block of ``key``. Raises ``ValueError`` for what is no key."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(key)}")
    name = key.hex()
    return store / name[:2] / f"{name}.kv"


def block_payload(identity: KvIdentity, buffers: Sequence[Buffer], *, writable: bool) -> list[memoryview]:
    """The memory of one block of ``identity``. Raises ``ValueError`` for buffers of another size."""
    views = byte_views(buffers, writable=writable)
    found = sum(view.nbytes for view in views)
    if found != identity.block_bytes:
        raise ValueError(f"buffers of {found} bytes for blocks of {identity.block_bytes}")
    return views


class StoreError(OffloadError):
    """The operating system refused something; ``errno`` and ``__cause__`` are its own."""

    def __init__(self, doing: str, path: Path, cause: OSError) -> None:
        super().__init__(f"{doing} {path} failed: {cause.strerror or cause}")
        self.path = path
        self.errno = cause.errno


class BlockNotFound(OffloadError):
    """There is no such block, or no longer."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"no block {key.hex()} in this store")
        self.key = key


class PutOutcome(Enum):
    """What became of a block that was put."""

    STORED = "stored"
    ALREADY = "already"
    """There is one of that key; what was given was not looked at."""
    FULL = "full"
    """It would exceed the budget. Nothing was written: drop something first."""
    DISK_FULL = "disk_full"
    """The disk or a quota has no room. Nothing is left of it."""


class DiskStore:
    """Blocks of one ``KvIdentity`` in a folder, at most ``budget_bytes`` of files.

    Every call but ``has``, ``oldest``, ``keys``, ``len`` and ``used_bytes`` waits for the disk. Calls may
    come from any thread. Those of one key take turns, those of different keys overlap; the lock over the
    index is never held while the disk works, so the others can be asked from the scheduler's thread.

    It never chooses what to give up: at its budget it says ``FULL``. Only a block that could not be read
    any more gives way by itself.
    """

    def __init__(
        self,
        path: Path,
        identity: KvIdentity,
        *,
        budget_bytes: int,
        durable: bool,
        files: FileSystem,
        clock_ns: Callable[[], int],
        lock: StoreLock,
    ) -> None:
        """For ``open``: the folder is there, is ours and is locked."""
        self.path = path
        self.identity = identity
        self.budget_bytes = budget_bytes
        self.file_bytes = HEADER_BYTES + identity.block_bytes
        """Size of every block's file, and what it counts against the budget."""
        self._digest = identity.digest()
        self._durable = durable
        self._files = files
        self._clock_ns = clock_ns
        self._store_lock = lock
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._index: OrderedDict[bytes, None] = OrderedDict()
        """By last use, the oldest first."""
        self._busy: set[bytes] = set()
        """Keys that some thread reads, writes or removes."""
        self._unusable: OrderedDict[bytes, None] = OrderedDict()
        """Keys with files that cannot be read or removed. They still take room."""
        self._used_bytes = 0
        """Of files indexed, unusable and being written."""
        self._last_use_ns = 0

    @classmethod
    def open(
        cls,
        root: str | Path,
        identity: KvIdentity,
        *,
        budget_bytes: int,
        name: str | None = None,
        durable: bool = False,
        alongside: bool = False,
        files: FileSystem | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> DiskStore:
        """Open the store of ``identity`` in ``root``, or make it; its blocks are there, in order of last use.

        ``name`` tells it from the stores of other engines that serve the same (``store_folder.is_name``).
        Payloads are not read: a damaged one shows when it is asked for. Files of the wrong size and those
        left half written are removed; beyond the budget, so are the least recently used. ``durable``: a
        block that is stored is on the disk, also if the machine dies (by default only if the process
        does). ``alongside``: other identities' stores in this root are meant to be there. The budget is
        this store's alone. ``clock_ns`` orders uses; it may jump.

        Raises ``IncompatibleStore``, ``StoreInUse``, ``StoreError``, and ``ValueError`` for a negative budget
        or an invalid name.
        """
        if budget_bytes < 0:
            raise ValueError(f"a budget of {budget_bytes} bytes")
        if name is not None and not is_store_name(name):
            raise ValueError(f"a store cannot be named {name!r}; expected letters, digits, '.', '_' and '-'")
        files = files or LocalFileSystem()
        # Also the same store under two names must be seen to be the same.
        path = Path(os.path.realpath(root)) / folder_name(identity, name)
        files.confine(path.parent)
        try:
            if not alongside:
                check_store_root(files, path, identity)
            files.mkdir(path, parents=True)
            lock = StoreLock(path)
        except OSError as error:
            raise StoreError("opening the KV store", path, error) from error
        try:
            claim_folder(files, path, identity)
            store = cls(
                path,
                identity,
                budget_bytes=budget_bytes,
                durable=durable,
                files=files,
                clock_ns=clock_ns,
                lock=lock,
            )
            store._find_blocks()
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise StoreError("opening the KV store", path, error) from error
            raise
        return store

    def close(self) -> None:
        """Let another process have it, once the calls under way are done. No call but this may follow."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._busy)
        self._store_lock.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers``, one after the other, as the block of ``key``; to be put again is a use.

        ``parent`` is the key of the block before it in its context, kept for ``parent_of``; empty: none.
        Together they must have ``identity.block_bytes`` bytes, and not change until the call returns.
        Raises ``StoreError``, after which nothing is left of the block, and ``ValueError``.
        """
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=False)
        with self._turn(key):
            if self.has(key):
                self._touch(key)
                return PutOutcome.ALREADY
            self._give_up_unusable(key)
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
        """Fill ``buffers``, one after the other, with the block of ``key``. put may have cut it otherwise.

        Only when it returns are they good: after any exception their content is undefined. Raises
        ``BlockNotFound``; ``BlockCorrupt``, and the file is gone; ``StoreError`` for one that cannot be read,
        which is then no longer ``has``, but is looked for again when the store is next opened, unless its
        room was needed; ``ValueError`` as ``put``, also for buffers that cannot be written.
        """
        path = self._path(key)
        payload = block_payload(self.identity, buffers, writable=True)
        with self._turn(key):
            if not self.has(key):
                raise BlockNotFound(key)
            try:
                read_block(self._files, path, key, self._digest, payload)
            except BlockCorrupt:
                self._forget(key)
                self._erase(key)
                raise
            except FileNotFoundError as error:  # somebody tidied up behind our back
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
        """Remove the block of ``key``; whether there was one. Waits for a read or write of it.

        Raises ``StoreError`` where the file cannot be removed; it is no longer ``has`` all the same, and
        keeps counting against the budget.
        """
        path = self._path(key)
        with self._turn(key):
            if self.has(key):
                self._forget(key)
            elif not self._take_unusable(key):
                return False
            error = self._erase(key)
            if error is not None:
                raise StoreError("removing the KV block", path, error) from error
            return True

    def has(self, key: bytes) -> bool:
        """Whether there is a block of ``key``; not a use."""
        with self._changed:
            return key in self._index

    def parent_of(self, key: bytes) -> bytes | None:
        """Leading bytes of the key of the block before ``key``'s in its context, as its file says; not a use.

        ``None`` where it does not say, or cannot be read: who evicts is told nothing wrong by that.
        """
        path = self._path(key)
        with self._turn(key):
            try:
                return read_parent(self._files, path, key, self._digest)
            except (BlockCorrupt, OSError):
                return None

    def oldest(self, count: int) -> list[bytes]:
        """Up to ``count`` keys, the least recently used first."""
        with self._changed:
            return list(islice(self._index, max(0, count)))

    def keys(self) -> list[bytes]:
        """All keys, the least recently used first."""
        with self._changed:
            return list(self._index)

    def __len__(self) -> int:
        with self._changed:
            return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of blocks, those being written and those that cannot be read included."""
        with self._changed:
            return self._used_bytes

    def _path(self, key: bytes) -> Path:
        return block_path(self.path, key)

    @contextlib.contextmanager
    def _turn(self, key: bytes) -> Iterator[None]:
        """While it lasts no other thread touches the files of ``key`` or its place in the index."""
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
            write_block,
            self._files,
            path,
            path.with_suffix(".partial"),
            key,
            self._digest,
            payload,
            parent=parent,
            durable=self._durable,
        )
        try:
            write()
        except FileNotFoundError:  # the first block of its folder
            self._files.mkdir(path.parent, parents=False)
            if self._durable:
                sync_folder(self._files, self.path)
            write()

    def _touch(self, key: bytes) -> None:
        """Make it the last used, also for the next who opens the store."""
        with self._changed:
            self._index[key] = None
            self._index.move_to_end(key)
            # The kernel's own times have a grain of milliseconds, and clocks jump: neither may reorder uses.
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

    def _give_up_unusable(self, key: bytes) -> None:
        """Before ``key`` is written anew. A file that won't go fails the put: it could not be replaced."""
        if self._take_unusable(key):
            error = self._erase(key)
            if error is not None:
                raise StoreError("removing the KV block", self._path(key), error) from error

    def _reserve(self) -> bool:
        """Count one more file, if the budget has room or an unusable file can make some."""
        while True:
            with self._changed:
                if self._used_bytes + self.file_bytes <= self.budget_bytes:
                    self._used_bytes += self.file_bytes
                    return True
                # Not one whose turn somebody has: two who wait for each other's keys would wait for ever.
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
        """Remove what there is of a key that is counted but not indexed; the error, where that fails."""
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
        """Rebuild the index from names, sizes and times; remove what is no block, and what is too much."""
        found: list[tuple[int, bytes]] = []
        torn: set[bytes] = set()
        for folder in self._files.scan(self.path):
            if not _FANOUT.fullmatch(folder.name):
                continue
            if not folder.is_folder:
                what = f"{self.path / folder.name} is not a folder; expected one of blocks: remove it"
                raise NotADirectoryError(errno.ENOTDIR, what)
            for file in self._files.scan(self.path / folder.name):
                match = _BLOCK.fullmatch(file.name)
                if match is None or not file.is_file or not file.name.startswith(folder.name):
                    continue
                key = bytes.fromhex(match[1])
                if match[2] == "kv" and file.size == self.file_bytes:
                    found.append((file.mtime_ns, key))
                else:
                    torn.add(key)
        # A block may have been put over a partial file that could not be removed: that goes, the block stays.
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
            self._erase(key)
