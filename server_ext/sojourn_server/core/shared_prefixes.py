"""Finds the leading blocks that the contexts of a tier have in common, such as a system prompt.

Contexts are given as chains of block hashes. A chained hash covers all blocks before it, so two contexts
share exactly their common prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LEARNED = 1024
"""Maximum number of kinds of programs for which ``ExpectedPrefixes`` remembers a prefix."""

Key = Hashable
"""A program's id, or (``"request"``, id) for a request without a program."""


@dataclass(slots=True, eq=False)
class _Context:
    key: Key
    chain: Sequence[Any]
    length: int
    """Number of hashes that count. The engine may append to ``chain`` later."""
    number: int
    """Sequence number, by which contexts with equal chains are ordered."""
    before: int = 0
    """Number of leading hashes shared with the preceding context in the order."""


class SharedPrefixes:
    """The contexts of one tier in lexicographic order, so that contexts with a common prefix are adjacent.

    A context's *own* hashes are those that the preceding context lacks. So each distinct hash is an own hash
    of exactly one context, and the numbers of own hashes add up to the number of distinct hashes. A change
    takes O(log n) comparisons of chains. n is the number of contexts with the same first hash.
    """

    def __init__(self) -> None:
        self._of: dict[Key, _Context] = {}
        self._sorted: dict[Any, list[_Context]] = {}
        """First hash → the contexts that begin with it, in order."""
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
        context = _Context(key, chain, len(chain), self._puts)
        others = self._sorted.setdefault(chain[0], [])
        at = _index_of(others, context)
        if at:
            context.before = _common(others[at - 1], context)
        others.insert(at, context)
        self._of[key] = context
        return changed | self._set_before(others, at + 1, context)

    def remove(self, key: Key) -> set[Key]:
        """Remove a context, if it is stored. Returns the other contexts whose own hashes have changed."""
        context = self._of.pop(key, None)
        if context is None:
            return set()
        head = context.chain[0]
        others = self._sorted[head]
        at = _index_of(others, context)
        assert others[at] is context
        del others[at]
        if not others:
            del self._sorted[head]
        return self._set_before(others, at, others[at - 1] if at else None)

    def shared_hashes(self, key: Key) -> int:
        """Number of leading hashes that a stored context shares with the preceding context; 0 if the context
        is not stored."""
        context = self._of.get(key)
        return context.before if context is not None else 0

    def chain(self, key: Key) -> Sequence[Any]:
        """The stored chain of a context; empty if it is not stored."""
        context = self._of.get(key)
        return context.chain[: context.length] if context is not None else ()

    def length(self, key: Key) -> int:
        """Number of hashes of a stored context; 0 if it is not stored."""
        context = self._of.get(key)
        return context.length if context is not None else 0

    def common(self, chain: Sequence[Any]) -> int:
        """Length of the longest prefix, in hashes, that ``chain`` has in common with any stored context."""
        others = self._sorted.get(chain[0]) if chain else None
        if not others:
            return 0
        context = _Context("", chain, len(chain), 0)
        at = _index_of(others, context)
        before = _common(others[at - 1], context) if at else 0
        return max(before, _common(context, others[at]) if at < len(others) else 0)

    def clear(self) -> None:
        """Remove all contexts."""
        self._of.clear()
        self._sorted.clear()

    @staticmethod
    def _set_before(others: list[_Context], at: int, before: _Context | None) -> set[Key]:
        """Update the context at index ``at``, whose preceding context is now ``before``. Returns the
        context's key if its own hashes have changed."""
        if at >= len(others):
            return set()
        context = others[at]
        common = _common(before, context) if before is not None else 0
        if common == context.before:
            return set()
        context.before = common
        return {context.key}


class ExpectedPrefixes:
    """For each kind of program, the number of leading hashes that a new program is expected to share with
    other contexts. This is the number that the last new program of the kind shared."""

    def __init__(self) -> None:
        self._last: OrderedDict[Hashable, int] = OrderedDict()
        self.changed: set[Hashable] = set()
        """Kinds whose expected length has changed since the caller last cleared this set."""

    def learn(self, kind: Hashable, shared: int) -> None:
        """Remember how many leading hashes a new program of this kind shared."""
        if self._last.get(kind, 0) != shared:
            self.changed.add(kind)
        self._last[kind] = shared
        self._last.move_to_end(kind)
        if len(self._last) > MAX_LEARNED:
            self._last.popitem(last=False)

    def of(self, kind: Hashable) -> int:
        """Number of leading hashes that the next new program of this kind is expected to share."""
        return self._last.get(kind, 0)


def _common(one: _Context, other: _Context) -> int:
    """Number of leading hashes that two contexts share."""
    low, high = 0, min(one.length, other.length)
    while low < high:
        middle = (low + high + 1) // 2
        if one.chain[middle - 1] == other.chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _index_of(contexts: Sequence[_Context], context: _Context) -> int:
    """Index of ``context`` in ``contexts``, or where it would be inserted. Equal chains are in the order of
    their numbers."""
    low, high = 0, len(contexts)
    while low < high:
        middle = (low + high) // 2
        if contexts[middle] is context:
            return middle
        if _is_before(contexts[middle], context):
            low = middle + 1
        else:
            high = middle
    return low


def _is_before(one: _Context, other: _Context) -> bool:
    common = _common(one, other)
    if common == one.length or common == other.length:
        return (one.length, one.number) < (other.length, other.number)
    first: bool = one.chain[common] < other.chain[common]
    return first
