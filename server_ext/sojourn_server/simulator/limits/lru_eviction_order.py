"""vLLM's own eviction order."""

from __future__ import annotations

from collections.abc import Sequence

from .free_run_queue import FreeRunQueue


class LruEvictionOrder:
    """The block that has been free for longest goes first; of one request the tail before the head.

    ``BlockPool.free_blocks`` appends blocks, tails first, to a queue which is
    reused from its front, and ``touch`` takes them out of it.
    """

    def __init__(self, owners: list[str] | None = None) -> None:
        self._run_of: dict[int, int] = {}
        self._queue = FreeRunQueue(self._run_of)
        self._frees = 0

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        self._frees += 1
        self._queue.append(blocks, self._frees)

    def reused(self, blocks: Sequence[int]) -> None:
        run_of = self._run_of
        for block in blocks:
            del run_of[block]

    def victims(self, count: int) -> list[int]:
        return self._queue.pop(count)

    def over(self, owner: int) -> None:
        pass
