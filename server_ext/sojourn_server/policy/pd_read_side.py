"""Which node reads a request's KV from storage, prefill's or decode's or both (DualPath §6.1, D6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from .pd_views import ReadSplit, ReadView


class ReadSidePolicy(Protocol):
    """Asked once for each request that finds anything in storage, when its two engines are known."""

    def split(self, view: ReadView) -> ReadSplit: ...


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """The prefill engine's node reads everything: one path, as in systems before DualPath."""

    def split(self, view: ReadView) -> ReadSplit:
        return ReadSplit(view.blocks, 0)


@dataclass(frozen=True, slots=True)
class ShorterQueue:
    """The side with the shorter reading queue reads everything (§6.1).

    Where neither has anything to read, the one that has been idle for longer: the paper does not say, and any
    fixed side would get all reads of a fleet that is not busy. Prefill's where that does not tell either.
    """

    def split(self, view: ReadView) -> ReadSplit:
        if view.decode_queue_s < view.prefill_queue_s and not view.one_node:
            return ReadSplit(0, view.blocks)
        return ReadSplit(view.blocks, 0)


@dataclass(frozen=True, slots=True)
class WaterFilled:
    """Both sides read, each so much that they are done at the same time (§6.1's future work).

    In whole Full Blocks, so that the later of the two is done as early as can be; of two such splits the
    one that gives the prefill side more. A side whose queue is longer than the other takes to read
    everything gets nothing. Reads below ``least_blocks`` stay in one piece. Raises ``ValueError``.
    """

    least_blocks: int = 2

    def __post_init__(self) -> None:
        if self.least_blocks < 1:
            raise ValueError(f"least_blocks is {self.least_blocks}; expected at least 1")

    def split(self, view: ReadView) -> ReadSplit:
        blocks = view.blocks
        if view.one_node:
            return ReadSplit(blocks, 0)
        if blocks < self.least_blocks:
            whole, other = ReadSplit(blocks, 0), ReadSplit(0, blocks)
            return whole if read_s(view, whole) <= read_s(view, other) else other
        ahead_s = max(0.0, view.decode_queue_s) - max(0.0, view.prefill_queue_s)
        level = (ahead_s + blocks * view.decode_block_s) / (view.prefill_block_s + view.decode_block_s)
        least = min(blocks, max(0, math.floor(level)))
        most = min(blocks, least + 1)
        if read_s(view, ReadSplit(most, blocks - most)) <= read_s(view, ReadSplit(least, blocks - least)):
            least = most
        return ReadSplit(least, blocks - least)


def read_s(view: ReadView, split: ReadSplit) -> float:
    """Seconds from now until everything has been read."""
    prefill_s = max(0.0, view.prefill_queue_s) + split.prefill_blocks * view.prefill_block_s
    decode_s = max(0.0, view.decode_queue_s) + split.decode_blocks * view.decode_block_s
    if not split.decode_blocks:
        return prefill_s if split.prefill_blocks else 0.0
    return max(prefill_s, decode_s) if split.prefill_blocks else decode_s
