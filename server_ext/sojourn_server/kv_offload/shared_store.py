"""Stores of Full Blocks that combine one engine's files with the files of other engines on the same disk.

A Full Block is the KV of a fixed number of tokens: one layer after the other, and within a layer one engine
block after the other. It can be divided into its layers (Layer Blocks) without a copy, so callers may pass
one buffer per layer or one for all layers. The key of a Full Block is the chain hash of its last engine
block, which identifies all tokens up to the block's end (DualPath §4.1, A.5).

Each engine writes its own ``DiskStore`` and reads the stores of the others, its siblings. No coordination is
needed, no file has two writers, and the files of a dead engine stay readable. An engine deletes only its own
files, the last blocks of a context first. A look-up of a missing key tries to open a file in every sibling
store.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from .block_file import HEADER_BYTES, PARENT_BYTES, BlockCorrupt, Buffer, KvIdentity, read_block
from .disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError, block_path, block_payload
from .file_system import FileSystem
from .offload_jobs import ProbeResult
from .store_folder import IncompatibleStore, folder_name, matching_stores

FULL_BLOCK_TOKENS = 64
"""Default number of tokens of a Full Block (DualPath §4.1)."""


def blocks_per_full(engine_block_tokens: int, block_tokens: int) -> int:
    """Return the number of engine blocks per Full Block. Raises ``ValueError`` if ``block_tokens`` is not a
    positive multiple of ``engine_block_tokens``."""
    if engine_block_tokens < 1 or block_tokens < engine_block_tokens or block_tokens % engine_block_tokens:
        raise ValueError(
            f"a Full Block of {block_tokens} tokens is not a whole number of engine blocks of "
            f"{engine_block_tokens}; choose a multiple of the engine's --block-size"
        )
    return block_tokens // engine_block_tokens


_MAX_STALE_RATIO = 2
"""``BlockPrefixTree`` removes the outdated items of its heap once the heap has more than this many items per
block."""


class BlockPrefixTree:
    """Index of a store's blocks by last use and parent, to evict the last blocks of contexts first.

    A block's parent is the previous block of its context. A block is useful only with all blocks before it,
    so only blocks without a child in the store are evicted. The index compares only the first
    ``PARENT_BYTES`` bytes of keys (short keys), because files record no more of the parent's key. No clock
    and no I/O.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}
        """Short key → full key, for blocks in the store."""
        self._parents: dict[bytes, bytes] = {}
        """Short key → short key of the parent."""
        self._children: Counter[bytes] = Counter()
        """Short key → number of the block's children in the store. The block itself need not be in the
        store."""
        self._used: dict[bytes, int] = {}
        """Short key → number of the block's last use. Uses are numbered from 1."""
        self._uses = 0
        self._ends: list[tuple[int, bytes]] = []
        """A heap of (number of the last use, short key), with an item for each block without children. It
        also has outdated items, which are skipped."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key[:PARENT_BYTES] in self._keys

    def add(self, key: bytes, parent: bytes | None = None) -> None:
        """Add a block, or mark a known block as just used. ``parent``: key of the parent, if known; a known
        parent is not replaced. Raises ``ValueError`` if ``parent`` is the block itself."""
        short = key[:PARENT_BYTES]
        before = parent[:PARENT_BYTES] if parent else None
        if before == short:
            raise ValueError(f"block {key.hex()} cannot follow itself")
        self._keys.setdefault(short, key)
        if before is not None and short not in self._parents:
            self._parents[short] = before
            self._children[before] += 1
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """Mark a block as just used. Does nothing for an unknown block."""
        short = key[:PARENT_BYTES]
        if short not in self._keys:
            return
        self._uses += 1
        self._used[short] = self._uses
        self._note_end(short)

    def remove(self, key: bytes) -> bool:
        """Remove a block, even if it has children. Returns whether the block was known."""
        short = key[:PARENT_BYTES]
        if self._keys.pop(short, None) is None:
            return False
        del self._used[short]
        before = self._parents.pop(short, None)
        if before is not None:
            self._children[before] -= 1
            if not self._children[before]:
                del self._children[before]
                self._note_end(before)
        return True

    def pop_lru_leaf(self) -> bytes | None:
        """Remove and return the least recently used block without children; ``None`` for an empty tree."""
        while self._ends:
            used, short = heapq.heappop(self._ends)
            if self._used.get(short) == used and not self._children[short]:
                key = self._keys[short]
                self.remove(key)
                return key
        return None

    def discard_stale(self) -> None:
        """Rebuild the heap without outdated items."""
        self._ends = [(used, one) for one, used in self._used.items() if not self._children[one]]
        heapq.heapify(self._ends)

    def _note_end(self, short: bytes) -> None:
        if short not in self._keys or self._children[short]:
            return
        if len(self._ends) > _MAX_STALE_RATIO * len(self._keys) + 64:
            self.discard_stale()
        heapq.heappush(self._ends, (self._used[short], short))


SEARCH_S = 0.5
"""Seconds after which a search of sibling stores ends with what it has found. Requests wait longer by
default (``TierLimits.max_probe_wait_s``), so they can use the result."""
_SEARCH_BATCH_KEYS = 32
"""A search looks at the clock each time it has found this many keys."""


class SiblingStores:
    """Reads the stores of other engines with the same ``identity``, in the folder that contains ``own``.

    ``own``: path of this engine's store, without symbolic links. Thread-safe; every call waits for the disk.
    ``leading`` lists the stores again each time, since engines start and stop. A file that its owner deletes
    is reported as missing. A damaged file, or one of another identity, is refused but not removed.
    """

    def __init__(
        self,
        own: Path,
        identity: KvIdentity,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own = own
        self.identity = identity
        self._digest = identity.digest()
        self._file_bytes = HEADER_BYTES + identity.block_bytes
        self._files = files or FileSystem()
        self._clock = clock
        self._lock = threading.Lock()
        self._stores: list[Path] = []
        """The stores of other engines. The store in which a block was found most recently comes first,
        because usually one engine wrote most of a context."""

    def leading(self, keys: Sequence[bytes]) -> ProbeResult:
        """Return how many leading ``keys`` these stores have together, and the number of stores. Only the
        sizes of files are checked. Unreadable files count as missing. The search ends after ``SEARCH_S``, so
        on a slow disk the number of keys may be too low."""
        end_s = self._clock() + SEARCH_S
        self.rescan()
        found = 0
        for key in keys:
            is_late = found and found % _SEARCH_BATCH_KEYS == 0 and self._clock() >= end_s
            if is_late or not self.has(key):
                break
            found += 1
        return ProbeResult(found, len(self._stores))

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, in order, with the block of ``key``, from the first store that has a usable copy.

        Raises ``BlockNotFound`` if no store has the block. If all copies are unusable, raises the
        ``BlockCorrupt`` or ``StoreError`` of the last copy tried. Raises ``ValueError`` for read-only buffers
        or a wrong size. After any exception the content of ``buffers`` is undefined.
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

    def rescan(self) -> None:
        """List the stores again, because engines start and stop."""
        fields, digits = asdict(self.identity), folder_name(self.identity, None)
        try:
            there = matching_stores(self._files, self.own.parent, fields, beginning=digits)
        except (IncompatibleStore, OSError):
            there = []
        there = [path for path in there if path != self.own]
        with self._lock:
            known = [store for store in self._stores if store in there]
            self._stores = known + [store for store in there if store not in known]

    def has(self, key: bytes) -> bool:
        """Return whether one of the stores that the last ``rescan`` found has the block. Opens the block's
        file in each store in turn and checks its size."""
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


SIBLINGS_RESCAN_S = 5.0
"""``SharedStore`` lists the sibling stores again after this many seconds."""

EVICTION_RETRY_S = 60.0
"""Seconds for which ``SharedStore`` evicts nothing after a file could not be removed, or after evictions left
the disk full. Further attempts would lose readable blocks and gain no room."""

DISK_FULL_EVICTIONS = 2
"""Maximum number of blocks evicted to write one block to a full disk. Other data may take the freed space."""


class SharedStore:
    """Stores Full Blocks by key: writes to this engine's ``DiskStore``, and also reads its siblings' stores.
    Thread-safe. Each call waits for the disk."""

    def __init__(
        self, own: DiskStore, *, files: FileSystem | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.identity = own.identity
        self._own = own
        self._sibling_stores = SiblingStores(own.path, own.identity, files)
        self._clock = clock
        self._rescanned_s = float("-inf")
        self._no_evictions_until_s = float("-inf")
        self._lock = threading.Lock()
        self._tree: BlockPrefixTree | None = None
        """The prefix tree of this engine's blocks; ``None`` before the first eviction."""
        self._new: dict[bytes, bytes] = {}
        """Key → key of the parent or empty, for blocks that this process stored before the tree was built.
        The parents of other blocks are read from their files."""
        self._building = threading.Lock()
        """Held while the tree is built. ``_lock`` stays free meanwhile, because reading the headers of a
        large store takes seconds."""

    @classmethod
    def open(cls, root: str | Path, identity: KvIdentity, *, name: str, budget_bytes: int) -> SharedStore:
        """Open or create this engine's store ``name`` in ``root``. Raises the errors of
        ``DiskStore.open``."""
        return cls(DiskStore.open(root, identity, name=name, budget_bytes=budget_bytes))

    def close(self) -> None:
        self._own.close()

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the stores have. A later read may still find no block, because
        an engine may delete blocks at any time."""
        return sum(1 for _ in takewhile(self._has, keys))

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers`` with the block of ``key``, like ``DiskStore.get_into``."""
        failed: BlockCorrupt | StoreError | None = None
        try:
            self._own.get_into(key, buffers)
        except BlockNotFound:
            self._forget(key)
        except BlockCorrupt as error:
            self._forget(key)
            failed = error
        except StoreError as error:
            failed = error
        else:
            with self._lock:
                if self._tree is not None:
                    self._tree.touch(key)
            return
        try:  # another engine may have an intact copy
            self._siblings().get_into(key, buffers)
        except BlockNotFound:
            if failed is not None:
                raise failed from None
            raise

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers`` as the block of ``key``, like ``DiskStore.put``. If the block does not fit,
        evict others."""
        outcome = self._own.put(key, buffers, parent=parent)
        if outcome in (PutOutcome.FULL, PutOutcome.DISK_FULL):
            outcome = self._put_evicting(key, buffers, parent, outcome)
        with self._lock:
            if self._tree is not None and outcome in (PutOutcome.STORED, PutOutcome.ALREADY):
                self._tree.add(key, parent if outcome is PutOutcome.STORED else None)
            elif outcome is PutOutcome.STORED:
                self._new[key] = parent
        return outcome

    def _has(self, key: bytes) -> bool:
        return self._own.has(key) or self._siblings().has(key)

    def _put_evicting(
        self, key: bytes, buffers: Sequence[Buffer], parent: bytes, outcome: PutOutcome
    ) -> PutOutcome:
        """Evict least recently used blocks without children until the new block fits, and store it. The new
        block's ancestors are never evicted, because the block would be useless without them.

        ``outcome``: ``FULL`` or ``DISK_FULL``, the outcome of the attempt without evictions. Returns the
        outcome of the last attempt. Evicts nothing if no store has the parent, if the budget is smaller than
        a block, or for ``EVICTION_RETRY_S`` after useless evictions. Stops when a file cannot be removed."""
        evicted = 0
        if self._own.file_bytes > self._own.budget_bytes or (parent and not self._has(parent)):
            return outcome
        if self._clock() < self._no_evictions_until_s:
            return outcome
        tree = self._build_tree()
        with self._lock:
            tree.add(key, parent or None)
        while outcome is PutOutcome.FULL or (
            outcome is PutOutcome.DISK_FULL and evicted < DISK_FULL_EVICTIONS
        ):
            with self._lock:
                victim = tree.pop_lru_leaf()
                if victim == key:  # only ancestors of the new block are left
                    return outcome
            if victim is None:
                break
            try:
                evicted += self._own.drop(victim)  # it may have been removed while the tree was built
            except StoreError:
                self._no_evictions_until_s = self._clock() + EVICTION_RETRY_S
                break
            outcome = self._own.put(key, buffers, parent=parent)
        if outcome is PutOutcome.DISK_FULL:
            self._no_evictions_until_s = self._clock() + EVICTION_RETRY_S
        if outcome not in (PutOutcome.STORED, PutOutcome.ALREADY):
            self._forget(key)
        return outcome

    def _build_tree(self) -> BlockPrefixTree:
        """Return the prefix tree. The first call builds it from the files' headers, while other threads can
        still read and store blocks."""
        with self._building:
            if self._tree is None:
                with self._lock:
                    known = dict(self._new)
                tree = BlockPrefixTree()
                keys = self._own.keys()  # least recently used first
                for key in keys:
                    tree.add(key, known[key] if key in known else self._own.parent_of(key))
                with self._lock:
                    for key, parent in self._new.items():  # also those stored meanwhile
                        tree.add(key, parent)
                    tree.discard_stale()
                    self._tree = tree
                    self._new.clear()
            return self._tree

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._new.pop(key, None)
            if self._tree is not None:
                self._tree.remove(key)

    def _siblings(self) -> SiblingStores:
        with self._lock:
            now_s = self._clock()
            if now_s - self._rescanned_s < SIBLINGS_RESCAN_S:
                return self._sibling_stores
            self._rescanned_s = now_s
        self._sibling_stores.rescan()
        return self._sibling_stores
