"""Saves Full Blocks to the store between steps, without making the forward pass wait for the store.

A lookup thread asks the store which blocks it already has. Blocks that the store has are not copied. If a
block's lookup has not returned when the step ends, the block is copied and given to the store, which ignores
duplicates. While a lookup hangs (for ``patience_s`` or more), no further lookup starts.

Blocks of a finished request stay pinned until they are saved. Each step saves a limited number of them. They
are given up, and not saved, if the store accepts none of them for ``patience_s``, or if finished requests
would pin more than ``max_held_blocks`` of the device.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..kv_offload.transfer_thread import TransferThread
from .store_threads import LOOKUP_BATCH_KEYS
from .transfer_jobs import SaveJob

if TYPE_CHECKING:
    from ..kv_offload.cuda_block_arrays import KvBlocks
    from .transfer_manager import TransferManager

FINISHED_BLOCKS_PER_STEP = 32
"""Maximum number of Full Blocks of finished requests that one step copies."""

MAX_HELD_SHARE = 0.25
"""Maximum share of the device's blocks that finished requests may pin until their blocks are saved."""


@dataclass(slots=True, eq=False)
class _FinishedRequestSaves:
    """Blocks of a finished request that are not saved yet."""

    saves: deque[SaveJob]
    pinned_blocks: int
    """Number of engine blocks of the request's context up to its last block to save; all are pinned."""
    stored: int | None = None
    """Number of leading blocks of ``saves`` that the store already has; ``None`` if not looked up yet."""
    content: list[memoryview] | None = None
    """Copy of the first block of ``saves``, kept until the store accepts it; ``None`` if not copied yet."""
    wanted: bool = True
    """Whether the blocks are still to be saved. If false, a running lookup stops asking the store."""


class BlockSaver:
    """Saves one worker's Full Blocks to the store. The thread that runs the model calls its methods."""

    def __init__(
        self,
        manager: TransferManager,
        leading: Callable[[Sequence[bytes]], int],
        kv: KvBlocks,
        *,
        patience_s: float,
        clock: Callable[[], float],
        counts: Counter[str],
        attempt: Callable[..., Any],
        log: Callable[[str, BaseException], None],
        max_held_blocks: int,
        concurrent_steps: int = 1,
    ) -> None:
        """``leading`` returns how many leading keys the store has; it may block. ``patience_s``: maximum
        seconds for one lookup, and maximum seconds without progress on blocks of finished requests.
        ``attempt(what, call, *arguments)`` makes a call and handles its errors. ``log`` receives errors of
        the lookup thread. ``max_held_blocks``: maximum number of engine blocks that finished requests pin
        together; a single request may pin more. ``concurrent_steps``: maximum number of planned steps whose
        results the planner does not know yet. When a request finishes, the planner may plan the saves of
        these steps again."""
        self._manager = manager
        self._leading = leading
        self._kv = kv
        self._patience_s = patience_s
        self._clock = clock
        self._counts = counts
        self._attempt = attempt
        self._log = log
        self._max_held_blocks = max_held_blocks
        self._lock = threading.Lock()
        """Guards ``_known``, ``_open_lookups``, ``_lookup_began_s`` and the ``stored`` of ``_late``, which
        the lookup thread writes."""
        self._saves: list[SaveJob] = []
        self._known: set[bytes] = set()
        """Keys of this step's blocks that the store already has."""
        self._open_lookups = 0
        """Number of lookups queued or running."""
        self._lookup_began_s: float | None = None
        """Time at which the running lookup began; ``None`` if no lookup runs."""
        self._late: dict[str, _FinishedRequestSaves] = {}
        self._moved_s = clock()
        """Time of the last progress on blocks of finished requests."""
        self._recent: deque[set[tuple[str, bytes]]] = deque(maxlen=concurrent_steps)
        """For each of the last ``concurrent_steps`` steps: (request, key) of the blocks that were saved or
        found in the store."""
        self._lane = TransferThread("paths-stored")

    def __contains__(self, request: str) -> bool:
        """Whether the request has finished and its blocks are still being saved."""
        return request in self._late

    def __len__(self) -> int:
        return len(self._late)

    def begin_step(self, saves: Sequence[SaveJob], ended: Iterable[str]) -> None:
        """Begin a step: look up the blocks of ``saves`` in the store. ``ended``: ids of finished requests.
        Their blocks are pinned and may be saved in later steps."""
        late: dict[str, list[SaveJob]] = {request: [] for request in ended}
        self._saves = []
        for save in saves:
            if save.request not in late:
                self._saves.append(save)
            elif not any((save.request, save.key) in saved for saved in self._recent):
                late[save.request].append(save)
        with self._lock:
            self._known = set()
            looks = bool(self._saves) and not self._open_lookups
            self._open_lookups += looks
        if looks:
            keys, known = [save.key for save in self._saves], self._known
            self._lane.submit(partial(self._run_lookup, keys, known))
        for request, left in late.items():
            if not left:
                continue
            pinned = (left[-1].place + 1) * self._kv.per_full
            held = sum(each.pinned_blocks for each in self._late.values())
            if held and held + pinned > self._max_held_blocks:
                self._counts["saves_given_up"] += len(left)
                continue
            if not held:
                self._moved_s = self._clock()
            made = self._late[request] = _FinishedRequestSaves(deque(left), pinned)
            with self._lock:
                began_s = self._lookup_began_s
                hangs = began_s is not None and self._clock() - began_s >= self._patience_s
                self._open_lookups += not hangs
            if hangs:
                made.stored = 0
                self._counts["looks_given_up"] += 1
            else:
                self._lane.submit(partial(self._run_late_lookup, made))

    def end_step(self, bad: Collection[int]) -> dict[str, int]:
        """Copy the blocks that this step filled and hand them to the store. ``bad``: ids of engine blocks
        that were not filled. A Full Block is not saved if it contains such a block, or comes after such a
        block in the request's context.

        Returns request → index in its context of the first Full Block that was not saved. Requests whose
        blocks were all saved are absent.
        """
        with self._lock:
            known = set(self._known)
        refused: dict[str, int] = {}
        saved: set[tuple[str, bytes]] = set()
        for save in self._saves:
            if save.request in refused:
                continue
            if self._attempt("store a block", self._save, save, bad, known):
                saved.add((save.request, save.key))
            else:
                refused[save.request] = save.place
        self._saves = []
        self._recent.append(saved)
        if self._late:
            self._attempt("store the last blocks of finished requests", self._save_late)
            if self._clock() - self._moved_s >= self._patience_s:
                self._give_up()
        return refused

    def close(self) -> None:
        """Stop the lookup thread."""
        self._lane.close()

    # -- inside -----------------------------------------------------------------------

    def _save(self, save: SaveJob, bad: Collection[int], known: Collection[bytes]) -> bool:
        """Save a block, unless it is in ``known`` or depends on a block in ``bad``. Returns whether the store
        has the block or will get it."""
        if any(block in bad for block in save.before) or any(block in bad for block in save.block_ids):
            return False
        return save.key in known or self._give(save, self._kv.gather_full(save.block_ids, self._kv.fence()))

    def _give(self, save: SaveJob, content: list[memoryview]) -> bool:
        given = self._manager.store(save.key, save.parent, content)
        self._counts["blocks_given_to_store"] += given
        return given

    def _save_late(self) -> None:
        left, now_s = FINISHED_BLOCKS_PER_STEP, self._clock()
        for request, late in list(self._late.items()):
            with self._lock:
                stored = late.stored
            if stored is None:
                continue
            if stored:
                late.stored, self._moved_s = 0, now_s
                for _ in range(stored):
                    late.saves.popleft()
            while late.saves and left:
                if late.content is None:
                    late.content = self._kv.gather_full(late.saves[0].block_ids, self._kv.fence())
                if not self._give(late.saves[0], late.content):
                    left = 0
                    break
                late.saves.popleft()
                late.content, self._moved_s = None, now_s
                left -= 1
            if not late.saves:
                del self._late[request]

    def _give_up(self) -> None:
        for late in self._late.values():
            late.wanted = False
            self._counts["saves_given_up"] += len(late.saves)
            late.saves, late.content = deque(), None  # a hanging lookup still holds this object
        self._late.clear()

    def _run_lookup(self, keys: Sequence[bytes], known: set[bytes]) -> None:
        """Look up this step's blocks. Runs in the lookup thread."""
        try:
            for key in keys:
                if known is not self._known:  # its step has ended
                    break
                if self._ask([key]):
                    with self._lock:
                        known.add(key)
        except Exception as error:
            self._log("look up blocks in the store", error)
        self._lookup_ended()

    def _run_late_lookup(self, late: _FinishedRequestSaves) -> None:
        """Look up the blocks of a finished request. Runs in the lookup thread."""
        stored = 0
        # The model's thread does not change this queue until ``stored`` is set. When it gives up, it replaces
        # the whole queue.
        keys = [save.key for save in late.saves]
        try:
            for at in range(0, len(keys), LOOKUP_BATCH_KEYS):
                some = keys[at : at + LOOKUP_BATCH_KEYS]
                here = self._ask(some) if late.wanted else 0
                stored += here
                self._moved_s = self._clock()
                if here < len(some):
                    break
        except Exception as error:
            self._log("look up blocks in the store", error)
        with self._lock:
            late.stored = stored
        self._lookup_ended()

    def _ask(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has. Runs in the lookup thread."""
        with self._lock:
            self._lookup_began_s = self._clock()
        return self._leading(keys)

    def _lookup_ended(self) -> None:
        with self._lock:
            self._open_lookups -= 1
            self._lookup_began_s = None
