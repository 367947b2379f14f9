"""Keeps the order of reuse up to date: scores when they change, and what a turn does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from ..engine.steward import Steward
from ..policy.views import LeftBehind
from ..program.observations import ReuseShare
from .free_queue import Evicted, ProgramFreeQueue, Score

RESCORED_PER_STEP = 256
"""Programs scored anew in one step when the scale has moved, so that no step does all of them."""


class BlockOrder:
    """One engine's queue of free blocks, in the order that its preset's eviction policy gives."""

    def __init__(
        self,
        steward: Steward,
        replaced: FreeKVCacheBlockQueue,
        *,
        evicted: Evicted,
        guarded: Callable[..., Any],
    ) -> None:
        """``guarded`` calls what it is given, and answers ``None`` where that fails."""
        self._steward = steward
        self._guarded = guarded
        self._by_program = steward.preset.eviction.by_program
        self.queue = ProgramFreeQueue(
            replaced, evicted=evicted, score=self._guarded_score if self._by_program else None
        )
        self._branches = ReuseShare()
        self._scale_changes = 0
        self._unscaled: list[ProgramId] = []
        """Programs whose score is still measured in an earlier scale."""

    def before_step(self) -> None:
        """Score programs to which something happened, and others a few a step when the scale moved."""
        if self._by_program:
            self._guarded(self._rescore)

    def after_step(self) -> None:
        """Turns have got their blocks, and their leases are over: what is free of theirs, they do without."""
        begun = self._steward.foreseer.begun
        for program_id, used_s in begun.items():
            self.queue.leave_behind(program_id, used_s)
        begun.clear()

    def score(self, program_id: ProgramId, left_behind: bool) -> Score:
        """Of what the program's newest turn used, or of what that did without."""
        left = None
        if left_behind:
            left = LeftBehind(self._branches.share, *self.queue.left(program_id))
        return self._steward.owner_score(program_id, left)

    def _guarded_score(self, program_id: ProgramId, left_behind: bool) -> Score:
        return self._guarded(self.score, program_id, left_behind) or (float("-inf"),)

    def _rescore(self) -> None:
        foreseer = self._steward.foreseer
        self._branches.observe(self.queue.left_reused, self.queue.left_evicted)
        if foreseer.changed:
            for program_id in foreseer.changed:
                self.queue.rescore(program_id)
            foreseer.changed.clear()
        scale_changes = foreseer.scale_changes + self._branches.changes
        if scale_changes != self._scale_changes and not self._unscaled:  # a pass under way ends first
            self._scale_changes = scale_changes
            self._unscaled = self.queue.programs()
        if self._unscaled:
            for program_id in self._unscaled[-RESCORED_PER_STEP:]:
                self.queue.rescore(program_id)
            del self._unscaled[-RESCORED_PER_STEP:]
