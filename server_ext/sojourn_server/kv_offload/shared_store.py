"""One engine's files and those of its sibling engines as one ``BlockStore``.

Reads find every engine's blocks. Room is made by deleting this engine's own, from the ends of contexts.

Each engine writes a ``DiskStore`` of its own and reads the others' (``siblings``): nothing is agreed on, no
file has two writers, and an engine that dies leaves what it has written to the others. To look for a key
that nobody has opens a file in every store beside this one; with dozens of engines ``VllmFsStore``, where all
write one folder, looks once.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .block_file import (
    HEADER_BYTES,
    PARENT_BYTES,
    BlockCorrupt,
    Buffer,
    KvIdentity,
    read_block,
)
from .disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError, block_path, block_payload
from .file_system import FileSystem, LocalFileSystem
from .offload_jobs import ProbeResult
from .store_folder import find_identity_stores

_MAX_STALE_RATIO = 2
"""The heap is built anew when it is so many times as long as there are blocks."""


class BlockPrefixTree:
    """Blocks of one store by last use, as a forest."""

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}
        """Short key → key, of what is in the store."""
        self._parents: dict[bytes, bytes] = {}
        self._children: Counter[bytes] = Counter()
        """Of each block, also of those not in the store, how many blocks in the store follow it."""
        self._used: dict[bytes, int] = {}
        self._uses = 0
        self._ends: list[tuple[int, bytes]] = []
        """A heap of (last use, short key); an entry that is no longer true is passed over."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key[:PARENT_BYTES] in self._keys

    def add(self, key: bytes, parent: bytes | None = None) -> None:
        """A block is there, and has just been used. One known already gets the parent if it had none.

        Raises ``ValueError`` for a block that is its own parent.
        """
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
        """A block was used. Nothing happens where it is not there."""
        short = key[:PARENT_BYTES]
        if short not in self._keys:
            return
        self._uses += 1
        self._used[short] = self._uses
        self._note_end(short)

    def remove(self, key: bytes) -> bool:
        """A block is no longer there, whoever follows it; whether it was."""
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
        """Remove and return the longest unused block that nothing follows; ``None`` where there is none."""
        while self._ends:
            used, short = heapq.heappop(self._ends)
            if self._used.get(short) == used and not self._children[short]:
                key = self._keys[short]
                self.remove(key)
                return key
        return None

    def discard_stale(self) -> None:
        """Have ``pop_lru_leaf`` pass over nothing the next time, however much was added before."""
        self._ends = [(used, one) for one, used in self._used.items() if not self._children[one]]
        heapq.heapify(self._ends)

    def _note_end(self, short: bytes) -> None:
        if short not in self._keys or self._children[short]:
            return
        if len(self._ends) > _MAX_STALE_RATIO * len(self._keys) + 64:
            self.discard_stale()
        heapq.heappush(self._ends, (self._used[short], short))


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
        self._files.confine(own.parent)
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


SIBLINGS_RESCAN_S = 5.0
"""Seconds for which the list of stores beside this one is believed."""


class SharedStore:
    """A ``BlockStore`` over a ``DiskStore``, which it owns, and its siblings.

    ``counts`` has, by what became of them: blocks ``stored``, ``already``, ``full``, ``disk_full``,
    ``evicted``; ``read``, ``borrowed`` (from another engine's store), ``missing``, ``corrupt``, ``failed``.
    """

    def __init__(
        self,
        own: DiskStore,
        *,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._sibling_stores = SiblingStores(own.path, own.identity, files)
        self._clock = clock
        self._looked_s = float("-inf")
        self._lock = threading.Lock()
        self._lineage: BlockPrefixTree | None = None
        """Filled when room is first needed: until then nobody needs to know, and the files know."""
        self._new: dict[bytes, bytes] = {}
        """Parents of what was stored before that, so that those files need not be read."""
        self._learning = threading.Lock()
        """Held, without the other, while files are read for it: a big store takes seconds."""
        self._meanwhile: list[Callable[[BlockPrefixTree], object]] | None = None
        """What happened since that began."""
        self.counts: Counter[str] = Counter()

    @classmethod
    def open(cls, root: str | Path, identity: KvIdentity, *, name: str, budget_bytes: int) -> SharedStore:
        """Open this engine's store in ``root``, called ``name``, or make it. Raises as ``DiskStore.open``."""
        return cls(DiskStore.open(root, identity, name=name, budget_bytes=budget_bytes))

    @property
    def identity(self) -> KvIdentity:
        return self._own.identity

    @property
    def used_bytes(self) -> int:
        """Of this engine's files."""
        return self._own.used_bytes

    def close(self) -> None:
        self._own.close()

    def leading(self, keys: Sequence[bytes]) -> int:
        found = 0
        for key in keys:
            if not self._has(key):
                break
            found += 1
        return found

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        try:
            self._get_into(key, buffers)
        except BlockNotFound:
            self._count("missing")
            raise
        except BlockCorrupt:
            self._count("corrupt")
            raise
        except StoreError:
            self._count("failed")
            raise

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        outcome = self._own.put(key, buffers, parent=parent)
        if outcome is PutOutcome.FULL:
            outcome = self._put_evicting(key, buffers, parent)
        if outcome in (PutOutcome.STORED, PutOutcome.ALREADY):
            self._note(key, parent if outcome is PutOutcome.STORED else b"")
        self._count(outcome.value)
        return outcome

    def _has(self, key: bytes) -> bool:
        return self._own.has(key) or self._beside().has(key)

    def _get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
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
            self._touch(key)
            self._count("read")
            return
        try:  # another engine may have what is damaged here
            self._beside().get_into(key, buffers)
        except BlockNotFound:
            if failed is not None:
                raise failed from None
            raise
        self._count("borrowed")

    def _put_evicting(self, key: bytes, buffers: Sequence[Buffer], parent: bytes) -> PutOutcome:
        """As ``put``, deleting what is longest unused and followed by nothing. What the block follows stays:
        it would be of no use without it, and where that is nowhere nothing makes way for it."""
        outcome = PutOutcome.FULL
        if self._own.file_bytes > self._own.budget_bytes or (parent and not self._has(parent)):
            return outcome
        lineage = self._learn()
        with self._lock:
            lineage.add(key, parent or None)
        while outcome is PutOutcome.FULL:
            with self._lock:
                victim = lineage.pop_lru_leaf()
                if victim == key:  # nothing else is left: all others are what it follows
                    return PutOutcome.FULL
            if victim is None:
                break
            try:
                if self._own.drop(victim):
                    self._count("evicted")
            except StoreError:
                self._count("failed")
            outcome = self._own.put(key, buffers, parent=parent)
        if outcome not in (PutOutcome.STORED, PutOutcome.ALREADY):
            self._forget(key)
        return outcome

    def _learn(self) -> BlockPrefixTree:
        """The lineage, made from the files' headers when it is first needed; who reads waits for none."""
        with self._learning:
            with self._lock:
                if self._lineage is not None:
                    return self._lineage
                known, self._meanwhile = dict(self._new), []
            lineage = BlockPrefixTree()
            try:
                keys = self._own.keys()  # the longest unused first
                for key in keys:
                    parent = known[key] if key in known else self._own.parent_of(key)
                    lineage.add(key, parent or None)
                lineage.discard_stale()
            except BaseException:
                with self._lock:
                    self._meanwhile = None
                raise
            with self._lock:
                for happened in self._meanwhile or ():
                    happened(lineage)
                self._lineage, self._meanwhile = lineage, None
                self._new.clear()
            return lineage

    def _note(self, key: bytes, parent: bytes) -> None:
        with self._lock:
            if self._lineage is None and parent:
                self._new[key] = parent
            self._tell(lambda lineage: lineage.add(key, parent or None))

    def _touch(self, key: bytes) -> None:
        with self._lock:
            self._tell(lambda lineage: lineage.touch(key))

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._new.pop(key, None)
            self._tell(lambda lineage: lineage.remove(key))

    def _tell(self, what: Callable[[BlockPrefixTree], object]) -> None:
        """Now, or once it has been made; under the lock. Nobody needs to know before it is begun."""
        if self._lineage is not None:
            what(self._lineage)
        elif self._meanwhile is not None:
            self._meanwhile.append(what)

    def _beside(self) -> SiblingStores:
        with self._lock:
            now_s = self._clock()
            if now_s - self._looked_s < SIBLINGS_RESCAN_S:
                return self._sibling_stores
            self._looked_s = now_s
        self._sibling_stores.look()
        return self._sibling_stores

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1
