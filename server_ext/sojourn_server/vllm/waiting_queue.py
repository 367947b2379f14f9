"""vLLM's waiting queue in a policy's order, with admission control in front of it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..core.client_event_decoder import EventHandler
from ..core.events_and_actions import AdmissionRequested, is_let_in
from ..core.program_scheduler import ProgramScheduler
from .compat import Request, RequestQueue, RequestStatus, SchedulingPolicy
from .engine_description import is_one_of_a_pair
from .kv_cache_groups import KVCacheGroups
from .request_heap import QueueKey, RequestHeap, RequestsBeforeOverdue

if TYPE_CHECKING:
    from .compat import Scheduler
    from .kv_offload_connector import SojournConnector

SHARED_LOOKUP_EVERY_STEPS = 16
"""Number of steps between two look-ups of the blocks that a request waiting for admission could share."""


class PolicyRequestQueue(RequestQueue):
    """vLLM's waiting queue as a priority queue by ``key(request)``, lowest first, with admission control.

    callback         returns, for a request
    gated            whether it needs admission. If so, it is called a gated request
    may_be_admitted  for the first gated request: whether it may be admitted. If not, all gated requests wait
                     until the next step (``open_step``), and the queue returns only other requests
    blocks_queue     for a gated request that is rejected: whether it stops all requests behind it. Requests
                     before it are still returned. If an untracked request waits, the queue returns the gated
                     request nevertheless, and vLLM admits it if it fits
    parked           whether the queue holds it back, until ``rekey`` calls ``parked`` again and gets false
    untracked        whether it has no program. Without this callback, no request becomes overdue
    arrival          sort key of untracked requests, lowest first
    overdue          for the oldest untracked request: whether it has waited too long. If so, the queue
                     returns it before each other request for which ``passes(overdue, other)`` is true

    ``bool`` is true if ``peek_request`` would return a request now, and false between ``close_step`` and
    ``open_step``. ``len`` counts all requests, so that the engine knows that it has work left.

    vLLM's scheduler peeks, may change keys, and then calls ``pop_request``. It must get the request that it
    has peeked, so ``rekey`` does not change the peeked request.
    """

    def __init__(
        self,
        key: Callable[[Request], QueueKey],
        *,
        parked: Callable[[Request], bool] = lambda request: False,
        gated: Callable[[Request], bool] = lambda request: False,
        may_be_admitted: Callable[[Request], bool] = lambda request: True,
        blocks_queue: Callable[[Request], bool] = lambda request: False,
        untracked: Callable[[Request], bool] | None = None,
        arrival: Callable[[Request], int] = lambda request: 0,
        overdue: Callable[[Request], bool] = lambda request: False,
        passes: Callable[[Request, Request], bool] = lambda overdue, other: False,
    ) -> None:
        self._open = RequestHeap(key)
        self._gated = RequestHeap(key)
        self._parked: dict[Request, None] = {}
        self._is_parked = parked
        self._needs_admission = gated
        self._may_be_admitted = may_be_admitted
        self._blocks_queue = blocks_queue
        self._is_untracked = untracked
        self._is_overdue = overdue
        self._before_overdue = {
            heap: RequestsBeforeOverdue(heap, arrival, passes) for heap in (self._open, self._gated)
        }
        self._untracked = RequestHeap(lambda request: (arrival(request),))
        """Waiting requests that have no program, by arrival."""
        self._admission_closed = False
        self._step_closed = False
        self._peeked: Request | None = None

    def open_step(self) -> None:
        """Start a step. Gated requests that were rejected may be admitted in it."""
        self._admission_closed = False
        self._step_closed = False
        self._peeked = None

    def close_step(self) -> None:
        """Make ``bool(self)`` false until the next step, so that vLLM takes no further request."""
        self._step_closed = True

    def add_request(self, request: Request) -> None:
        self._peeked = None
        if self._is_parked(request):
            self._parked[request] = None
            return
        heap = self._gated if self._needs_admission(request) else self._open
        key, number = heap.push(request)
        if self._is_untracked is None:
            return
        untracked = self._is_untracked(request)
        if untracked:
            self._untracked.push(request)
        # The overdue request is the oldest untracked one, so it passes all other untracked requests.
        if not untracked or request.status == RequestStatus.PREEMPTED:
            self._before_overdue[heap].push(key, number)

    def parked_requests(self) -> KeysView[Request]:
        """Return the parked requests."""
        return self._parked.keys()

    def prepend_request(self, request: Request) -> None:
        """Add the request by its key. A preempted request's key puts it first."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        if self._peeked is None:
            self._peeked = self._first()
            if self._peeked is None:
                raise IndexError("peek from a queue without a request to admit")
        return self._peeked

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        self._open.discard(request)
        self._gated.discard(request)
        self._untracked.discard(request)
        self._parked.pop(request, None)
        self._peeked = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def rekey(self, request: Request) -> None:
        """Move a request to the position of its present key and state. Ignores a request that is not in this
        queue."""
        if request in self._open or request in self._gated or request in self._parked:
            peeked = self._peeked
            self.remove_request(request)
            self.add_request(request)
            self._peeked = peeked

    def __bool__(self) -> bool:
        if self._step_closed:
            return False
        if self._peeked is None:
            self._peeked = self._first()
        return self._peeked is not None

    def __len__(self) -> int:
        return len(self._open) + len(self._gated) + len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        entries = self._open.entries() + self._gated.entries()
        yield from (entry[2] for entry in sorted(entries, key=lambda entry: entry[:2]))
        yield from tuple(self._parked)

    def next_requests(self, most: int) -> list[Request]:
        """Return the ``most`` requests with the lowest keys, lowest first, without parked ones."""
        entries = self._open.entries() + self._gated.entries()
        return [entry[2] for entry in heapq.nsmallest(most, entries, key=lambda entry: entry[:2])]

    def overdue_request(self) -> Request | None:
        """Return the oldest untracked request if it is overdue."""
        oldest = self._untracked.head()
        return oldest[2] if oldest is not None and self._is_overdue(oldest[2]) else None

    def gated_before_untracked(self, request: Request) -> bool:
        """Return whether a request that this queue returned is gated, and untracked requests wait."""
        return request in self._gated and self._untracked.head() is not None

    def _first(self) -> Request | None:
        overdue = self.overdue_request()
        if overdue is None:
            free, gated = self._open.head(), self._gated.head()
        else:
            # The overdue request passes the requests that arrived after it. Requests with and without a
            # program are then served by arrival, so that neither class starves the other.
            free = self._before_overdue[self._open].head(overdue)
            gated = self._before_overdue[self._gated].head(overdue)
        if self._admission_closed:
            gated = None
        if gated is not None and (free is None or gated[:2] < free[:2]):
            if self._may_be_admitted(gated[2]):
                return gated[2]
            if self._blocks_queue(gated[2]):
                return gated[2] if self._untracked.head() is not None else None
            self._admission_closed = True
        return free[2] if free is not None else overdue


class WaitingQueueAdapter:
    """Replaces vLLM's waiting queues with queues that the ``ProgramScheduler`` orders. ``guarded`` runs a
    call and returns ``None`` if it fails."""

    def __init__(
        self,
        scheduler: Scheduler,
        program_scheduler: ProgramScheduler,
        groups: KVCacheGroups,
        *,
        clock: Callable[[], float],
        handle: EventHandler,
        guarded: Callable[..., Any],
    ) -> None:
        self._scheduler = scheduler
        self._program_scheduler = program_scheduler
        self._groups = groups
        self._handle = handle
        self._clock = clock
        self._guarded = guarded
        self._pool = scheduler.kv_cache_manager.block_pool
        self._in_pair = is_one_of_a_pair(scheduler)
        self._by_user_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        preset = program_scheduler.preset
        self._places = preset.placement.is_used
        # With user priorities, admission by program would let an early program of low priority delay an
        # important one.
        gates = preset.admission.is_used and not self._by_user_priority
        scheduler.waiting = self._queue = PolicyRequestQueue(
            self._queue_key,
            parked=self.is_parked,
            gated=lambda request: gates and guarded(self._needs_admission, request) is True,
            may_be_admitted=lambda request: guarded(self._may_be_admitted, request) is not False,
            blocks_queue=lambda request: guarded(self._blocks_queue, request) is True,
            # With user priorities, a request of low priority may wait for ever, as in stock vLLM.
            untracked=None if self._by_user_priority else self._is_untracked,
            arrival=lambda request: program_scheduler.arrival(request.request_id),
            overdue=lambda request: guarded(self._is_overdue, request) is True,
            passes=self._passes,
        )
        scheduler.kv_holding_waiting = PolicyRequestQueue(self._queue_key)
        self._steps = 0
        self._admission_paused_until = 0
        """Number of the last step in which no request is admitted."""
        self._promotions = RequestHeap(lambda request: (program_scheduler.promoted_s(request.request_id),))
        """Requests by the time at which their long wait changes their key."""
        self._shared: dict[str, tuple[int, int]] = {}
        """Id of a request that needs admission → (step of the last look-up, number of shared blocks). A block
        of its prompt is shared if other requests use it or leases pin it."""
        self._last_rejected: tuple[str, int] | None = None
        """(Id of the request that admission rejected last, value of ``ProgramScheduler.demand_changes`` at
        that time)."""

    def open_step(self) -> None:
        """Start a step before vLLM plans it. In steps in which admission is paused, close the queue."""
        self._queue.open_step()
        self._steps += 1
        if self._steps <= self._admission_paused_until:
            self._queue.close_step()

    def rekey(self, request: Request) -> None:
        """Move a request whose key may have changed."""
        self._queue.rekey(request)

    def left(self, request: Request) -> None:
        """Forget a request that has left the engine."""
        self._shared.pop(request.request_id, None)
        self._promotions.discard(request)

    def loading(self) -> list[Request]:
        """Return the waiting requests that hold blocks for a KV load, in the queue's order. The load may
        still run or have ended. A request that vLLM has taken from the queue for the moment is left out."""
        return [
            request
            for request in self._scheduler.kv_holding_waiting
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
        ]

    def give_up_load(self, request: Request, connector: SojournConnector) -> None:
        """Cancel the load of a request from ``loading()``, free its blocks and queue it again. vLLM itself
        preempts only running requests."""
        scheduler = self._scheduler
        connector.cancel_load(request.request_id)
        for ids in (scheduler.finished_recving_kv_req_ids, scheduler.failed_recving_kv_req_ids):
            ids.discard(request.request_id)
        scheduler._inflight_prefills.discard(request)
        count_stage = getattr(scheduler, "_set_kv_fetch_stage", None)  # since 0.32
        if count_stage is not None:
            count_stage(request, None)
        scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler.deferred_waiting.discard(request)
        scheduler.waiting.add_request(request)

    def pause_admission(self) -> None:
        """Admit no further request in this step, as vLLM does after a preemption.

        Call this after a load was cancelled. Other requests must not get the load's blocks before the worker
        has answered. With asynchronous scheduling the answer comes one step later, so the pause also covers
        the next step."""
        self._admission_paused_until = self._steps + bool(self._scheduler.scheduler_config.async_scheduling)
        self._queue.close_step()

    def requeue_loading(self, connector: SojournConnector) -> None:
        """Cancel all loads before a cache reset, free their blocks, and queue unfinished requests again."""
        scheduler = self._scheduler
        for request in tuple(scheduler.requests.values()):
            if request.is_finished():  # aborted; vLLM would free its blocks after the load
                connector.cancel_load(request.request_id)
                scheduler._free_blocks(request)
        for request in self.loading():
            self.give_up_load(request, connector)

    def promote(self, now: float) -> None:
        """Move each queued request whose long wait has changed its key to its new position. ``now``: seconds
        on the engine's clock."""
        while (first := self._promotions.head()) is not None and first[0][0] <= now:
            self._promotions.discard(first[2])
            self._queue.rekey(first[2])

    def may_end_any_lease(self, request: Request) -> bool:
        """Return whether a waiting request that needs blocks may end any lease. It may in three cases:

        - It is overdue.
        - An overdue request waits behind it.
        - Admission has rejected it so long that it is no longer overtaken, and an untracked request waits.

        Otherwise it could wait for ever: for the lease of a program whose next request waits behind it. Such
        a lease does not expire while that request waits. With user priorities, only the first case counts.
        """
        if self._program_scheduler.is_overdue(request.request_id, self._clock()):
            return True
        if self._by_user_priority:
            return False  # nothing overtakes by the time it has waited
        if self._queue.overdue_request() is not None:
            return True  # the queue returns only requests that are served before the overdue one
        return self._queue.gated_before_untracked(request) and self._blocks_queue(request)

    def only_parked_wait(self) -> bool:
        """Return whether requests are parked and vLLM could run none of the other waiting requests now."""
        scheduler, parked = self._scheduler, self._queue.parked_requests()
        waiting = len(self._queue) + len(scheduler.kv_holding_waiting)
        if not parked:
            return False
        # A count is faster than a union of sets. This runs in every step, and many requests are parked.
        deferred = sum(request not in parked for request in scheduler.deferred_waiting)
        return waiting <= len(parked) + deferred

    def is_parked(self, request: Request) -> bool:
        """Return whether the request waits because its program is not placed on the device, or because it has
        yielded."""
        return self._guarded(self._check_parked, request) is True

    def _queue_key(self, request: Request) -> QueueKey:
        key = self._guarded(self._policy_key, request)
        if key is None:  # by arrival, behind the requests whose key is known
            key = (not self._goes_first(request), True, float("inf"), request.arrival_time)
        return (request.priority, *key) if self._by_user_priority else key

    def _goes_first(self, request: Request) -> bool:
        """Return whether the request goes first because it is preempted. With user priorities the result is
        false, because vLLM then orders preempted requests by arrival too."""
        return request.status == RequestStatus.PREEMPTED and not self._by_user_priority

    def _policy_key(self, request: Request) -> QueueKey:
        key = self._program_scheduler.queue_key(request.request_id, preempted=self._goes_first(request))
        promoted_s = self._program_scheduler.promoted_s(request.request_id)
        if promoted_s < math.inf and promoted_s > self._clock():
            self._promotions.push(request)
        return key

    def _is_overdue(self, request: Request) -> bool:
        return self._program_scheduler.is_overdue(request.request_id, self._clock())

    def _passes(self, overdue: Request, other: Request) -> bool:
        return self._program_scheduler.passes(
            overdue.request_id, other.request_id, preempted=other.status == RequestStatus.PREEMPTED
        )

    def _is_untracked(self, request: Request) -> bool:
        known = self._program_scheduler.request(request.request_id)
        return known is not None and known.program_id is None

    def _check_parked(self, request: Request) -> bool:
        if self._is_transfer(request):
            return False
        if not self._places:
            return self._program_scheduler.has_yielded(request.request_id)
        return self._program_scheduler.is_parked(request.request_id)

    def _is_transfer(self, request: Request) -> bool:
        """Return whether the other engine of a pair works on the same request and waits for this engine.

        False if this engine is not in a pair, because a client's ``kv_transfer_params`` must not let a
        request pass others.
        """
        return self._in_pair and isinstance(request.kv_transfer_params, Mapping)

    def _needs_admission(self, request: Request) -> bool:
        if self._is_transfer(request):
            return False
        return self._program_scheduler.subject_to_admission(
            request.request_id, preempted=request.status == RequestStatus.PREEMPTED
        )

    def _blocks_queue(self, request: Request) -> bool:
        # Rejected for long, it may be overtaken no more. Programs then wait until the policy admits it, which
        # may take until a long answer ends. If a request of no program waits, stock vLLM's rule decides.
        return self._program_scheduler.blocks_later_requests(request.request_id, self._clock())

    def _may_be_admitted(self, request: Request) -> bool:
        running = bool(self._scheduler.running or self._admitted_loading())
        policy = self._program_scheduler.preset.admission
        rejected = (request.request_id, self._program_scheduler.demand_changes)
        if policy.forecasts and running and rejected == self._last_rejected:
            return False  # the forecast has not changed since
        need_blocks = self._groups.blocks_of(request.num_tokens + 1)
        free_blocks, now = self._pool.get_num_free_blocks(), self._clock()
        if policy.reserves_prompt_blocks:
            free_blocks -= self._promised_blocks()
        event = AdmissionRequested(
            request.request_id,
            need_blocks,
            free_blocks,
            running,
            output_tokens=request.num_output_tokens if policy.forecasts else 0,
            most_tokens=max_new_tokens(request, self._scheduler.max_model_len) if policy.forecasts else 0,
            preempted=request.status == RequestStatus.PREEMPTED,
        )
        if is_let_in(self._handle(event, now)):
            return True
        shared = self._shared_blocks(request)
        if shared > 0:
            event = structs.replace(event, need_blocks=need_blocks - shared)
            if is_let_in(self._handle(event, now)):
                return True
        self._last_rejected = rejected
        return False

    def _promised_blocks(self) -> int:
        """Return how many blocks admitted requests still need for the uncomputed part of their prompts."""
        promised = 0
        for request in (*self._scheduler.running, *self._admitted_loading()):
            if request.num_computed_tokens < request.num_tokens - 1:
                held = sum(map(len, self._groups.used_by(request)))
                promised += max(0, self._groups.blocks_of(request.num_tokens) - held)
        return promised

    def _admitted_loading(self) -> list[Request]:
        """Return the admitted requests that wait until a connector has loaded KV into their blocks."""
        in_flight = self._scheduler._inflight_prefills
        return [request for request in in_flight if request.status != RequestStatus.RUNNING]

    def _shared_blocks(self, request: Request) -> int:
        """Return how many cached blocks of the request's prompt are used by other requests or pinned by
        leases. The number may be up to ``SHARED_LOOKUP_EVERY_STEPS`` steps old."""
        known = self._shared.get(request.request_id)
        if known is None or self._steps - known[0] >= SHARED_LOOKUP_EVERY_STEPS:
            hits = self._scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks
            known = self._shared[request.request_id] = (self._steps, self._groups.count_in_use(hits))
        return known[1]


def max_new_tokens(request: Request, max_model_len: int) -> int:
    """Return the maximum number of tokens that the request may still generate, at least 1."""
    allowed = request.max_tokens - request.num_output_tokens
    return int(max(1, min(allowed, max_model_len - request.num_tokens)))
