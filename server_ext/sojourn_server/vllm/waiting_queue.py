"""vLLM's waiting queue in a policy's order, with admission control in front of it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from ..core.events_and_actions import AdmissionRequested, EventHandler, RequestChosen, answer_of
from ..core.program_scheduler import ProgramScheduler
from ..core.request_table import QueuePlace, QueueState
from .compat import Request, RequestQueue, RequestStatus, SchedulingPolicy
from .engine_description import is_one_of_a_pair
from .kv_cache_groups import KVCacheGroups
from .pair_connector import PairConnector

if TYPE_CHECKING:
    from .compat import Scheduler
    from .kv_offload_connector import SojournConnector

SHARED_LOOKUP_EVERY_STEPS = 16
"""Steps between two look-ups of the blocks that a request waiting for admission could share."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One engine's scheduler, the ``ProgramScheduler``, and the adapter's ways to both, for its parts."""

    scheduler: Scheduler
    program_scheduler: ProgramScheduler
    groups: KVCacheGroups
    clock: Callable[[], float]
    handle: EventHandler
    carry_out: Callable[[float], None]
    guarded: Callable[..., Any]


class _Entry(NamedTuple):
    """A request in the queue. Entries are compared by key, then by number."""

    key: tuple[Any, ...]
    number: int
    request: Request
    place: QueuePlace


class PolicyRequestQueue(RequestQueue):
    """vLLM's waiting queue, sorted by the key of each request's ``QueuePlace``, lowest first.

    A parked request is held back until ``rekey`` finds it in another state. The first gated request is
    admitted if ``owner.may_be_admitted``. If not, all gated requests wait until the next step, and the queue
    returns only open requests. A rejected request that ``blocks_queue`` stops all requests behind it.

    ``bool`` is true if ``peek_request`` would return a request now. ``len`` counts all requests, so that the
    engine knows that it has work left.

    vLLM's scheduler peeks, may change keys, and then calls ``pop_request``. It must get the request that it
    has peeked, so ``rekey`` does not change the peeked request.
    """

    def __init__(self, owner: WaitingQueueAdapter, *, holds_kv: bool = False) -> None:
        """``owner`` does not raise. ``holds_kv``: its requests hold blocks, and it is only sorted."""
        self._owner = owner
        self._holds_kv = holds_kv
        # A sorted list: an insertion moves pointers only, and a scan in order finds every answer.
        self.entries: list[_Entry] = []
        self._entry_of: dict[Request, _Entry] = {}
        self.parked: dict[Request, None] = {}
        self.changes_s = math.inf
        """Time before which no request's place changes by its wait."""
        self._pushes = 0
        self.admission_closed = False
        """Whether the gated requests wait until the next step."""
        self.step_closed = False
        """Whether vLLM takes no further request in this step."""
        self.peeked: Request | None = None

    def promote(self, now: float) -> None:
        for entry in tuple(self.entries):
            # A preempted request is overdue at once when another becomes so.
            if entry.place.changes_s <= now or entry.request.status == RequestStatus.PREEMPTED:
                self.rekey(entry.request)
        self.changes_s = min((entry.place.changes_s for entry in self.entries), default=math.inf)

    def add_request(self, request: Request) -> None:
        if request in self:
            self.remove_request(request)
        self.peeked = None
        place = self._owner.place(request)
        if place.state is QueueState.PARKED and not self._holds_kv:
            self.parked[request] = None
            return
        self._pushes += 1
        entry = self._entry_of[request] = _Entry(place.key, self._pushes, request, place)
        insort(self.entries, entry)
        self.changes_s = min(self.changes_s, place.changes_s)

    def prepend_request(self, request: Request) -> None:
        """Add the request by its key. A preempted request's key puts it first."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        if self.peeked is None:
            self.peeked = self._first()
            if self.peeked is None:
                raise IndexError("peek from a queue without a request to admit")
        return self.peeked

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        entry = self._entry_of.pop(request, None)
        if entry is not None:
            del self.entries[bisect_left(self.entries, entry)]
        self.parked.pop(request, None)
        self.peeked = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def rekey(self, request: Request) -> None:
        """Move a request to the position of its present key and state, if it is in this queue."""
        if request in self:
            peeked = self.peeked
            self.add_request(request)
            self.peeked = peeked

    def __contains__(self, request: object) -> bool:
        return request in self._entry_of or request in self.parked

    def __bool__(self) -> bool:
        if self.step_closed or not self.entries:
            return False
        if self.peeked is None:
            self.peeked = self._first()
        return self.peeked is not None

    def __len__(self) -> int:
        return len(self.entries) + len(self.parked)

    def __iter__(self) -> Iterator[Request]:
        yield from [entry.request for entry in self.entries]
        yield from tuple(self.parked)

    def _first(self) -> Request | None:
        for _, _, request, place in self.entries:
            if place.state is QueueState.OPEN or self._holds_kv:
                return request
            if self.admission_closed:
                continue
            if self._owner.may_be_admitted(request):
                return request
            if self._owner.blocks_queue(request):
                return None
            self.admission_closed = True
        return None


class WaitingQueueAdapter:
    def __init__(self, context: EngineContext) -> None:
        self._scheduler = scheduler = context.scheduler
        self._program_scheduler = context.program_scheduler
        self._groups = context.groups
        self._handle, self._clock, self._guarded = context.handle, context.clock, context.guarded
        self._pool = scheduler.kv_cache_manager.block_pool
        self.in_pair = is_one_of_a_pair(scheduler)
        self._by_user_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        scheduler.waiting = self.queue = PolicyRequestQueue(self)
        scheduler.kv_holding_waiting = PolicyRequestQueue(self, holds_kv=True)
        self._steps = 0
        self._admission_paused_until = 0
        self._shared: dict[str, tuple[int, int]] = {}
        """Request that needs admission → (step of the last look-up, blocks of its prompt in use or
        pinned)."""
        self._last_rejected: tuple[str, int] | None = None
        """(Request that the admission policy rejected last, ``DemandForecaster.changes`` at that time)."""

    # -- the queue's questions ----------------------------------------------------

    def place(self, request: Request) -> QueuePlace:
        """Return the request's key and state. If sojourn fails or does not know it, it is by arrival, behind
        those whose key is known, or before them if it was preempted."""
        by_priority = self._by_user_priority
        # With user priorities, vLLM orders preempted requests by arrival too.
        preempted = request.status == RequestStatus.PREEMPTED and not by_priority
        place: QueuePlace | None = self._guarded(self._known_place, request.request_id, preempted)
        if place is None:
            place = QueuePlace((-1.0 if preempted else 2.0, request.arrival_time), QueueState.OPEN)
        if by_priority:
            # Admission by program would let an early program of low priority delay an important one.
            return place._replace(key=(request.priority, *place.key), state=QueueState.OPEN)
        # In a pair, the other engine works on the same request and waits for this one. Elsewhere a client's
        # ``kv_transfer_params`` must not let a request pass others.
        if self.in_pair and isinstance(request.kv_transfer_params, Mapping):
            return place._replace(state=QueueState.OPEN)
        return place

    def _known_place(self, request_id: str, preempted: bool) -> QueuePlace | None:
        known = self._program_scheduler.queue_place(request_id, preempted)
        if known is None:
            return None
        key = tuple(map(float, known.key))
        if any(map(math.isnan, key)):  # it does not compare with others
            raise ValueError(f"the queue order policy returned the key {known.key}; expected numbers")
        return known._replace(key=key)

    def may_be_admitted(self, request: Request) -> bool:
        """Whether the admission policy accepts the request, or its rejection no longer counts."""
        if self._guarded(self._accepts, request) is not False:
            return True
        return self._program_scheduler.passes_admission(request.request_id, self._clock())

    def blocks_queue(self, request: Request) -> bool:
        """Whether admission has rejected the request so long that later requests may not overtake it."""
        return self._program_scheduler.blocks_later_requests(request.request_id, self._clock())

    # -- steps --------------------------------------------------------------------

    def open_step(self, now: float) -> None:
        """Start a step: gated requests may be admitted, unless that is paused, and long waits change keys."""
        queue = self.queue
        queue.admission_closed, queue.peeked = False, None
        self._steps += 1
        queue.step_closed = self._steps <= self._admission_paused_until
        if now >= queue.changes_s:
            queue.promote(now)

    def left(self, request: Request) -> None:
        self._shared.pop(request.request_id, None)

    def loading(self) -> list[Request]:
        """Return the waiting requests that hold blocks for a KV load, which may have ended, in the queue's
        order, without those that vLLM has taken from the queue for the moment, and those that a transfer of
        a pair is filling."""
        connector = self._scheduler.connector
        is_filling = connector.planner.is_loading if isinstance(connector, PairConnector) else lambda _: False
        return [
            request
            for request in self._scheduler.kv_holding_waiting
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            and not is_filling(request.request_id)
        ]

    def give_up_load(self, request: Request, connector: SojournConnector) -> None:
        """Cancel a load of ``loading()``, free its blocks and queue it again, as vLLM preempts running
        ones."""
        scheduler = self._scheduler
        connector.planner.cancel_load(request.request_id)
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
        """Admit no further request in this step, as vLLM does after a preemption. After a load was cancelled,
        others must not get its blocks before the worker has answered. With asynchronous scheduling the answer
        comes one step later, so the pause also covers the next step."""
        self._admission_paused_until = self._steps + bool(self._scheduler.scheduler_config.async_scheduling)
        self.queue.step_closed = True

    def requeue_loading(self, connector: SojournConnector) -> None:
        """Cancel all loads before a cache reset, and queue unfinished requests again."""
        scheduler = self._scheduler
        for request in tuple(scheduler.requests.values()):
            # Aborted; vLLM would free its blocks after the load. Others may be held for a push.
            if request.is_finished() and connector.planner.is_loading(request.request_id):
                connector.planner.cancel_load(request.request_id)
                scheduler._free_blocks(request)
        for request in self.loading():
            self.give_up_load(request, connector)

    def _accepts(self, request: Request) -> bool:
        running = bool(self._scheduler.running or self._admitted_loading())
        policy = self._program_scheduler.preset.admission
        rejected = (request.request_id, self._program_scheduler.forecaster.changes)
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
        chosen = answer_of(self._handle(event, now), RequestChosen)
        if chosen is None and (shared := self._shared_blocks(request)) > 0:
            event = structs.replace(event, need_blocks=need_blocks - shared)
            chosen = answer_of(self._handle(event, now), RequestChosen)
        if chosen is None:
            self._last_rejected = rejected
        return chosen is not None

    def _promised_blocks(self) -> int:
        """Return how many blocks admitted requests still need for their prompts."""
        promised = 0
        for request in (*self._scheduler.running, *self._admitted_loading()):
            if request.num_computed_tokens < request.num_tokens - 1:
                held = sum(map(len, self._groups.used_by(request)))
                promised += max(0, self._groups.blocks_of(request.num_tokens) - held)
        return promised

    def _admitted_loading(self) -> list[Request]:
        """Return the admitted requests that wait for a connector's load."""
        in_flight = self._scheduler._inflight_prefills
        return [request for request in in_flight if request.status != RequestStatus.RUNNING]

    def _shared_blocks(self, request: Request) -> int:
        """Return how many cached blocks of its prompt others use or leases pin, as of the last look-up."""
        known = self._shared.get(request.request_id)
        if known is None or self._steps - known[0] >= SHARED_LOOKUP_EVERY_STEPS:
            hits = self._scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks
            known = self._shared[request.request_id] = (self._steps, self._groups.count_in_use(hits))
        return known[1]


def max_new_tokens(request: Request, max_model_len: int) -> int:
    allowed = request.max_tokens - request.num_output_tokens
    return int(max(1, min(allowed, max_model_len - request.num_tokens)))
