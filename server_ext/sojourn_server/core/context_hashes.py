"""Chained block hashes of programs: of their last turns, and of the contexts that placement has moved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import common_prefix_length


class ContextHashStore:
    """Block hashes of each program's last turn, at most ``max_hashes`` in all; the oldest contexts are
    dropped first.

    They distinguish a changed prompt from an evicted one, and late leases look up blocks by them. After its
    context was dropped, a program's losses have the cause ``unknown`` in the ledger.
    """

    def __init__(self, max_hashes: int = 1_000_000) -> None:
        self.max_hashes = max_hashes
        self.hashes = 0
        self._contexts: OrderedDict[ProgramId, Sequence[Any]] = OrderedDict()

    def put(self, program_id: ProgramId, hashes: Sequence[Any]) -> None:
        """Store the newest context of the program."""
        self.drop(program_id)
        self._contexts[program_id] = hashes
        self.hashes += len(hashes)
        while self.hashes > self.max_hashes and self._contexts:
            _, oldest = self._contexts.popitem(last=False)
            self.hashes -= len(oldest)

    def get(self, program_id: ProgramId) -> Sequence[Any] | None:
        """The program's last context, or None."""
        return self._contexts.get(program_id)

    def drop(self, program_id: ProgramId) -> None:
        """Forget the program's context."""
        old = self._contexts.pop(program_id, None)
        if old is not None:
            self.hashes -= len(old)

    def clear(self) -> list[ProgramId]:
        """Forget all contexts; returns their programs."""
        programs = list(self._contexts)
        self._contexts.clear()
        self.hashes = 0
        return programs


class PlacedPrefixes:
    """Block hashes and retention rank of each placed program. A shared prefix keeps its highest rank."""

    def __init__(self) -> None:
        self._of: dict[ProgramId, tuple[Sequence[Any], int]] = {}
        self._by_head: dict[Any, set[ProgramId]] = {}
        """First hash → programs whose contexts begin with it."""

    def __len__(self) -> int:
        return len(self._of)

    def keys_of(self, program_id: ProgramId) -> Sequence[Any]:
        """The program's chain; empty if it has none."""
        known = self._of.get(program_id)
        return known[0] if known is not None else ()

    def alike(self, program_id: ProgramId, keys: Sequence[Any]) -> int:
        """Number of leading keys of the program's chain that equal those of ``keys``."""
        return common_prefix_length(self.keys_of(program_id), keys)

    def put(self, program_id: ProgramId, keys: Sequence[Any], rank: int) -> int:
        """Store a program's chain and rank. Returns the number of leading keys that a program of higher rank
        shares."""
        self.forget(program_id)
        if not keys:
            return 0
        alike = self._by_head.setdefault(keys[0], set())
        shared = 0
        for other in alike:
            chain, others_rank = self._of[other]
            if others_rank > rank:
                shared = max(shared, common_prefix_length(keys, chain))
        alike.add(program_id)
        self._of[program_id] = keys, rank
        return shared

    def forget(self, program_id: ProgramId) -> None:
        """Remove the program."""
        known = self._of.pop(program_id, None)
        if known is None:
            return
        alike = self._by_head[known[0][0]]
        alike.discard(program_id)
        if not alike:
            del self._by_head[known[0][0]]
