"""Whose contexts were placed, so that what several share keeps the rank of whoever needs it most."""

from __future__ import annotations

from collections.abc import Sequence

from .host_slots import Rank
from .jobs import Key


class PlacedChains:
    """The chain of block hashes of each placed program, and its rank. A chain's hashes name all that goes
    before, so two that differ somewhere differ from there on."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Sequence[Key], Rank]] = {}
        self._by_head: dict[Key, set[str]] = {}
        """Programs whose chains begin alike."""

    def __len__(self) -> int:
        return len(self._of)

    def keys_of(self, program_id: str) -> Sequence[Key]:
        """The chain that was put last; empty where there is none."""
        known = self._of.get(program_id)
        return known[0] if known is not None else ()

    def put(self, program_id: str, keys: Sequence[Key], rank: Rank) -> int:
        """Note a program's chain and rank. Returns how many leading keys others of higher rank have too."""
        self.forget(program_id)
        if not keys:
            return 0
        alike = self._by_head.setdefault(keys[0], set())
        shared = 0
        for other in alike:
            chain, others_rank = self._of[other]
            if others_rank > rank:
                shared = max(shared, _common(keys, chain))
        alike.add(program_id)
        self._of[program_id] = keys, rank
        return shared

    def forget(self, program_id: str) -> None:
        """The program has nothing placed any more."""
        known = self._of.pop(program_id, None)
        if known is None:
            return
        alike = self._by_head[known[0][0]]
        alike.discard(program_id)
        if not alike:
            del self._by_head[known[0][0]]


def _common(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Leading keys that two chains share, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
