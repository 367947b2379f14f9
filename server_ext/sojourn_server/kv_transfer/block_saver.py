"""Saves Full Blocks to the store between steps, without making the forward pass wait for the store.

Blocks that the store is known to have are not copied (``StoreThreads.knows``). Blocks of a finished request
stay pinned until they are saved. Each step saves a limited number of them. They are given up, and not saved,
if the store accepts none of them for ``patience_s``, or if finished requests would pin more than
``max_held_blocks`` of the device.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .transfer_jobs import SaveJob

if TYPE_CHECKING:
    from ..kv_offload.cuda_block_arrays import KvBlocks
    from .store_threads import StoreThreads

FINISHED_BLOCKS_PER_STEP = 32
"""Maximum number of Full Blocks of finished requests that one step copies."""

MAX_HELD_SHARE = 0.25
"""Maximum share of the device's blocks that finished requests may pin until their blocks are saved."""


class BlockSaver:
    """Saves one worker's Full Blocks to the store. The thread that runs the model calls its methods."""

    def __init__(
        self,
        storage: StoreThreads,
        kv: KvBlocks,
        *,
        patience_s: float,
        counts: Counter[str],
        attempt: Callable[..., Any],
        max_held_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience_s``: maximum seconds without progress on blocks of finished requests. ``attempt(what,
        call, *arguments)`` makes a call and handles its errors. ``max_held_blocks``: maximum number of engine
        blocks that finished requests pin together; a single request may pin more."""
        self._storage = storage
        self._kv = kv
        self._patience_s = patience_s
        self._clock = clock
        self._counts = counts
        self._attempt = attempt
        self._max_held_blocks = max_held_blocks
        self._saves: list[SaveJob] = []
        self._late: dict[str, deque[SaveJob]] = {}
        """Finished request → its blocks that are not saved yet."""
        self._moved_s = clock()
        """Time of the last progress on blocks of finished requests."""

    def __contains__(self, request: str) -> bool:
        """Whether the request has finished and its blocks are still being saved."""
        return request in self._late

    def __len__(self) -> int:
        return len(self._late)

    def begin_step(self, saves: Sequence[SaveJob], ended: Iterable[str]) -> None:
        """Begin a step. ``saves``: blocks to save. ``ended``: ids of finished requests. Their blocks are
        pinned and may be saved in later steps."""
        late: dict[str, deque[SaveJob]] = {request: deque() for request in ended}
        self._saves = []
        for save in saves:
            if save.request not in late:
                self._saves.append(save)
            elif not self._storage.knows(save.key):
                late[save.request].append(save)
        for request, left in late.items():
            # All blocks of a context up to the last block to save are pinned.
            held = sum((each[-1].place + 1) * self._kv.per_full for each in self._late.values())
            if left and held and held + (left[-1].place + 1) * self._kv.per_full > self._max_held_blocks:
                self._counts["saves_given_up"] += len(left)
            elif left:
                self._moved_s = self._moved_s if held else self._clock()
                self._late[request] = left

    def end_step(self, bad: Collection[int]) -> dict[str, int]:
        """Copy the blocks that this step filled and hand them to the store. ``bad``: ids of engine blocks
        that were not filled. A Full Block is not saved if it contains such a block, or comes after such a
        block in the request's context.

        Returns request → index in its context of the first Full Block that was not saved. Requests whose
        blocks were all saved are absent.
        """
        refused: dict[str, int] = {}
        for save in self._saves:
            good = not bad or set(bad).isdisjoint([*save.before, *save.block_ids])
            if save.request not in refused and not (
                good and self._attempt("store a block", self._save, save)
            ):
                refused[save.request] = save.place
        self._saves = []
        if self._late:
            self._attempt("store the last blocks of finished requests", self._save_late)
            if self._clock() - self._moved_s >= self._patience_s:
                self._counts["saves_given_up"] += sum(map(len, self._late.values()))
                self._late.clear()
        return refused

    def _save_late(self) -> None:
        left = FINISHED_BLOCKS_PER_STEP
        for request, saves in list(self._late.items()):
            while saves and left and self._save(saves[0]):
                saves.popleft()
                left -= 1
                self._moved_s = self._clock()
            if not saves:
                del self._late[request]

    def _save(self, save: SaveJob) -> bool:
        """Save a block. Returns whether the store has the block or will get it."""
        if self._storage.knows(save.key):
            return True
        if not self._storage.has_room:
            self._counts["writes_refused"] += 1
            return False
        content = self._kv.gather_full(save.block_ids, self._kv.fence())
        self._storage.write(save.key, save.parent, content)
        self._counts["blocks_given_to_store"] += 1
        return True
