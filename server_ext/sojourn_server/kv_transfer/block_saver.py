"""Full Blocks on their way from the engine's blocks to the store: copied between two steps, never waited for.

What the store has already need not be copied. That is found out beside the forward pass, in a thread of its
own, since a store may not answer: a block of which nothing is known when the step ends is copied and given,
and whoever writes it sees whether it is there. Where a look has hung for as long as patience lasts no other
is begun before it returns. Blocks of a request that has ended are held for what of it is
left, so many a step, until it is given or the store takes nothing for as long as patience lasts.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv_offload.cpu_device_backend import KvBlockArrays
from ..kv_offload.transfer_thread import TransferThread
from .transfer_jobs import SaveJob

if TYPE_CHECKING:
    from .transfer_manager import TransferManager

LOOKUP_BATCH_KEYS = 16
"""Blocks that the store is asked for at a time. While it answers so many within patience it is waited for."""

FINISHED_BLOCKS_PER_STEP = 32
"""Full Blocks of requests that have ended which one step copies."""


@dataclass(slots=True, eq=False)
class _FinishedRequestSaves:
    """What is left of a request that has ended."""

    saves: deque[SaveJob]
    stored: int | None = None
    """Leading ones that the store has; ``None``: not known yet."""
    content: list[memoryview] | None = None
    """Of the first, copied already."""
    wanted: bool = True


class BlockSaver:
    """Of one worker. Its methods are called by the thread that runs the model."""

    def __init__(
        self,
        traffic: TransferManager,
        leading: Callable[[Sequence[bytes]], int],
        kv: KvBlockArrays,
        *,
        patience_s: float,
        clock: Callable[[], float],
        counts: Counter[str],
        attempt: Callable[..., Any],
        log: Callable[[str, BaseException], None],
    ) -> None:
        """``attempt(what, call, *arguments)`` calls, and sees to errors; the rest is as for the worker."""
        self._traffic = traffic
        self._leading = leading
        self._kv = kv
        self._patience_s = patience_s
        self._clock = clock
        self._counts = counts
        self._attempt = attempt
        self._log = log
        self._lock = threading.Lock()
        """Guards ``_known``, ``_looks``, ``_look_began_s`` and the results of late look-ups, which the lane
        writes."""
        self._saves: list[SaveJob] = []
        self._known: set[bytes] = set()
        """Of this step's blocks those that the store was seen to have."""
        self._looks = 0
        """That the lane was given and has not come back from."""
        self._look_began_s: float | None = None
        """When the store was last asked for something that it has not answered."""
        self._late: dict[str, _FinishedRequestSaves] = {}
        self._moved_s = clock()
        """When something of the late ones last went on."""
        self._taken: dict[str, int] = {}
        """Of the step before, by request: the place behind the last block that was taken."""
        self._lane = TransferThread("paths-stored")

    def __contains__(self, request: str) -> bool:
        """Whether its blocks are still copied from, though it has ended."""
        return request in self._late

    def __len__(self) -> int:
        return len(self._late)

    def begin_step(self, saves: Sequence[SaveJob], ended: Iterable[str]) -> None:
        """``saves`` of requests in ``ended`` need not be done with this step: their blocks are held."""
        late: dict[str, list[SaveJob]] = {request: [] for request in ended}
        self._saves = []
        for save in saves:
            if save.request not in late:
                self._saves.append(save)
            elif save.place >= self._taken.get(save.request, 0):
                late[save.request].append(save)
        with self._lock:
            self._known = set()
            looks = bool(self._saves) and not self._looks
            self._looks += looks
        if looks:
            keys, known = [save.key for save in self._saves], self._known
            self._lane.give(lambda: self._look(keys, known))
        for request, left in late.items():
            if not left:
                continue
            if not self._late:
                self._moved_s = self._clock()
            made = self._late[request] = _FinishedRequestSaves(deque(left))
            with self._lock:
                began_s = self._look_began_s
                hangs = began_s is not None and self._clock() - began_s >= self._patience_s
                self._looks += not hangs
            if hangs:
                made.stored = 0
                self._counts["looks_given_up"] += 1
            else:
                self._lane.give(lambda made=made: self._look_late(made))  # type: ignore[misc]

    def end_step(self, bad: Collection[int]) -> dict[str, int]:
        """Copy what this step filled, but for what hangs on ``bad`` blocks. Of each request of which
        something could not be given, the place of the first such block."""
        with self._lock:
            known = set(self._known)
        refused: dict[str, int] = {}
        self._taken = {}
        for save in self._saves:
            if save.request in refused:
                continue
            if self._attempt("store a block", self._save, save, bad, known):
                self._taken[save.request] = save.place + 1
            else:
                refused[save.request] = save.place
        self._saves = []
        if self._late:
            self._attempt("store what is left of requests", self._save_late)
            if self._clock() - self._moved_s >= self._patience_s:
                self._give_up()
        return refused

    def close(self) -> None:
        """The engine ends."""
        self._lane.close()

    # -- inside -----------------------------------------------------------------------

    def _save(self, save: SaveJob, bad: Collection[int], known: Collection[bytes]) -> bool:
        """Whether it is stored, will be, or need not be."""
        if any(block in bad for block in save.before) or any(block in bad for block in save.block_ids):
            return False
        return save.key in known or self._give(save, self._kv.gather_full(save.block_ids))

    def _give(self, save: SaveJob, content: list[memoryview]) -> bool:
        given = self._traffic.store(save.request, save.key, save.parent, content)
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
                    late.content = self._kv.gather_full(late.saves[0].block_ids)
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
            late.saves, late.content = deque(), None  # a look that hangs still has it
        self._late.clear()

    def _look(self, keys: Sequence[bytes], known: set[bytes]) -> int:
        """In its own thread."""
        try:
            for key in keys:
                if known is not self._known:  # its step is over
                    break
                if self._ask([key]):
                    with self._lock:
                        known.add(key)
        except Exception as error:
            self._log("look into the store", error)
        self._looked()
        return 0

    def _look_late(self, late: _FinishedRequestSaves) -> int:
        """In its own thread."""
        stored = 0
        # Nobody takes from them before this is over; who gives up puts others in their place.
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
            self._log("look into the store", error)
        with self._lock:
            late.stored = stored
        self._looked()
        return 0

    def _ask(self, keys: Sequence[bytes]) -> int:
        """In the lane's thread: how many leading blocks the store has."""
        with self._lock:
            self._look_began_s = self._clock()
        return self._leading(keys)

    def _looked(self) -> None:
        with self._lock:
            self._looks -= 1
            self._look_began_s = None
