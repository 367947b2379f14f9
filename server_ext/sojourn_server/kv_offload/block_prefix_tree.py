"""Which block follows which, and which may be deleted first: the longest unused of those nothing follows.

A block is found only with all of those before it in its context. So what is deleted are ends: a block that
another in the store follows (its *child*) stays as long as that one does, however long it was not used
itself. The keys make a tree by themselves, each being the chain hash of all tokens up to its block's end;
this index adds who is whose parent, which a hash does not tell.

No clock and no I/O. Keys count by their first ``PARENT_BYTES`` bytes, which is what files keep of a parent.
"""

from __future__ import annotations

import heapq
from collections import Counter

from .block_file import PARENT_BYTES

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
