"""Keeps the order of reuse up to date: scores when they change, and what a turn does without."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from ..engine.steward import Steward
from ..policy.views import LeftBehind
from ..program.observations import ReuseShare
from .bucket_order import Score, Standing
from .free_queue import Evicted, Leaving, ProgramFreeQueue


class BlockOrder:
    """One engine's queue of free blocks, in the order that its preset's eviction policy gives."""

    def __init__(
        self,
        steward: Steward,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        failed: Callable[[Exception], None],
        leaving: Leaving | None = None,
        guarded: Callable[..., Any],
    ) -> None:
        """``guarded`` calls what it is given, and answers ``None`` where that fails; ``failed`` is told of an
        error that has made the queue the engine's own."""
        self._steward = steward
        self._guarded = guarded
        self._by_program = steward.preset.eviction.by_program
        order = self if self._by_program else None
        self.queue = ProgramFreeQueue(replaced, evicted=evicted, order=order, failed=failed, leaving=leaving)
        self._branches = ReuseShare()
        self._scale_changes = 0

    def before_step(self) -> None:
        """Programs to which something happened stand elsewhere now; and the scale may have moved."""
        if self._by_program:
            self._guarded(self._rescore)

    def after_step(self) -> None:
        """Turns have got their blocks, and their leases are over: what is free of theirs, they do without."""
        begun = self._steward.foreseer.begun
        for program_id, used_s in begun.items():
            self.queue.leave_behind(program_id, used_s)
        begun.clear()

    def standing(self, program_id: ProgramId, left: tuple[float, int] | None) -> Standing:
        """Of what the program's newest turn used, or of what that did without."""
        behind = LeftBehind(*left) if left is not None else None
        return self._guarded(self._steward.owner_standing, program_id, behind)

    def score(self, standing: Standing) -> Score:
        """The place of a standing in the present scale."""
        return self._guarded(self._steward.owner_score, standing, self._branches.share) or (-math.inf,)

    def _rescore(self) -> None:
        foreseer = self._steward.foreseer
        self._branches.observe(self.queue.left_reused, self.queue.left_evicted)
        if foreseer.changed:
            for program_id in foreseer.changed:
                self.queue.rescore(program_id)
            foreseer.changed.clear()
        scale_changes = foreseer.scale_changes + self._branches.changes
        if scale_changes != self._scale_changes:
            self._scale_changes = scale_changes
            self.queue.rescale()
