"""One engine's files and those of its sibling engines as one ``BlockStore``.

Reads find every engine's blocks. Room is made by deleting this engine's own, from the ends of contexts.

Each engine writes a ``DiskStore`` of its own and reads the others' (``siblings``): nothing is agreed on, no
file has two writers, and an engine that dies leaves what it has written to the others. To look for a key
that nobody has opens a file in every store beside this one; with dozens of engines ``VllmFsStore``, where all
write one folder, looks once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .block_file import BlockCorrupt, Buffer, FileSystem, KvIdentity
from .block_prefix_tree import BlockPrefixTree
from .disk_store import BlockNotFound, DiskStore, PutOutcome, StoreError
from .sibling_stores import SiblingStores

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
