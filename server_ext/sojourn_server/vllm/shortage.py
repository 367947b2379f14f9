"""What happens when the KV manager finds no blocks: leases give way, and only then somebody is preempted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from ..engine.steward import Steward
from ..policy.views import RoomNeed
from .outlook import Outlook

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class Shortage:
    """Stands between the scheduler and ``KVCacheManager.allocate_slots`` of one engine.

    ``carry_out`` executes the steward's orders; ``guarded`` runs a call so that
    its failure is not the engine's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steward: Steward,
        *,
        clock: Callable[[], float],
        carry_out: Callable[[float], None],
        guarded: Callable[..., Any],
        freed_by: Callable[[ProgramId], int],
        outlook: Outlook,
    ) -> None:
        self._scheduler = scheduler
        self._steward = steward
        self._clock = clock
        self._carry_out = carry_out
        self._guarded = guarded
        self._freed_by = freed_by
        self._outlook = outlook
        self.allocating: Request | None = None
        """Whom blocks are being allocated for, so that an eviction has a name to it."""
        self._chosen: tuple[Request, int] | None = None
        self._priority_matters = scheduler.policy == SchedulingPolicy.PRIORITY
        # Upstream lets only its priority branch preempt a request anywhere in the running list.
        scheduler.policy = SchedulingPolicy.PRIORITY
        manager = scheduler.kv_cache_manager
        self._allocate = manager.allocate_slots
        self._with_leases = self._stand_in(self._allocate)
        manager.allocate_slots = self._with_leases
        config = scheduler.scheduler_config
        # What one step can take at most for requests that run already, with room to spare.
        self._step_blocks = 2 * (config.max_num_batched_tokens // scheduler.block_size + 1)

    def prepare_step(self) -> None:
        """Step aside for a step in which nothing can run short: nobody waits, and memory is ample.

        Most steps of an unpressed engine are such, and the call less for every
        running request is most of what the adapter costs. Evictions in them
        have no name to them.
        """
        scheduler = self._scheduler
        free = scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks
        ample = (
            free > self._step_blocks + 4 * len(scheduler.running)
            and not len(scheduler.waiting)
            and not len(scheduler.kv_holding_waiting)
        )
        if ample:
            self.allocating = None
        scheduler.kv_cache_manager.allocate_slots = self._allocate if ample else self._with_leases

    def restore_victim(self) -> None:
        """Give a chosen victim its own priority back."""
        if self._chosen is not None:
            victim, priority = self._chosen
            victim.priority = priority
            self._chosen = None

    def _stand_in(self, original: Callable[..., Any]) -> Callable[..., KVCacheBlocks | None]:
        """A closure, since it is called for every running request in every step."""

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
            self.allocating = request
            blocks: KVCacheBlocks | None = original(request, *args, **kwargs)
            if blocks is None and not self._blocks_are_coming():
                blocks = self._guarded(self._make_room, request, args, kwargs)
            return blocks

        return allocate_slots

    def _blocks_are_coming(self) -> bool:
        """Upstream then waits a step rather than preempt; so do we rather than end leases."""
        connector = self._scheduler.connector
        return connector is not None and connector.has_pending_block_frees()

    def _make_room(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KVCacheBlocks | None:
        running = request.status == RequestStatus.RUNNING
        # Each by itself: upstream preempts somebody next, whatever becomes of leases.
        blocks: KVCacheBlocks | None = self._guarded(self._end_leases, request, args, kwargs, running)
        if blocks is None and running:
            self._choose_victim(lambda: self._short(request, args, kwargs, running))
        return blocks

    def _end_leases(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool
    ) -> KVCacheBlocks | None:
        ticket = self._steward.tickets.get(request.request_id)
        blocks: KVCacheBlocks | None = None
        pool = self._scheduler.kv_cache_manager.block_pool
        while blocks is None and len(self._steward.leases):
            now = self._clock()
            need = RoomNeed(
                program_id=ticket.program.id if ticket and ticket.program else None,
                program_rank=ticket.rank if ticket else sys.maxsize,
                blocks=self._short(request, args, kwargs, running),
                running=running,
                anything_running=bool(self._scheduler.running),
            )
            free = pool.get_num_free_blocks()
            if not self._steward.make_room(need, now, self._freed_by):
                break
            self._carry_out(now)
            if pool.get_num_free_blocks() == free:  # all of it is shared with somebody who runs
                break
            blocks = self._allocate(request, *args, **kwargs)
        return blocks

    def _short(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool) -> int:
        """Blocks missing, about: what may turn out to be shared counts as needed, reservations of
        transfers do not. Where it is too few, the next round asks for more."""
        block_size = self._scheduler.block_size
        manager = self._scheduler.kv_cache_manager
        if running:
            new_tokens = args[0] if args else kwargs.get("num_new_tokens", 1)
            needed = -(-new_tokens // block_size) + 1
        else:
            needed = -(-(request.num_tokens + 1) // block_size)
            hits = kwargs.get("new_computed_blocks")
            if hits is not None and hits.blocks:
                needed -= sum(1 for block in hits.blocks[0] if block.ref_cnt > 0)
            needed += getattr(manager, "watermark_blocks", 0)
        return max(1, needed - manager.block_pool.get_num_free_blocks())

    def _choose_victim(self, short_blocks: Callable[[], int]) -> None:
        """Make upstream's priority branch pick the request that the policy names.

        Where it names none, the engine's own first-come choice is made: the last admitted.
        """
        running = self._scheduler.running
        least = max(candidate.priority for candidate in running) if self._priority_matters else None
        candidates = [c for c in running if least is None or c.priority == least]
        # By itself: where it fails the engine's own choice is made too.
        chosen = self._guarded(self._stewards_choice, candidates, short_blocks)
        victim = next((c for c in candidates if c.request_id == chosen), None)
        if victim is None:
            victim = self._engines_choice(candidates)
        self.restore_victim()
        self._chosen = (victim, victim.priority)
        victim.priority = sys.maxsize

    def _stewards_choice(self, candidates: list[Request], short_blocks: Callable[[], int]) -> str | None:
        return self._steward.victim(
            self._outlook.views(candidates),
            short_blocks(),
            self._clock(),
            used_blocks=self._outlook.used_blocks(),
        )

    def _engines_choice(self, candidates: list[Request]) -> Request:
        """Whom the untouched scheduler would preempt, under the policy it was started with."""
        if self._priority_matters:
            return max(candidates, key=lambda request: request.arrival_time)
        return candidates[-1]
