"""Who waits, in what order, and who of them may enter: between vLLM's waiting queues and the steward."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from ..engine.steward import Steward
from .outlook import most_tokens
from .waiting_queue import Key, PolicyQueue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

LOOK_AGAIN_STEPS = 16
"""Steps between two look-ups of what a gated request could share."""


class WaitingLine:
    """Stands in the place of one scheduler's waiting queues. ``guarded`` runs a call so that its failure is
    not the engine's."""

    def __init__(
        self,
        scheduler: Scheduler,
        steward: Steward,
        *,
        clock: Callable[[], float],
        guarded: Callable[..., Any],
    ) -> None:
        self._scheduler = scheduler
        self._steward = steward
        self._clock = clock
        self._guarded = guarded
        self._pool = scheduler.kv_cache_manager.block_pool
        self._priority_matters = scheduler.policy == SchedulingPolicy.PRIORITY
        preset = steward.preset
        # With user priorities the gate would let an unimportant early program keep an important one out.
        gates = preset.entry.gates and not self._priority_matters
        scheduler.waiting = self._queue = PolicyQueue(
            self._queue_key,
            parked=self.is_parked if preset.placement.places else None,
            gated=self._belongs_behind_gate if gates else None,
            may_pass=self._may_enter if gates else None,
            holds_line=self._holds_line if gates else None,
        )
        scheduler.kv_holding_waiting = PolicyQueue(self._queue_key)
        self._steps = 0
        self._promotions: list[tuple[float, str]] = []
        """A heap of when requests are to be filed anew, though nothing happens to them."""
        self._shared: dict[str, tuple[int, int]] = {}
        """Of gated requests: when it was looked up, and how many blocks of the prompt others hold."""
        self._kept_out: tuple[str, int] | None = None
        """The request that was kept out last, and how often prospects had changed then."""

    def open_step(self) -> None:
        """Before the scheduler plans a step."""
        self._queue.open_step()
        self._steps += 1

    def rekey(self, request: Request) -> None:
        """What its place goes by has changed."""
        self._queue.rekey(request)

    def left(self, request_id: str) -> None:
        """The request has left the engine."""
        self._shared.pop(request_id, None)

    def promote(self, now: float) -> None:
        """File anew those whom waiting alone lets go first from now on."""
        while self._promotions and self._promotions[0][0] <= now:
            _, request_id = heapq.heappop(self._promotions)
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._queue.rekey(request)

    def _queue_key(self, request: Request) -> Key:
        key = self._guarded(self._ordered, request)
        if key is None:  # in line by its arrival, as far as we can tell, and ahead of nobody we know
            key = (request.status != RequestStatus.PREEMPTED, True, float("inf"), request.arrival_time)
        return (request.priority, *key) if self._priority_matters else key

    def _ordered(self, request: Request) -> Key:
        ticket = self._steward.tickets[request.request_id]
        key = self._steward.queue_key(ticket, preempted=request.status == RequestStatus.PREEMPTED)
        promoted_s = self._steward.promoted_s(ticket)
        if promoted_s < math.inf and promoted_s > self._clock():
            heapq.heappush(self._promotions, (promoted_s, request.request_id))
        return key

    def is_parked(self, request: Request) -> bool:
        """Whether it waits because of where its program is."""
        return self._guarded(self._parked, request) is True

    def _parked(self, request: Request) -> bool:
        if request.kv_transfer_params:  # its peer waits for it: who enters is settled elsewhere
            return False
        return self._steward.parked(self._steward.tickets[request.request_id])

    def _belongs_behind_gate(self, request: Request) -> bool:
        return self._guarded(self._behind_gate, request) is True

    def _behind_gate(self, request: Request) -> bool:
        if request.kv_transfer_params:  # its peer waits for it: who enters is settled elsewhere
            return False
        ticket = self._steward.tickets[request.request_id]
        ticket.preempted = request.status == RequestStatus.PREEMPTED
        return self._steward.behind_gate(ticket)

    def _may_enter(self, request: Request) -> bool:
        return self._guarded(self._ask_to_enter, request) is not False

    def _holds_line(self, request: Request) -> bool:
        return self._guarded(self._has_waited_long, request) is True

    def _has_waited_long(self, request: Request) -> bool:
        return self._steward.holds_the_line(self._steward.tickets[request.request_id], self._clock())

    def _ask_to_enter(self, request: Request) -> bool:
        ticket = self._steward.tickets[request.request_id]
        running = bool(self._scheduler.running)
        forecasts = self._steward.preset.entry.forecasts
        kept_out = (request.request_id, self._steward.prospects.changes)
        if forecasts and running and kept_out == self._kept_out:
            return False  # nothing has happened since that could change the answer
        need_blocks = -(-(request.num_tokens + 1) // self._scheduler.block_size)
        free_blocks, now = self._pool.get_num_free_blocks(), self._clock()
        if self._steward.preset.entry.counts_promised:
            free_blocks -= self._promised_blocks()
        more: dict[str, int] = {}
        if forecasts:
            more["output_tokens"] = request.num_output_tokens
            more["most_tokens"] = most_tokens(request, self._scheduler.max_model_len)
        if self._steward.may_enter(ticket, need_blocks, free_blocks, now, anything_running=running, **more):
            return True
        shared = self._shared_blocks(request)
        if shared > 0 and self._steward.may_enter(
            ticket, need_blocks - shared, free_blocks, now, anything_running=running, **more
        ):
            return True
        self._kept_out = kept_out
        return False

    def _promised_blocks(self) -> int:
        """Blocks that running requests still lack for prompts of which a part is yet to be computed."""
        manager, block_size = self._scheduler.kv_cache_manager, self._scheduler.block_size
        promised = 0
        for request in self._scheduler.running:
            if request.num_computed_tokens < request.num_tokens - 1:
                held = len(manager.get_blocks(request.request_id).blocks[0])
                promised += max(0, -(-request.num_tokens // block_size) - held)
        return promised

    def _shared_blocks(self, request: Request) -> int:
        """Blocks of the prompt that others hold anyway. Looked up anew only every few steps."""
        known = self._shared.get(request.request_id)
        if known is None or self._steps - known[0] >= LOOK_AGAIN_STEPS:
            hits = self._scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks
            shared = sum(1 for block in hits[0] if block.ref_cnt > 0) if hits else 0
            known = self._shared[request.request_id] = (self._steps, shared)
        return known[1]
