"""Which beginnings of prompts each replica has computed lately, as routers know it that see prompts only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_PIECES = 200_000
"""Beginnings remembered of each replica: a few hundred bytes each."""


class PrefixIndex:
    """By replica, the hashes of the beginnings sent there, those last used last.

    A beginning's hash is of its last piece and of all before it, so that a prompt matches as far as its
    hashes are found in a row. Raises ``ValueError`` for ``most_pieces`` below 1.
    """

    def __init__(self, most_pieces: int = MOST_PIECES) -> None:
        if most_pieces < 1:
            raise ValueError(f"most_pieces is {most_pieces}; expected ≥ 1")
        self._most = most_pieces
        self._replicas: dict[str, OrderedDict[int, None]] = {}

    def computed(self, replica_id: str, prefix: Sequence[int]) -> None:
        """A replica is sent a prompt that begins so."""
        known = self._replicas.setdefault(replica_id, OrderedDict())
        # Its last pieces first: of a prompt that nobody asks for again they are the first to be forgotten.
        for piece in reversed(prefix):
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > self._most:
            known.popitem(last=False)

    def matches(self, prefix: Sequence[int], context_tokens: int) -> dict[str, int]:
        """Tokens of a prompt that each replica has computed; without those that have none of it."""
        if not prefix:
            return {}
        found: dict[str, int] = {}
        for replica_id, known in self._replicas.items():
            pieces = 0
            while pieces < len(prefix) and prefix[pieces] in known:
                pieces += 1
            if pieces:
                found[replica_id] = context_tokens * pieces // len(prefix)
        return found

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        self._replicas.pop(replica_id, None)
