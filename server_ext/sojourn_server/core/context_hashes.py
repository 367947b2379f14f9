"""The block hashes of each program's last turn, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId


class ContextHashStore:
    """Chained block hashes by program; at most ``max_hashes`` in all, the oldest contexts go first.

    It is what tells a changed prompt from an evicted one, and what a late
    lease looks up. A forgotten context only makes the ledger say ``unknown``.
    """

    def __init__(self, max_hashes: int = 1_000_000) -> None:
        self.max_hashes = max_hashes
        self.hashes = 0
        self._contexts: OrderedDict[ProgramId, Sequence[Any]] = OrderedDict()

    def put(self, program_id: ProgramId, hashes: Sequence[Any]) -> None:
        """Remember the newest context of the program."""
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
        """Forget all; returns whose contexts they were."""
        programs = list(self._contexts)
        self._contexts.clear()
        self.hashes = 0
        return programs
