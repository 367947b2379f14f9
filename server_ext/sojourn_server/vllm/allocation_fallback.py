"""Handles shortages of KV blocks: forecasts them, ends leases when an allocation fails, and chooses the
request that vLLM preempts."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.events_and_actions import (
    BlocksNeeded,
    DemandSampled,
    LoadGivenUp,
    RequestChosen,
    VictimNeeded,
    answer_of,
)
from ..policies.policy_views import ReclaimRequest, RunningRequestView
from .block_pool import PinnedBlocks
from .compat import (
    FullAttentionManager,
    KVCacheBlock,
    KVCacheBlocks,
    Request,
    RequestStatus,
    SchedulingPolicy,
)
from .engine_context import EngineContext
from .kv_offload_connector import SojournConnector
from .kv_prefetcher import KVPrefetcher
from .offload_manager import OffloadManager
from .waiting_queue import WaitingQueueAdapter, max_new_tokens

if TYPE_CHECKING:
    from .compat import KVCacheManager

FORECAST_EVERY_STEPS = 32
"""Minimum number of steps between two forecasts."""
FORECAST_REQUESTS_PER_STEP = 4
"""Maximum average number of requests that are forecast per step. With many running requests, forecasts are
less frequent."""
AMPLE_FREE_SHARE = 0.5
"""No forecast is made while more than this share of the pool's blocks is free and no request waits."""


class DemandMonitor:
    """Reports the running requests to the ``ProgramScheduler``, which forecasts the demand for blocks. A
    request whose preemption is forecast has its KV copied to host memory in advance."""

    def __init__(self, context: EngineContext, pinned: PinnedBlocks, offload: OffloadManager | None) -> None:
        self._scheduler = scheduler = context.scheduler
        self._program_scheduler, self._groups = context.program_scheduler, context.groups
        self._handle = context.handle
        self._pinned, self._offload = pinned, offload
        self._pool = scheduler.kv_cache_manager.block_pool
        self._due_in = 0

    def before_step(self, now: float) -> None:
        """Make a forecast if one is due. If the forecast says that a running request will be preempted, start
        to copy its KV to host memory. For presets that predict output lengths. ``now``: seconds on the
        engine's clock."""
        self._due_in -= 1
        if self._due_in > 0:
            return
        scheduler = self._scheduler
        running = scheduler.running
        free_blocks = self._pool.get_num_free_blocks()
        if not len(scheduler.waiting) and free_blocks > AMPLE_FREE_SHARE * self._pool.num_gpu_blocks:
            return
        self._due_in = max(FORECAST_EVERY_STEPS, len(running) // FORECAST_REQUESTS_PER_STEP)
        link = self._offload.link.offload_costs() if self._offload is not None else None
        sample = DemandSampled(self._pinned.used_blocks(), self.views(running), link)
        likely = answer_of(self._handle(sample, now), RequestChosen)
        if likely is not None and self._offload is not None:
            self._copy_ahead(scheduler.requests[likely.request_id], self._offload)

    def views(self, running: Iterable[Request]) -> list[RunningRequestView]:
        """Return one view for each request, in the given order."""
        return [self._view(position, request) for position, request in enumerate(running)]

    def _view(self, position: int, request: Request) -> RunningRequestView:
        known = self._program_scheduler.request(request.request_id)
        groups = list(self._groups.used_by(request))
        return RunningRequestView(
            request.request_id,
            known.rank if known is not None else sys.maxsize,
            position,
            sum(map(len, groups)),
            context_tokens=request.num_tokens,
            output_tokens=request.num_output_tokens,
            most_tokens=max_new_tokens(request, self._scheduler.max_model_len),
            freed_blocks=sum(map(count_unshared_blocks, groups)),
        )

    def _copy_ahead(self, request: Request, offload: OffloadManager) -> None:
        """Copy the request's full blocks to host memory. An incomplete last block is not copied."""
        if not self._groups.is_single:
            hashes = request.block_hashes[: request.num_computed_tokens // self._groups.hash_tokens]
            offload.copy_ahead(self._groups.cached_prefix(hashes).blocks)
            return
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        full = request.num_computed_tokens // self._scheduler.block_size
        # Skip the leading blocks that host memory already has.
        first = offload.count_leading_copied(request.block_hashes[:full])
        offload.copy_ahead([block for block in blocks[first:full] if block.block_hash is not None])


def allocate_slots_with_fast_path(manager: KVCacheManager) -> Callable[..., KVCacheBlocks | None]:
    """Return ``manager.allocate_slots``, with a fast path for running requests that need no new block.

    vLLM calls ``allocate_slots`` for each running request in each step. In most decode steps the call changes
    nothing, because the request's last block has room and no block becomes full. The fast path then returns
    what vLLM's method would return: no blocks. Calls with speculative tokens go to vLLM's method.

    Some engines get vLLM's method itself: those without a prefix cache, without full attention, with several
    KV cache groups, or with hash blocks of another size than KV blocks. In groups without full attention,
    ``allocate_slots`` also frees blocks.
    """
    original: Callable[..., KVCacheBlocks | None] = manager.allocate_slots
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager or not manager.enable_caching:
        return original
    group = groups[0]
    size = group.block_size
    if size != group.block_pool.hash_block_size:
        return original  # vLLM may also cache incomplete blocks
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
        return original(request, num_new_tokens, *args, **kwargs)

    return allocate_slots


class AllocationFallback:
    """Wraps ``KVCacheManager.allocate_slots`` of one engine, to handle failed allocations.

    If blocks are missing, it first cancels all prefetches, then ends leases. If that is not enough for a
    running request, it chooses the request that vLLM preempts. It sets vLLM's scheduling policy to PRIORITY.
    """

    def __init__(
        self,
        context: EngineContext,
        pinned: PinnedBlocks,
        demand_monitor: DemandMonitor,
        waiting: WaitingQueueAdapter,
        prefetcher: KVPrefetcher,
    ) -> None:
        self._scheduler = scheduler = context.scheduler
        self._program_scheduler = context.program_scheduler
        self._groups = groups = context.groups
        self._handle, self._clock, self._guarded = context.handle, context.clock, context.guarded
        self._carry_out = context.carry_out
        self._pinned, self._demand_monitor = pinned, demand_monitor
        self._waiting, self._prefetcher = waiting, prefetcher
        self.allocating: Request | None = None
        """The request for which vLLM allocates blocks now; ``None`` if unknown. It is recorded as the cause
        of evictions."""
        self.victim: tuple[Request, int] | None = None
        """The request chosen for preemption, and the priority that it had before."""
        self._starved: Request | None = None
        """A waiting request with loaded KV that got no blocks for the rest of its prompt in the last step;
        ``None`` if there is none. Used only with several KV cache groups."""
        self._by_user_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        # Only vLLM's priority branch preempts a request at any position of the running list.
        scheduler.policy = SchedulingPolicy.PRIORITY
        manager = scheduler.kv_cache_manager
        self._allocate = allocate_slots_with_fast_path(manager)
        self._allocate_with_fallback = self._wrap(self._allocate)
        manager.allocate_slots = self._allocate_with_fallback
        config = scheduler.scheduler_config
        # Twice an upper bound of the blocks that running requests can take in one step.
        self._step_blocks = 2 * groups.blocks_of_step(config.max_num_batched_tokens)
        self._running_blocks = 4 * len(groups)

    def prepare_step(self) -> None:
        """Prepare the next step. First end a possible deadlock of loading requests. Then install the wrapper,
        or remove it if blocks are ample and no request waits.

        The wrapper runs for every running request and causes most of the adapter's cost. In steps without
        the wrapper, evictions are recorded without the request that caused them.
        """
        scheduler = self._scheduler
        starved, self._starved = self._starved, None
        if starved is not None:
            self._guarded(self._break_load_deadlock, starved)
        free = scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks
        ample = free > self._step_blocks + self._running_blocks * len(scheduler.running) and not (
            scheduler.waiting.entries or scheduler.waiting.parked or scheduler.kv_holding_waiting.entries
        )
        if ample:
            self.allocating = None
        scheduler.kv_cache_manager.allocate_slots = self._allocate if ample else self._allocate_with_fallback

    def restore_victim(self) -> None:
        """Give the request chosen for preemption, if any, its original priority back."""
        if self.victim is not None:
            request, request.priority = self.victim
            self.victim = None

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., KVCacheBlocks | None]:
        """Return a wrapper of ``original``. It runs for every running request in every step, so it is a
        closure, which is fast."""

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
            self.allocating = request
            blocks: KVCacheBlocks | None = original(request, *args, **kwargs)
            if blocks is None and not self._blocks_are_coming():
                blocks = self._guarded(self._make_room, request, args, kwargs)
            return blocks

        return allocate_slots

    def _make_victim(self, victim: Request) -> None:
        """Give a running request the lowest priority, so that vLLM's priority branch preempts it next."""
        self.restore_victim()
        self.victim = (victim, victim.priority)
        victim.priority = sys.maxsize

    def _blocks_are_coming(self) -> bool:
        """Return whether the connector is about to free blocks. vLLM then waits a step before it preempts."""
        connector = self._scheduler.connector
        return connector is not None and connector.has_pending_block_frees()

    def _make_room(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KVCacheBlocks | None:
        running = request.status == RequestStatus.RUNNING
        hits = kwargs.get("new_computed_blocks")
        if hits is not None and self._groups.waits_for_state(hits.blocks):
            return None
        blocks: KVCacheBlocks | None = None
        # Loads ahead are given up first, so that no lease ends and no request is preempted because of them.
        if self._prefetcher.cancel_all():
            self._waiting.pause_admission()
            if not running:
                return None  # a waiting request gets these blocks only after the worker has answered
            blocks = self._allocate(request, *args, **kwargs)
        if blocks is None:
            # Guarded by itself: if it fails, a victim must still be chosen.
            blocks = self._guarded(self._reclaim_leases, request, args, kwargs, running)
        if blocks is None and not running and request.num_computed_tokens and not self._groups.is_single:
            self._starved = request
        while blocks is None and running:
            victim = self._choose_victim(
                request, lambda: self._missing_blocks(request, args, kwargs, running)
            )
            if victim.status == RequestStatus.RUNNING:
                break
            self._give_up_load(victim)
            blocks = self._allocate(request, *args, **kwargs)
        return blocks

    def _reclaim_leases(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool
    ) -> KVCacheBlocks | None:
        known = self._program_scheduler.request(request.request_id)
        leased_programs = self._program_scheduler.leased_programs()
        blocks: KVCacheBlocks | None = None
        pool = self._scheduler.kv_cache_manager.block_pool
        while blocks is None and leased_programs:
            now = self._clock()
            need = ReclaimRequest(
                program_id=known.program_id if known is not None else None,
                program_rank=known.rank if known is not None else sys.maxsize,
                blocks=self._missing_blocks(request, args, kwargs, running),
                running=running,
                anything_running=bool(self._scheduler.running),
                overdue=not running and self._program_scheduler.may_end_any_lease(request.request_id, now),
                priority=request.priority if self._by_user_priority and not running else None,
            )
            free, pinned = pool.get_num_free_blocks(), self._program_scheduler.leased_blocks
            if not self._end_leases(need, now):
                break
            self._carry_out(now)
            if pool.get_num_free_blocks() > free:
                blocks = self._allocate(request, *args, **kwargs)
            elif not running and self._program_scheduler.leased_blocks < pinned:
                # Running requests still use the blocks of the leases that have just ended. To end more leases
                # may free no blocks either, so a waiting request stops here. A running request goes on,
                # because otherwise a request is preempted.
                break
        return blocks

    def _end_leases(self, need: ReclaimRequest, now: float) -> bool:
        """End the leases that the policy chooses. Return whether it chose any."""
        if not self._program_scheduler.lease_manager.may_reclaim(need):
            return False
        return bool(self._handle(BlocksNeeded(need), now))

    def _missing_blocks(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool
    ) -> int:
        """Return an estimate of how many blocks the allocation lacks, at least 1.

        Blocks that may turn out to be shared count as missing. Free blocks that vLLM reserves for transfers
        count as available. If the estimate is too low, the caller ends more leases in its next round.
        """
        manager = self._scheduler.kv_cache_manager
        if running:
            needed = self._groups.blocks_of_new(args[0] if args else kwargs.get("num_new_tokens", 1))
        else:
            needed = self._groups.blocks_of(request.num_tokens + 1)
            hits = kwargs.get("new_computed_blocks")
            if hits is not None:
                needed -= self._groups.count_in_use(hits.blocks)
            needed += getattr(manager, "watermark_blocks", 0)
        return max(1, int(needed - manager.block_pool.get_num_free_blocks()))

    def _choose_victim(self, request: Request, missing_blocks: Callable[[], int]) -> Request:
        """Return the request to preempt for ``request``: the policy's choice, or else vLLM's own choice.

        If vLLM's own choice is ``request`` itself, the last loading request takes its place, if any request
        loads. A running victim gets the lowest priority, so that vLLM's priority branch preempts it next. The
        caller must make a loading victim give up its load.
        """
        self.restore_victim()
        candidates = [*self._scheduler.running, *self._loading()]
        if self._by_user_priority:
            lowest = max(candidate.priority for candidate in candidates)
            candidates = [candidate for candidate in candidates if candidate.priority == lowest]
        chosen = self._guarded(self._policy_victim, candidates, missing_blocks)
        victim = next((c for c in candidates if c.request_id == chosen), None)
        if victim is None:
            running = [c for c in candidates if c.status == RequestStatus.RUNNING]
            victim = self._stock_victim(running or candidates)
            if victim is request and candidates[-1].status != RequestStatus.RUNNING:
                victim = candidates[-1]
        if victim.status == RequestStatus.RUNNING:
            self._make_victim(victim)
        return victim

    def _loading(self) -> list[Request]:
        """Return the requests that load KV into their blocks and can give these blocks up.

        They can be victims too. Otherwise a request that runs alone beside them would preempt itself in each
        step. With a connector other than ``SojournConnector`` the list is empty, because such a connector may
        write to the blocks at any time.
        """
        if not isinstance(self._scheduler.connector, SojournConnector):
            return []
        # A session that streams its input keeps what it has computed.
        return [request for request in self._waiting.loading() if not request.resumable]

    def _give_up_load(self, request: Request) -> None:
        self._waiting.give_up_load(request, self._scheduler.connector)
        self._waiting.pause_admission()
        self._handle(LoadGivenUp(request.request_id), self._clock())

    def _break_load_deadlock(self, starved: Request) -> None:
        """If no request runs, make the last loading request other than ``starved`` give up its blocks.

        Before vLLM begins a load, it reserves the blocks that other loading requests need to finish their
        prompts. For sliding windows it reserves too few blocks, because its limit
        ``max_admission_blocks_per_request`` assumes that blocks behind the window are free. Without this
        method, all loading requests could wait for each other for ever.
        """
        if self._scheduler.running or starved.is_finished():
            return
        others = [each for each in self._loading() if each is not starved]
        if others:
            self._give_up_load(others[-1])

    def _policy_victim(self, candidates: list[Request], missing_blocks: Callable[[], int]) -> str | None:
        if not any(map(self._has_program, candidates)):
            return None  # without hints the choice is vLLM's
        views = self._demand_monitor.views(candidates)
        event = VictimNeeded(missing_blocks(), views, self._pinned.used_blocks())
        chosen = answer_of(self._handle(event, self._clock()), RequestChosen)
        return chosen.request_id if chosen is not None else None

    def _has_program(self, request: Request) -> bool:
        known = self._program_scheduler.request(request.request_id)
        return known is not None and known.program_id is not None

    def _stock_victim(self, candidates: list[Request]) -> Request:
        """Return the request that vLLM without sojourn would preempt under its scheduling policy."""
        if self._by_user_priority:
            return max(candidates, key=lambda request: request.arrival_time)
        return candidates[-1]


def count_unshared_blocks(blocks: Sequence[KVCacheBlock]) -> int:
    """Return how many of a request's ``blocks`` no other request or lease uses. The blocks are in the order
    of the context. Takes O(log blocks), because only a prefix can be shared."""
    if not blocks or blocks[0].ref_cnt <= 1:
        return len(blocks)
    return len(blocks) - bisect_left(blocks, True, key=lambda block: block.ref_cnt <= 1)
