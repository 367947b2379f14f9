"""Read-side policies: which node reads a request's KV from storage (DualPath §6.1; mechanism D6)?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from .prefill_decode_views import ReadSplit, StorageReadView


class ReadSidePolicy(Protocol):
    """Chooses how many of a request's stored blocks each engine's node reads."""

    def split(self, view: StorageReadView) -> ReadSplit: ...


@dataclass(frozen=True, slots=True)
class PrefillSideRead:
    """The prefill engine's node reads everything: one path, as in systems before DualPath."""

    def split(self, view: StorageReadView) -> ReadSplit:
        return ReadSplit(view.blocks, 0)


@dataclass(frozen=True, slots=True)
class ShorterQueueRead:
    """The side with the shorter read queue reads everything (DualPath §6.1).

    If neither side has queued reads, the side that has been idle longer reads. The prefill side reads if both
    sides are equal, or if both engines are on one node.

    The paper does not say which of two idle sides reads. A fixed choice would give one side all reads of a
    lightly loaded fleet.
    """

    def split(self, view: StorageReadView) -> ReadSplit:
        if view.decode_queue_s < view.prefill_queue_s and not view.one_node:
            return ReadSplit(0, view.blocks)
        return ReadSplit(view.blocks, 0)


@dataclass(frozen=True, slots=True)
class WaterFillingRead:
    """Splits a read so that both sides finish at nearly the same time (future work in §6.1).

    Each side reads whole Full Blocks. The policy chooses the split with the earliest end of the read. Of two
    equally early splits, it chooses the one with more blocks on the prefill side. A side that can read all
    blocks before the other side's queue is empty reads them all. Reads of fewer than ``least_blocks`` blocks,
    and reads for two engines on one node, are not split. Raises ``ValueError`` for a limit below 1.
    """

    least_blocks: int = 2

    def __post_init__(self) -> None:
        if self.least_blocks < 1:
            raise ValueError(f"least_blocks is {self.least_blocks}; expected at least 1")

    def split(self, view: StorageReadView) -> ReadSplit:
        blocks = view.blocks
        if view.one_node:
            return ReadSplit(blocks, 0)
        if blocks < self.least_blocks:
            whole, other = ReadSplit(blocks, 0), ReadSplit(0, blocks)
            return whole if read_duration_s(view, whole) <= read_duration_s(view, other) else other
        ahead_s = max(0.0, view.decode_queue_s) - max(0.0, view.prefill_queue_s)
        level = (ahead_s + blocks * view.decode_block_s) / (view.prefill_block_s + view.decode_block_s)
        least = min(blocks, max(0, math.floor(level)))
        most = min(blocks, least + 1)
        if read_duration_s(view, ReadSplit(most, blocks - most)) <= read_duration_s(
            view, ReadSplit(least, blocks - least)
        ):
            least = most
        return ReadSplit(least, blocks - least)


def read_duration_s(view: StorageReadView, split: ReadSplit) -> float:
    """Return the seconds from now until both sides have read their blocks of ``split``, queued reads
    included."""
    prefill_s = max(0.0, view.prefill_queue_s) + split.prefill_blocks * view.prefill_block_s
    decode_s = max(0.0, view.decode_queue_s) + split.decode_blocks * view.decode_block_s
    if not split.decode_blocks:
        return prefill_s if split.prefill_blocks else 0.0
    return max(prefill_s, decode_s) if split.prefill_blocks else decode_s
