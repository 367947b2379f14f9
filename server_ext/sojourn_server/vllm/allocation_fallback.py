"""Shortages of KV blocks: forecasts, ends of leases when an allocation fails, and the choice of a victim."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core import events_and_actions as ev
from ..policies.policy_views import ReclaimRequest, RunningRequestView
from .compat import (
    FullAttentionManager,
    KVCacheBlock,
    KVCacheBlocks,
    Request,
    RequestStatus,
    SchedulingPolicy,
)
from .kv_prefetcher import KVPrefetcher
from .offload_manager import OffloadManager
from .pair_connector import offload_connector
from .waiting_queue import EngineContext, WaitingQueueAdapter, max_new_tokens

if TYPE_CHECKING:
    from .compat import KVCacheManager

FORECAST_EVERY_STEPS = 32
FORECAST_REQUESTS_PER_STEP = 4
"""Maximum average number of requests that are forecast per step. With many running requests, forecasts are
less frequent."""
AMPLE_FREE_SHARE = 0.5
"""No forecast is made while more than this share of the pool's blocks is free and no request waits."""


def allocate_slots_with_fast_path(
    manager: KVCacheManager, allocate: Callable[..., KVCacheBlocks | None]
) -> Callable[..., KVCacheBlocks | None]:
    """Return ``allocate``, a way of ``manager.allocate_slots``, with a fast path for running requests that
    need no new block: vLLM calls it for each running request in each step, and in most decode steps nothing
    changes.

    It is ``allocate`` itself for engines without a prefix cache or full attention, with several KV cache
    groups (``allocate_slots`` also frees their blocks), or with hash blocks of another size than KV
    blocks.
    """
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager or not manager.enable_caching:
        return allocate
    group = groups[0]
    size = group.block_size
    if size != group.block_pool.hash_block_size:
        return allocate  # vLLM may also cache incomplete blocks
    blocks_of, cached_of = group.req_to_blocks, group.num_cached_block
    nothing, no_lookahead = manager.empty_kv_cache_blocks, {"num_lookahead_tokens": 0}

    def allocate_slots(
        request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        if not args and kwargs in ({}, no_lookahead):  # only calls for running requests have these arguments
            request_id = request.request_id
            cached = cached_of.get(request_id)
            if (
                cached is not None
                and request.num_computed_tokens + num_new_tokens < (cached + 1) * size
                and len(blocks_of[request_id]) > cached
                and num_new_tokens > 0
            ):
                return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    return allocate_slots


class AllocationFallback:
    """Wraps ``KVCacheManager.allocate_slots`` of one engine, to handle failed allocations: it cancels all
    prefetches, then ends leases, and then chooses the running request that vLLM preempts. Before that, it
    reports the running requests to the ``ProgramScheduler``, which forecasts the demand for blocks."""

    def __init__(
        self,
        context: EngineContext,
        waiting: WaitingQueueAdapter,
        prefetcher: KVPrefetcher,
        offload: OffloadManager | None,
    ) -> None:
        self._scheduler = scheduler = context.scheduler
        self._program_scheduler = context.program_scheduler
        self._groups = context.groups
        self._handle, self._clock, self._guarded = context.handle, context.clock, context.guarded
        self._carry_out = context.carry_out
        self._waiting, self._prefetcher, self._offload = waiting, prefetcher, offload
        self._pool = scheduler.kv_cache_manager.block_pool
        self._forecast_due_in = 0
        """In steps."""
        self.allocating: Request | None = None
        """The request for which vLLM allocates blocks now, as the cause of evictions; ``None`` if unknown."""
        self.victim: tuple[Request, int] | None = None
        """The request chosen for preemption, and the priority that it had before."""
        self._starved: Request | None = None
        """With several groups: a waiting request with loaded KV that lacked blocks in the last step."""
        self._by_user_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        # Only vLLM's priority branch preempts a request at any position of the running list.
        scheduler.policy = SchedulingPolicy.PRIORITY
        manager = scheduler.kv_cache_manager
        self._allocate: Callable[..., KVCacheBlocks | None] = manager.allocate_slots
        manager.allocate_slots = allocate_slots_with_fast_path(manager, self._allocate_with_fallback)

    # -- before a step ------------------------------------------------------------

    def end_load_deadlock(self) -> None:
        """If no request runs, make the last loading request other than the one that lacked blocks in the last
        step give up its blocks. All might wait for each other for ever: vLLM reserves the blocks that loading
        requests need to finish their prompts, and too few for sliding windows, since
        ``max_admission_blocks_per_request`` assumes that the blocks behind the window are free."""
        starved, self._starved = self._starved, None
        if starved is None or self._scheduler.running or starved.is_finished():
            return
        others = [each for each in self._loading() if each is not starved]
        if others:
            self._give_up_load(others[-1])

    def forecast(self, now: float) -> None:
        """Make a forecast if one is due. If the forecast says that a running request will be preempted, start
        to copy its KV to host memory. For presets that predict output lengths. ``now``: seconds on the
        engine's clock."""
        self._forecast_due_in -= 1
        if self._forecast_due_in > 0:
            return
        scheduler = self._scheduler
        running = scheduler.running
        free_blocks = self._pool.get_num_free_blocks()
        if not len(scheduler.waiting) and free_blocks > AMPLE_FREE_SHARE * self._pool.num_gpu_blocks:
            return
        self._forecast_due_in = max(FORECAST_EVERY_STEPS, len(running) // FORECAST_REQUESTS_PER_STEP)
        link = self._offload.offload_costs() if self._offload is not None else None
        sample = ev.DemandSampled(self._used_blocks(), self._views(running), link)
        likely = ev.answer_of(self._handle(sample, now), ev.RequestChosen)
        if likely is not None and self._offload is not None:
            request = scheduler.requests[likely.request_id]
            hashes = request.block_hashes[: request.num_computed_tokens // self._groups.hash_tokens]
            self._offload.copy_ahead(self._groups.cached_prefix(hashes).blocks)

    def _views(self, running: Iterable[Request]) -> list[RunningRequestView]:
        views = []
        for position, request in enumerate(running):
            known = self._program_scheduler.request(request.request_id)
            groups = list(self._groups.used_by(request))
            blocks = sum(map(len, groups))
            views.append(
                RunningRequestView(
                    request.request_id,
                    known.rank if known is not None else sys.maxsize,
                    position,
                    blocks,
                    context_tokens=request.num_tokens,
                    output_tokens=request.num_output_tokens,
                    most_tokens=max_new_tokens(request, self._scheduler.max_model_len),
                    shared_blocks=blocks - sum(map(count_unshared_blocks, groups)),
                )
            )
        return views

    # -- allocation ---------------------------------------------------------------

    def restore_victim(self) -> None:
        if self.victim is not None:
            victim, priority = self.victim
            victim.priority = priority
            self.victim = None

    def _allocate_with_fallback(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        self.allocating = request
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is None:
            connector = self._scheduler.connector  # if it is about to free blocks, vLLM waits a step
            if connector is None or not connector.has_pending_block_frees():
                blocks = self._guarded(self._make_room, partial(self._allocate, request, *args, **kwargs))
        return blocks

    def _make_room(self, allocate: partial[KVCacheBlocks | None]) -> KVCacheBlocks | None:
        """``allocate``: vLLM's call, which failed; its first argument is the request."""
        request: Request = allocate.args[0]
        running = request.status == RequestStatus.RUNNING
        hits = allocate.keywords.get("new_computed_blocks")
        if hits is not None and self._groups.waits_for_state(hits.blocks):
            return None
        blocks: KVCacheBlocks | None = None
        # Loads ahead are given up first, so that no lease ends and no request is preempted because of them.
        if self._prefetcher.cancel_all():
            self._waiting.pause_admission()
            if not running:
                return None  # a waiting request gets these blocks only after the worker has answered
            blocks = allocate()
        if blocks is None:
            # Guarded by itself: if it fails, a victim must still be chosen.
            blocks = self._guarded(self._reclaim_leases, allocate, running)
        if blocks is None and not running and request.num_computed_tokens and not self._groups.is_single:
            self._starved = request
        while blocks is None and running:
            victim = self._choose_victim(request)
            if victim.status == RequestStatus.RUNNING:
                break
            self._give_up_load(victim)
            blocks = allocate()
        return blocks

    def _reclaim_leases(self, allocate: partial[KVCacheBlocks | None], running: bool) -> KVCacheBlocks | None:
        request: Request = allocate.args[0]
        known = self._program_scheduler.request(request.request_id)
        pool, leases = self._pool, self._program_scheduler.leases
        blocks: KVCacheBlocks | None = None
        while blocks is None and leases:
            now = self._clock()
            need = ReclaimRequest(
                program_id=known.program_id if known is not None else None,
                program_rank=known.rank if known is not None else sys.maxsize,
                blocks=self._missing_blocks(allocate, running),
                running=running,
                anything_running=bool(self._scheduler.running),
                overdue=not running and self._program_scheduler.may_end_any_lease(request.request_id, now),
                priority=request.priority if self._by_user_priority and not running else None,
            )
            free, pinned = pool.get_num_free_blocks(), leases.held_blocks
            if not leases.may_reclaim(need) or not self._handle(ev.BlocksNeeded(need), now):
                break
            self._carry_out(now)
            if pool.get_num_free_blocks() > free:
                blocks = allocate()
            elif not running and leases.held_blocks < pinned:
                # Running requests still use the blocks of the leases that have just ended. To end more leases
                # may free no blocks either, so a waiting request stops here. A running request goes on,
                # because otherwise a request is preempted.
                break
        return blocks

    def _missing_blocks(self, allocate: partial[KVCacheBlocks | None], running: bool) -> int:
        """Return an estimate of how many blocks the allocation lacks, at least 1. Blocks that may turn out to
        be shared count as missing, free blocks reserved for transfers as available. If it is too low, the
        caller ends more leases in its next round."""
        manager, (request, *args), given = self._scheduler.kv_cache_manager, allocate.args, allocate.keywords
        if running:
            needed = self._groups.blocks_of_new(args[0] if args else given.get("num_new_tokens", 1))
        else:
            needed = self._groups.blocks_of(request.num_tokens + 1)
            if (hits := given.get("new_computed_blocks")) is not None:
                needed -= self._groups.count_in_use(hits.blocks)
            needed += getattr(manager, "watermark_blocks", 0)
        return max(1, int(needed - manager.block_pool.get_num_free_blocks()))

    def _choose_victim(self, request: Request) -> Request:
        """Return the request to preempt for ``request``: the policy's choice, or else vLLM's own. In place of
        ``request`` itself, vLLM's own choice is the last loading request, if there is one. A running victim
        gets the lowest priority, so that vLLM's priority branch preempts it next; the caller makes a loading
        one give up its load."""
        self.restore_victim()
        candidates = [*self._scheduler.running, *self._loading()]
        if self._by_user_priority:
            lowest = max(candidate.priority for candidate in candidates)
            candidates = [candidate for candidate in candidates if candidate.priority == lowest]
        chosen = self._guarded(self._policy_victim, candidates)
        victim = next((c for c in candidates if c.request_id == chosen), None)
        if victim is None:
            running = [c for c in candidates if c.status == RequestStatus.RUNNING] or candidates
            victim = max(running, key=lambda c: c.arrival_time) if self._by_user_priority else running[-1]
            if victim is request and candidates[-1].status != RequestStatus.RUNNING:
                victim = candidates[-1]
        if victim.status == RequestStatus.RUNNING:
            self.victim = (victim, victim.priority)
            victim.priority = sys.maxsize
        return victim

    def _used_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def _loading(self) -> list[Request]:
        """Return the requests that load KV into their blocks and can give these up. They can be victims too,
        or a request that runs alone beside them would preempt itself in each step. Empty with a connector
        other than ``SojournConnector``, which may write to the blocks at any time."""
        if offload_connector(self._scheduler.connector) is None:
            return []
        # A session that streams its input keeps what it has computed.
        return [request for request in self._waiting.loading() if not request.resumable]

    def _give_up_load(self, request: Request) -> None:
        connector = offload_connector(self._scheduler.connector)
        assert connector is not None
        self._waiting.give_up_load(request, connector)
        self._waiting.pause_admission()
        self._handle(ev.RequestPreempted(request.request_id, loading=True), self._clock())

    def _policy_victim(self, candidates: list[Request]) -> str | None:
        known = [self._program_scheduler.request(candidate.request_id) for candidate in candidates]
        if not any(each is not None and each.program_id is not None for each in known):
            return None  # without hints the choice is vLLM's
        event = ev.VictimNeeded(self._views(candidates), self._used_blocks())
        chosen = ev.answer_of(self._handle(event, self._clock()), ev.RequestChosen)
        return chosen.request_id if chosen is not None else None


def count_unshared_blocks(blocks: Sequence[KVCacheBlock]) -> int:
    """Return how many of a request's ``blocks``, in context order, no other request or lease uses. Takes
    O(log blocks), because only a prefix can be shared."""
    if not blocks or blocks[0].ref_cnt <= 1:
        return len(blocks)
    return len(blocks) - bisect_left(blocks, True, key=lambda block: block.ref_cnt <= 1)
