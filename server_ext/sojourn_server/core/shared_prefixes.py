"""Finds the leading blocks that the contexts of a tier have in common, such as a system prompt.

Contexts are given as chains of block hashes. A chained hash covers all blocks before it, so two contexts
share exactly their common prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics.turn_ledger import common_prefix_length

Key = Hashable
"""A program's id, or (``"request"``, id) for a request without a program."""


@dataclass(slots=True, eq=False)
class _Context:
    key: Key
    chain: Sequence[Any]
    number: int
    """Sequence number, by which contexts with equal chains are ordered."""
    before: int = 0
    """Number of leading hashes shared with the preceding context in the order."""

    def __lt__(self, other: _Context) -> bool:
        # Chains of thousands of hashes often differ late: bisection is faster than a comparison in order.
        common = common_prefix_length(self.chain, other.chain)
        if common == len(self.chain) or common == len(other.chain):
            return (len(self.chain), self.number) < (len(other.chain), other.number)
        first: bool = self.chain[common] < other.chain[common]
        return first


class SharedPrefixes:
    """The contexts of one tier in lexicographic order, so that contexts with a common prefix are adjacent.

    A context's *own* hashes are those that the preceding context lacks. So each distinct hash is an own hash
    of exactly one context, and the numbers of own hashes add up to the number of distinct hashes. A change
    takes O(log n) comparisons of chains.
    """

    def __init__(self) -> None:
        self._of: dict[Key, _Context] = {}
        self._sorted: list[_Context] = []
        self._puts = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def put(self, key: Key, chain: Sequence[Any]) -> set[Key]:
        """Store a context, in place of its earlier one. An empty chain is not stored. Returns the other
        contexts whose own hashes have changed."""
        changed = self.remove(key)
        if not chain:
            return changed
        self._puts += 1
        # A copy, since the engine may append to its list later.
        context = self._of[key] = _Context(key, chain[:], self._puts)
        at = bisect_left(self._sorted, context)
        self._sorted.insert(at, context)
        self._set_before(at)
        return changed | self._set_before(at + 1)

    def remove(self, key: Key) -> set[Key]:
        """Remove a context, if it is stored. Returns the other contexts whose own hashes have changed."""
        context = self._of.pop(key, None)
        if context is None:
            return set()
        at = bisect_left(self._sorted, context)
        del self._sorted[at]
        return self._set_before(at)

    def shared_hashes(self, key: Key) -> int:
        """Number of leading hashes that a stored context shares with the preceding context; 0 if the context
        is not stored."""
        context = self._of.get(key)
        return context.before if context is not None else 0

    def chain(self, key: Key) -> Sequence[Any]:
        """The stored chain of a context; empty if it is not stored."""
        context = self._of.get(key)
        return context.chain if context is not None else ()

    def common(self, chain: Sequence[Any]) -> int:
        """Length of the longest prefix, in hashes, that ``chain`` has in common with any stored context."""
        at = bisect_left(self._sorted, _Context("", chain, 0))
        return max(
            (common_prefix_length(one.chain, chain) for one in self._sorted[max(0, at - 1) : at + 1]),
            default=0,
        )

    def clear(self) -> None:
        """Remove all contexts."""
        self._of.clear()
        self._sorted.clear()

    def _set_before(self, at: int) -> set[Key]:
        """Update the context at index ``at``, whose preceding context may have changed. Returns the context's
        key if its own hashes have changed."""
        if at >= len(self._sorted):
            return set()
        context = self._sorted[at]
        common = common_prefix_length(self._sorted[at - 1].chain, context.chain) if at else 0
        if common == context.before:
            return set()
        context.before = common
        return {context.key}
