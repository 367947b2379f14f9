"""Which leading blocks placed contexts have in common, such as a system prompt that many programs begin with.

Contexts are given as chains of block hashes. A chained hash covers all blocks before it, so two contexts
share exactly their common prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LEARNED = 1024
"""Maximum number of (tenant, agent type) pairs for which the shared prefix of new programs is remembered."""

Key = Hashable
"""A program's id, or (``"request"``, id) for a request without a program."""


@dataclass(slots=True, eq=False)
class _Context:
    key: Key
    chain: Sequence[Any]
    length: int
    """Number of hashes that count. The engine may append to ``chain`` later."""
    group: str
    """Tier that holds the context."""
    number: int
    """Position among contexts with equal chains."""
    before: int = 0
    """Number of leading hashes shared with the context before it in the order."""


class SharedPrefixes:
    """The contexts of all tiers, in lexicographic order, so that contexts with a common prefix are adjacent.

    A change takes O(log n) comparisons of chains, each by bisection, for n contexts with the same first hash.
    """

    def __init__(self) -> None:
        self._of: dict[Key, _Context] = {}
        self._sorted: dict[Any, list[_Context]] = {}
        """First hash → the contexts that begin with it, in order."""
        self._learned: OrderedDict[Hashable, int] = OrderedDict()
        self._puts = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def put(self, key: Key, chain: Sequence[Any], group: str) -> None:
        """Store a context, in place of its earlier one. An empty chain is not stored."""
        self.remove(key)
        if not chain:
            return
        self._puts += 1
        context = _Context(key, chain, len(chain), group, self._puts)
        others = self._sorted.setdefault(chain[0], [])
        at = _place(others, context)
        if at:
            context.before = _common(others[at - 1], context)
        if at < len(others):
            others[at].before = _common(context, others[at])
        others.insert(at, context)
        self._of[key] = context

    def move(self, key: Key, group: str) -> None:
        """Record that another tier holds the context, if it is stored."""
        context = self._of.get(key)
        if context is not None:
            context.group = group

    def remove(self, key: Key) -> None:
        """Remove a context, if it is stored."""
        context = self._of.pop(key, None)
        if context is None:
            return
        others = self._sorted[context.chain[0]]
        at = _place(others, context)
        assert others[at] is context
        del others[at]
        if at < len(others):
            others[at].before = min(context.before, others[at].before)
        if not others:
            del self._sorted[context.chain[0]]

    def chain(self, key: Key) -> Sequence[Any]:
        """The stored chain of a context; empty if it is not stored."""
        context = self._of.get(key)
        return context.chain[: context.length] if context is not None else ()

    def length(self, key: Key) -> int:
        """Number of hashes of a stored context; 0 if it is not stored."""
        context = self._of.get(key)
        return context.length if context is not None else 0

    def shared(self, key: Key, chain: Sequence[Any] = ()) -> int:
        """Number of leading hashes that a context shares with another one. For a context that is not stored,
        ``chain`` is used."""
        context = self._of.get(key)
        if context is None:
            if not chain:
                return 0
            context = _Context(key, chain, len(chain), "", 0)
        others = self._sorted.get(context.chain[0], [])
        at = _place(others, context)
        stored = at < len(others) and others[at] is context
        if stored:
            after = others[at + 1].before if at + 1 < len(others) else 0
            return max(context.before, after)
        before = _common(others[at - 1], context) if at else 0
        return max(before, _common(context, others[at]) if at < len(others) else 0)

    def overlaps(self) -> Counter[str]:
        """Number of hashes of each tier's contexts that are counted more than once, by tier: the sum of the
        contexts' lengths minus the number of distinct hashes."""
        found: Counter[str] = Counter()
        for contexts in self._sorted.values():
            if len(contexts) < 2:
                continue
            common: dict[str, int] = {}
            """Tier → hashes that its last context so far shares with the present one."""
            for context in contexts:
                for group, length in common.items():
                    if length > context.before:
                        common[group] = context.before
                found[context.group] += common.get(context.group, 0)
                common[context.group] = context.length
        return found

    def learn(self, kind: Hashable, shared: int) -> None:
        """Remember how many leading hashes a new program of this kind shared with others."""
        self._learned[kind] = shared
        self._learned.move_to_end(kind)
        if len(self._learned) > MAX_LEARNED:
            self._learned.popitem(last=False)

    def expected(self, kind: Hashable) -> int:
        """Number of leading hashes that a new program of this kind will share: as many as the last one."""
        return self._learned.get(kind, 0)

    def clear(self) -> None:
        """Remove all contexts."""
        self._of.clear()
        self._sorted.clear()


class UntrackedRequests:
    """Running requests without a placed program."""

    def __init__(self, prefixes: SharedPrefixes, group: str) -> None:
        """``group``: tier under which their contexts are stored in ``prefixes``."""
        self._prefixes, self._group = prefixes, group
        self._of: dict[str, tuple[int, int]] = {}
        """Request id → (prompt tokens, leading hashes that are left out because another context has them)."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all."""
        return sum(tokens for tokens, _ in self._of.values())

    @property
    def left_out_hashes(self) -> int:
        """Number of leading hashes that other contexts had when the requests were added."""
        return sum(shared for _, shared in self._of.values())

    def add(self, request_id: str, tokens: int, chain: Sequence[Any]) -> None:
        """Count a request."""
        key = ("request", request_id)
        self._prefixes.put(key, chain, self._group)
        self._of[request_id] = tokens, self._prefixes.shared(key)

    def remove(self, request_id: str) -> bool:
        """Count a request no longer. Returns whether it was counted."""
        self._prefixes.remove(("request", request_id))
        return self._of.pop(request_id, None) is not None

    def clear(self) -> None:
        """Count none."""
        self._of.clear()


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


def _place(contexts: Sequence[_Context], context: _Context) -> int:
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
