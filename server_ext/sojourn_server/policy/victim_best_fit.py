"""Whom to preempt so that one preemption is enough (Tetris §1, §4)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .demand import POINTS, needed_blocks, peak
from .views import RunningView, VictimNeed

MOST_WEIGHED = 64
"""Of more candidates so many are weighed, half of them those who lose least, half those who free most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFit:
    """Of the requests without which the others fit from now on, the one that loses least.

    Fitting is judged by what all are expected to need within ``horizon_steps``. Where nobody's leaving is
    enough, whoever leaves the least lacking goes. What a request loses is the time until it goes on,
    both the wait until there is room for it again and the work to get its KV back, for each
    token of its whole output: the same pause hurts a short answer more than a long one.

    Nobody is preempted again before it has written ``immune_tokens`` since, nor more than
    ``most_preemptions`` times, while there is anybody else: no ping-pong, no starvation. Where nothing is
    known of any program's request, the engine chooses as it does untouched.
    """

    horizon_steps: float = 1024.0
    immune_tokens: int = 64
    most_preemptions: int = 3

    def __post_init__(self) -> None:
        if not (self.horizon_steps > 0 and self.immune_tokens >= 0 and self.most_preemptions >= 1):
            raise ValueError(
                f"horizon_steps {self.horizon_steps}, immune_tokens {self.immune_tokens}, most_preemptions "
                f"{self.most_preemptions}; expected above 0, ≥ 0 and ≥ 1"
            )

    def victim(self, running: Sequence[RunningView], need: VictimNeed, now: float) -> str | None:
        if not any(view.of_program and view.remaining for view in running):
            return None
        candidates = [view for view in running if not self._is_immune(view)]
        if not candidates:
            least = min(view.preemptions for view in running)
            candidates = [view for view in running if view.preemptions == least]
        # Whatever order the requests come in, sums are the same.
        in_order: Sequence[RunningView] = sorted(running, key=lambda view: view.request_id)
        needed = needed_blocks(in_order, need.block_size)

        def worth(view: RunningView) -> tuple[float, float, int, int]:
            own = needed_blocks([view], need.block_size)
            # To a millionth of a block: what fits to the block shall not fail in the last digit.
            others = [round(whole - its, 6) for whole, its in zip(needed, own, strict=True)]
            # What it shares was counted for it too, and stays in use without it.
            room_blocks = need.room_blocks - view.shared_blocks
            lacking = max(0.0, peak(others, self.horizon_steps) - room_blocks)
            back_at = next(
                (
                    at
                    for at, taken in zip(POINTS, others, strict=True)
                    if round(taken + own[0], 6) <= room_blocks
                ),
                2 * POINTS[-1],
            )
            return (lacking, _loss(view, back_at, need.step_s), -view.program_rank, -view.position)

        return min(_likely(candidates, need), key=worth).request_id

    def _is_immune(self, view: RunningView) -> bool:
        return view.preemptions > 0 and (
            view.preemptions >= self.most_preemptions or view.stayed_tokens < self.immune_tokens
        )


def _likely(candidates: Sequence[RunningView], need: VictimNeed) -> Sequence[RunningView]:
    """Those among whom a good one will be, and no more than can be weighed between two steps."""
    if len(candidates) <= MOST_WEIGHED:
        return candidates
    least = heapq.nsmallest(
        MOST_WEIGHED // 2,
        candidates,
        key=lambda view: (_loss(view, 0, need.step_s), -view.program_rank, -view.position),
    )
    most = heapq.nlargest(
        MOST_WEIGHED // 2,
        candidates,
        key=lambda view: (view.blocks - view.shared_blocks, view.program_rank, view.position),
    )
    return list({view.request_id: view for view in (*least, *most)}.values())


def _loss(view: RunningView, back_at: int, step_s: float) -> float:
    """Steps until it goes on, where there is room for it in ``back_at``, for each token of its output."""
    work = view.recover_s / step_s if step_s > 0 else 0.0
    left = math.fsum(view.remaining) / len(view.remaining) if view.remaining else 0.0
    return (back_at + work) / max(1.0, view.output_tokens + left)
