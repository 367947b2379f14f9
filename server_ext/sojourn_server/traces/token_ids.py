"""Token ids by the hundred thousand: made once, handed out as slices, never twice the same by accident."""

from __future__ import annotations

import math
from hashlib import blake2b

FIRST_ID = 300
"""Ids below may be special tokens or single bytes in common vocabularies."""
MIN_VOCABULARY = FIRST_ID + 100
_MASK = (1 << 64) - 1
_CHUNK = 4096
"""Slices are taken from a list at least this long, so that a long draw needs few of them."""


def seed_of(text: str) -> int:
    """64 bits of ``text``, the same in every process (``hash()`` of a string is not)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """Spread neighbouring numbers over 64 bits: the finalizer of splitmix64, a bijection."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class TokenIds:
    """Draws of ids from ``FIRST_ID`` to below ``vocabulary``.

    A draw begins with its 64-bit seed, written in as few ids as that takes, and
    goes on with consecutive ids. Where KV blocks are told apart by the hash of
    their whole prefix, that is as good as random ids, and a list of 50,000 costs
    microseconds. The ``int`` objects are shared by all lists.
    """

    def __init__(self, vocabulary: int) -> None:
        """Raises ``ValueError`` for a vocabulary too small to draw from."""
        if vocabulary < MIN_VOCABULARY:
            raise ValueError(f"vocabulary is {vocabulary}; expected at least {MIN_VOCABULARY} ids")
        self._ids = list(range(FIRST_ID, vocabulary))
        self._base = len(self._ids)
        self._header = math.ceil(64 / math.log2(self._base))
        self._ring = self._ids * (1 + math.ceil(_CHUNK / self._base))

    def draw(self, seed: int, count: int) -> list[int]:
        """``count`` ids that begin with ``seed``; a shorter draw is a prefix of a longer one."""
        if count <= 0:
            return []
        rest = mix(seed & _MASK)
        start = rest % self._base
        ids: list[int] = []
        for _ in range(self._header):
            rest, digit = divmod(rest, self._base)
            ids.append(self._ids[digit])
        if count <= self._header:
            return ids[:count]
        left = count - self._header
        while left > 0:
            taken = self._ring[start : start + min(left, _CHUNK)]
            ids += taken
            left -= len(taken)
            start = (start + len(taken)) % self._base
        return ids
