"""Generates lists of synthetic token ids fast: ids that encode a seed, then slices of one long list."""

from __future__ import annotations

import math
from hashlib import blake2b

FIRST_ID = 300
"""Smallest id; smaller ids may be special tokens or single bytes in common vocabularies."""
MIN_VOCABULARY = FIRST_ID + 100
_MASK = (1 << 64) - 1
_CHUNK = 4096
"""Maximum length of a slice. The list from which slices are copied is longer."""


def seed_from_text(text: str) -> int:
    """Return a 64-bit hash of ``text``. Unlike ``hash()``, it is the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def splitmix64(value: int) -> int:
    """Return the splitmix64 hash of ``value``, a bijection that spreads neighbouring numbers over 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class TokenIdGenerator:
    """Generator of ids from ``FIRST_ID`` to below ``vocabulary``. A list begins with its 64-bit seed, in few
    ids. vLLM identifies a KV block by the hash of its prefix, so lists of different seeds share no block."""

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < MIN_VOCABULARY:
            raise ValueError(f"vocabulary is {vocabulary}; expected at least {MIN_VOCABULARY} ids")
        self._ids = list(range(FIRST_ID, vocabulary))
        self._base = len(self._ids)
        self._header = math.ceil(64 / math.log2(self._base))
        self._ring = self._ids * (1 + math.ceil(_CHUNK / self._base))

    def draw(self, seed: int, count: int) -> list[int]:
        """Return the first ``count`` ids of the endless list that ``seed`` determines."""
        if count <= 0:
            return []
        rest = splitmix64(seed & _MASK)
        start = rest % self._base
        ids: list[int] = []
        for _ in range(min(count, self._header)):
            rest, digit = divmod(rest, self._base)
            ids.append(self._ids[digit])
        while len(ids) < count:
            taken = self._ring[start : start + min(count - len(ids), _CHUNK)]
            ids += taken
            start = (start + len(taken)) % self._base
        return ids
