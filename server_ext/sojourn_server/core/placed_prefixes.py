"""Whose contexts were placed, so that what several share keeps the rank of whoever needs it most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import common_prefix_length


class PlacedPrefixes:
    """The chain of block hashes of each placed program, and its rank in the order of reuse, lowest first."""

    def __init__(self) -> None:
        self._of: dict[ProgramId, tuple[Sequence[Any], int]] = {}
        self._by_head: dict[Any, set[ProgramId]] = {}
        """Programs whose chains begin alike."""

    def __len__(self) -> int:
        return len(self._of)

    def keys_of(self, program_id: ProgramId) -> Sequence[Any]:
        """The chain that was put last; empty where there is none."""
        known = self._of.get(program_id)
        return known[0] if known is not None else ()

    def alike(self, program_id: ProgramId, keys: Sequence[Any]) -> int:
        """How many leading keys of the program's chain are those of ``keys``."""
        return common_prefix_length(self.keys_of(program_id), keys)

    def put(self, program_id: ProgramId, keys: Sequence[Any], rank: int) -> int:
        """Note a program's chain and rank. Returns how many leading keys others of higher rank have too."""
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
        """The program has nothing placed any more."""
        known = self._of.pop(program_id, None)
        if known is None:
            return
        alike = self._by_head[known[0][0]]
        alike.discard(program_id)
        if not alike:
            del self._by_head[known[0][0]]
