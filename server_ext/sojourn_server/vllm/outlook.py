"""Running requests as forecasts see them, every few steps; who will probably be preempted is copied ahead."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from ..engine.steward import Steward
from ..policy.views import RunningView
from .below import Below

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

LOOK_EVERY_STEPS = 32
"""Steps between two looks at all that run."""
REQUESTS_A_STEP = 4
"""With more that run looks are rarer, so that no more than these are looked at a step on average."""
TIGHT_SHARE = 0.5
"""While so much of the pool is free, and nobody waits, nothing can run short soon."""


class Outlook:
    """Between one engine's scheduler and its steward's prospects."""

    def __init__(self, scheduler: Scheduler, steward: Steward, below: Below | None) -> None:
        self._scheduler = scheduler
        self._steward = steward
        self._below = below
        self._pool = scheduler.kv_cache_manager.block_pool
        self._due_in = 0

    def before_step(self, now: float) -> None:
        """Look again, if it is time."""
        if not self._steward.prospects.predicts:
            return
        self._due_in -= 1
        if self._due_in > 0:
            return
        scheduler = self._scheduler
        running = scheduler.running
        free_blocks = self._pool.get_num_free_blocks()
        if not len(scheduler.waiting) and free_blocks > TIGHT_SHARE * self._pool.num_gpu_blocks:
            return
        self._due_in = max(LOOK_EVERY_STEPS, len(running) // REQUESTS_A_STEP)
        out_s, back_s, queued_s = self._below.link() if self._below is not None else (None, None, 0.0)
        likely = self._steward.look_ahead(
            self.views(running),
            self.used_blocks(),
            now,
            out_s_per_token=out_s,
            back_s_per_token=back_s,
            queued_s=queued_s,
        )
        if likely is not None and self._below is not None:
            self._copy_ahead(scheduler.requests[likely], self._below)

    def views(self, running: Iterable[Request]) -> list[RunningView]:
        """What the engine knows of requests that run."""
        return [self._view(position, request) for position, request in enumerate(running)]

    def used_blocks(self) -> int:
        """Blocks that requests use or leases hold."""
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def _view(self, position: int, request: Request) -> RunningView:
        ticket = self._steward.tickets.get(request.request_id)
        groups = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return RunningView(
            request.request_id,
            ticket.rank if ticket else sys.maxsize,
            position,
            sum(map(len, groups)),
            context_tokens=request.num_tokens,
            output_tokens=request.num_output_tokens,
            most_tokens=most_tokens(request, self._scheduler.max_model_len),
            freed_blocks=sum(map(unshared, groups)),
        )

    def _copy_ahead(self, request: Request, below: Below) -> None:
        """Full blocks are as they will stay; the request goes on writing into its last."""
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        full = request.num_computed_tokens // self._scheduler.block_size
        # Of a long context, looked at again and again, only what was added; or all of it, if that is lost.
        first = below.copied_in_a_row(request.block_hashes[:full])
        below.copy_ahead([block for block in blocks[first:full] if block.block_hash is not None])


def unshared(blocks: Sequence[KVCacheBlock]) -> int:
    """Of a request's blocks, how many nobody else uses. Beginnings are shared, so a few are looked at."""
    if not blocks or blocks[0].ref_cnt <= 1:
        return len(blocks)
    return len(blocks) - bisect_left(blocks, True, key=lambda block: block.ref_cnt <= 1)


def most_tokens(request: Request, max_model_len: int) -> int:
    """How many tokens the request may yet write."""
    allowed = request.max_tokens - request.num_output_tokens
    return int(max(1, min(allowed, max_model_len - request.num_tokens)))
