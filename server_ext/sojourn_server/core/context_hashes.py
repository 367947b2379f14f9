"""Stores chained block hashes, of programs' last turns, of workflow steps and of placed programs, and finds
the leading blocks that contexts share, such as a system prompt.

A chained hash covers all blocks before it. So two contexts share exactly their common prefix, and a hash
stands at the same place of all contexts that have it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import common_prefix_length

Key = TypeVar("Key", bound=Hashable)


class HashLists(dict[Key, Sequence[Any]]):
    """Lists of block hashes by key. At most ``max_hashes`` hashes are kept; the lists added first are dropped
    first."""

    def __init__(self, max_hashes: int = 1_000_000) -> None:
        super().__init__()
        self.max_hashes = max_hashes

    def put(self, key: Key, hashes: Sequence[Any]) -> None:
        """Replace the list of ``key``."""
        self.pop(key, None)
        self[key] = hashes
        too_many = sum(map(len, self.values())) - self.max_hashes
        while too_many > 0:
            too_many -= len(self.pop(next(iter(self))))


class PrefixTree:
    """A set of chains that answers which prefix another chain shares with any of them. An answer takes one
    bisection for each branch on the way."""

    def __init__(self) -> None:
        self._chains: dict[Any, Sequence[Any]] = {}
        """First hash that a chain added to the tree → this chain."""

    def common(self, chain: Sequence[Any]) -> int:
        """Return the length of the longest prefix, in hashes, that ``chain`` shares with a chain of the
        tree."""
        shared = 0
        while shared < len(chain) and (other := self._chains.get(chain[shared])) is not None:
            shared = common_prefix_length(other, chain)
        return shared

    def add(self, chain: Sequence[Any]) -> int:
        """Add a chain. Returns the length of the prefix that it shares with earlier chains. So the rest of
        each chain, in order of addition, counts every distinct hash once."""
        shared = self.common(chain)
        if shared < len(chain):
            self._chains[chain[shared]] = chain
        return shared


class PlacedPrefixes:
    """Stores the keys and the retention rank of each program that is placed in a tier.

    The retention rank (``RetentionRank``) orders eviction from host memory, where blocks of lower rank are
    evicted first. If several programs share a prefix, the highest of their ranks applies to the prefix."""

    def __init__(self) -> None:
        self._of: dict[ProgramId, tuple[Sequence[Any], int]] = {}

    def keys_of(self, program_id: ProgramId) -> Sequence[Any]:
        """The program's chained block hashes; empty if none are stored."""
        return self._of.get(program_id, ((), 0))[0]

    def shared_prefix_length(self, program_id: ProgramId, keys: Sequence[Any]) -> int:
        """Length of the common prefix of the program's stored keys and ``keys``."""
        return common_prefix_length(self.keys_of(program_id), keys)

    def put(self, program_id: ProgramId, keys: Sequence[Any], rank: int) -> int:
        """Store a program's keys and rank. Returns the length, in keys, of the longest prefix that the
        program shares with a program of higher rank."""
        self.forget(program_id)
        longest = 0
        for other, other_rank in self._of.values():
            # Bisect only if the other shares more than the longest prefix so far, which the next key shows.
            if other_rank > rank and longest < min(len(other), len(keys)) and other[longest] == keys[longest]:
                longest = common_prefix_length(other, keys)
        if keys:
            self._of[program_id] = keys, rank
        return longest

    def forget(self, program_id: ProgramId) -> None:
        """Remove the program."""
        self._of.pop(program_id, None)
