"""Computes which blocks a context needs in each KV cache group, and how much of the context is available.

In models with several groups, layers with full attention need all blocks of a context. Layers with a sliding
window need only the last blocks of a context; they are called window blocks here. A block's key consists of
its content hash and a suffix for its group. Plain Python, without vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .offload_jobs import BlockKey

HasBlock = Callable[[BlockKey], bool]
"""A function that returns whether a block is available."""


def subtract(users: Counter[BlockKey], keys: Iterable[BlockKey]) -> None:
    """Take one user from each of ``keys``. A key without a user is removed."""
    for key in keys:
        users[key] -= 1
        if not users[key]:
            del users[key]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: its blocks, and which of them a context of a given length needs."""

    suffix: bytes
    """Bytes that follow the content hash in a block key of this group."""
    block_tokens: int
    hashes_per_block: int
    """Number of a request's block hashes for each block of this group."""
    first_needed: Callable[[int], int]
    """Function: length of a context in tokens → index of the first block that the context's next token
    needs. A longer context never gives a lower index."""
    keeps_all: bool
    """Whether a context needs all its blocks of this group, as with full attention."""


class NeededBlock(NamedTuple):
    """A block that a context needs."""

    group: int
    place: int
    """Position in the context, in blocks of its group."""
    key: BlockKey


@dataclass(slots=True)
class ContextKeys:
    """The keys of one context's blocks in all groups. Each key is computed when it is needed."""

    groups: Sequence[GroupLayout]
    hashes: Sequence[bytes]
    """The request's block hashes, from the beginning of the context."""
    step_tokens: int
    """All lengths are multiples of this."""
    start_tokens: int
    """Number of leading tokens whose KV the device has in every group."""
    end_tokens: int
    """Greatest length considered; rounded down to a multiple of ``step_tokens``."""

    def __post_init__(self) -> None:
        self.end_tokens = max(self.start_tokens, self._rounded(self.end_tokens))

    @property
    def identity(self) -> tuple[int, int, bytes]:
        """Value to compare two ``ContextKeys`` of one request. If the values are equal, so are the keys,
        because a request only grows at its end."""
        return self.start_tokens, self.end_tokens, self.hashes[0] if self.hashes else b""

    def covered(self, has: HasBlock) -> int:
        """Return the length in tokens of the longest available prefix of the context, at least
        ``start_tokens``. A prefix is available if all blocks that it needs after ``start_tokens`` are.

        A missing window block shortens the prefix for all groups. So the groups with windows are checked in
        rounds, until a round shortens nothing. A round takes O(blocks) per group."""
        end = self.covered_without_windows(has)
        while end > self.start_tokens:
            shorter = end
            for group in self.groups:
                if not group.keeps_all:
                    shorter = self._trailing(group, shorter, has)
            if shorter == end:
                return end
            end = shorter
        return self.start_tokens

    def begins(self, has: HasBlock) -> bool:
        """Return whether ``covered`` is more than ``start_tokens``; with one group in O(1)."""
        if len(self.groups) == 1:
            first = min(self.end_tokens, self.start_tokens + self.step_tokens)
            return self._leading(self.groups[0], first, has) > self.start_tokens
        return self.covered(has) > self.start_tokens

    def missed_windows(self, tokens: int, has: HasBlock) -> list[BlockKey]:
        """Return the window blocks that a prefix of over ``tokens`` tokens lacks, if it lacks no others."""
        if all(group.keeps_all for group in self.groups):
            return []
        end = replace(self, start_tokens=tokens).covered_without_windows(has)
        return replace(self, start_tokens=0).window_keys(end) if end > tokens else []

    def covered_without_windows(self, has: HasBlock) -> int:
        """Return what ``covered`` would return if all window blocks were available."""
        end = self.end_tokens
        for group in self.groups:
            if group.keeps_all:
                end = self._leading(group, end, has)
        return end

    def window_keys(self, tokens: int) -> list[BlockKey]:
        """Return the keys of the window blocks that a context of ``tokens`` tokens needs."""
        end = min(self._rounded(tokens), self.end_tokens)
        return [each.key for each in self.needed(end) if not self.groups[each.group].keeps_all]

    def needed(self, tokens: int) -> Iterator[NeededBlock]:
        """Yield the blocks after ``start_tokens`` that a context of ``tokens`` tokens needs. Window blocks
        come first. Host memory evicts them last, because the other blocks are useless without them."""
        for number, group in sorted(enumerate(self.groups), key=lambda each: each[1].keeps_all):
            for place in range(self._first(group, tokens), tokens // group.block_tokens):
                yield NeededBlock(number, place, self._key(group, place))

    def _leading(self, group: GroupLayout, end: int, has: HasBlock) -> int:
        size = group.block_tokens
        index = self.start_tokens // size
        while (index + 1) * size <= end and has(self._key(group, index)):
            index += 1
        return self._rounded(min(end, index * size))

    def _trailing(self, group: GroupLayout, end: int, has: HasBlock) -> int:
        """Return the largest length up to ``end`` for which all needed blocks of the group are available."""
        index = end // group.block_tokens - 1
        while end > self.start_tokens and index >= self._first(group, end):
            if has(self._key(group, index)):
                index -= 1
            else:
                end = self._rounded(index * group.block_tokens)
                index = end // group.block_tokens - 1
        return max(end, self.start_tokens)

    def _first(self, group: GroupLayout, tokens: int) -> int:
        return max(self.start_tokens // group.block_tokens, group.first_needed(tokens))

    def _key(self, group: GroupLayout, index: int) -> BlockKey:
        return self.hashes[(index + 1) * group.hashes_per_block - 1] + group.suffix

    def _rounded(self, tokens: int) -> int:
        return tokens // self.step_tokens * self.step_tokens


class ContextEnds:
    """Keys of the window blocks at the end of each recent prompt and turn, for models with several KV cache
    groups. A later request continues from such an end and needs only the window blocks there.

    Holds the ends of each program's newest prompt and newest turn, and ends that belong to no program. If
    they have more than ``max_keys`` keys in total, the oldest are forgotten.
    """

    def __init__(self, max_keys: int) -> None:
        """``max_keys``: number of blocks that all tiers can hold. More keys would be useless."""
        self._max_keys = max_keys
        self._ends: dict[tuple[str | bytes, ...], Sequence[BlockKey]] = {}
        """(``"prompt"`` or ``"turn"``, program id), or the keys of an end that belongs to no program → keys
        of the window blocks there, oldest end first."""
        self._users: Counter[BlockKey] = Counter()
        """Key → number of ends that contain it."""

    def __contains__(self, key: object) -> bool:
        return key in self._users

    def put(self, kind: str, program_id: str | None, keys: Sequence[BlockKey]) -> None:
        """Record ``keys`` as the end of a program's newest prompt or turn (``kind``), output included. The
        end of its previous one is forgotten. ``program_id`` is ``None`` for an end of no program."""
        end = tuple(keys) if program_id is None else (kind, program_id)
        self._users.update(keys)
        self._remove(end)
        self._ends[end] = keys
        while len(self._users) > self._max_keys and len(self._ends) > 1:
            self._remove(next(iter(self._ends)))

    def forget(self, program_id: str) -> None:
        """Forget the ends of a program's prompt and turn."""
        for kind in ("prompt", "turn"):
            self._remove((kind, program_id))

    def _remove(self, end: tuple[str | bytes, ...]) -> None:
        subtract(self._users, self._ends.pop(end, ()))
