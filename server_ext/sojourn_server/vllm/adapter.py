"""Between vLLM's scheduler and the steward: translate facts, carry out orders, report. No rule lives here."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from ..engine.facts import Action, ActionKind, Admission, Arrival, TurnEnd, TurnOutcome
from ..engine.identity import read_identity
from ..engine.service import Service
from ..engine.steward import Histories, Pool, Steward, Ticket
from ..metrics.ledger import Lost, Tombstone
from ..policy.views import OwnerView, RoomNeed, VictimView
from ..program.history import ToolHistory, TurnHistory
from ..program.status import OVER
from .free_queue import Owner, ProgramFreeQueue
from .held_blocks import HeldBlocks, chain_hash
from .outputs import ToolCallReader
from .settings import Settings
from .waiting_queue import Key, PolicyQueue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.sojourn")

SAVE_EVERY_S = 300.0

EASILY_COUNTED = 20_000
"""Pools of fewer blocks are counted each time somebody asks: at most 2 ms."""

COUNTING_S_PER_BLOCK = 40e-6
"""Blocks of larger pools are counted anew no sooner than this times their number: 0.2 % of the time."""

_OUTCOMES = {
    RequestStatus.FINISHED_STOPPED: TurnOutcome.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: TurnOutcome.LENGTH,
    RequestStatus.FINISHED_ABORTED: TurnOutcome.ABORTED,
}


class SchedulerAdapter:
    """Everything sojourn adds to one engine's scheduler."""

    def __init__(
        self, scheduler: Scheduler, settings: Settings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._clock = clock
        self.failures = 0
        """Errors of ours that were swallowed so that the engine could go on."""
        manager = scheduler.kv_cache_manager
        self._pool = manager.block_pool
        preset = settings.preset()
        profile = settings.profile()
        self.steward = Steward(
            preset,
            Pool(
                blocks=self._pool.num_gpu_blocks - 1,
                block_size=scheduler.block_size,
                block_bytes=_block_bytes(scheduler),
            ),
            limits=settings.limits(),
            curve=profile.prefill if profile is not None else None,
            histories=_load_histories(settings.history_file),
        )
        # Tests want a wrong metric to fail loudly; an engine only wants it counted.
        self.steward.recorder.strict = settings.strict
        self.service = Service(
            self.steward,
            engine={"vllm": _vllm_version(), "block_size": str(scheduler.block_size)},
            pool_state=self.pool_state,
        )
        self._reader = ToolCallReader(scheduler.vllm_config.model_config)
        self._queue = ProgramFreeQueue(
            self._pool.free_block_queue,
            evicted=self._evicted,
            score=self._owner_score if preset.eviction.by_program else None,
        )
        self._pool.free_block_queue = self._queue
        self._held = HeldBlocks(self._pool, self._queue)
        scheduler.waiting = PolicyQueue(self._queue_key)
        scheduler.kv_holding_waiting = PolicyQueue(self._queue_key)
        self._user_priority = scheduler.policy == SchedulingPolicy.PRIORITY
        # Upstream lets only its priority branch preempt a request anywhere in the running list.
        scheduler.policy = SchedulingPolicy.PRIORITY
        self._chosen_victim: tuple[Request, int] | None = None
        self._allocate = manager.allocate_slots
        manager.allocate_slots = self._allocate_with_leases(self._allocate)
        self._allocating: Request | None = None
        self._scheduled_at: float | None = None
        self._saved_at = clock()
        self._pool_state: dict[str, int] | None = None
        self._pool_state_at = 0.0
        logger.info(
            "sojourn: policy %s on %s, %d blocks of %d tokens",
            preset.name, type(scheduler).__name__, self.steward.pool.blocks, self.steward.pool.block_size,
        )  # fmt: skip

    # -- facts ------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Before the scheduler files a new request."""
        now = self._clock()
        params = request.sampling_params
        identity = read_identity(
            getattr(request, "session_id", None), params.extra_args if params is not None else None
        )
        self.service.desk.riding_along(identity, now)
        self.steward.arrived(
            Arrival(
                request_id=request.request_id, identity=identity, prompt_tokens=request.num_prompt_tokens
            ),
            now,
        )
        self._carry_out(now)

    def before_step(self) -> None:
        """Before the scheduler plans a step."""
        self._restore_victim()
        now = self._clock()
        self.steward.tick(now)
        if self.steward.actions:
            self._carry_out(now)

    def after_step(self, output: SchedulerOutput) -> None:
        """After the scheduler planned a step."""
        self._restore_victim()
        now = self._scheduled_at = self._clock()
        if output.scheduled_new_reqs:
            for new in output.scheduled_new_reqs:
                self._admitted(new.req_id, new.num_computed_tokens, now)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._admitted(request_id, computed, now)
        if self.steward.actions:
            self._carry_out(now)

    def before_results(self, output: SchedulerOutput) -> None:
        """Before the scheduler takes in a step's results: how long the step took is known now."""
        if self._scheduled_at is not None:
            self.steward.reload.observe_step(
                output.total_num_scheduled_tokens, self._clock() - self._scheduled_at
            )
            self._scheduled_at = None

    def after_results(self) -> None:
        """After the scheduler took in a step's results."""
        if not self.steward.has_unstarted():
            return
        now = self._clock()
        for request_id in self.steward.unstarted():
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.num_output_tokens:
                self.steward.first_token(request_id, now)

    def finished(self, request: Request) -> None:
        """Before a finished request's blocks are freed: hold them where the steward says so."""
        ticket = self.steward.tickets.get(request.request_id)
        if ticket is None:
            return
        now = self._clock()
        if ticket.program is None:
            self.steward.tickets.pop(request.request_id)
            return
        outcome = _OUTCOMES.get(request.status, TurnOutcome.ERROR)
        calls = self._reader.read(request.output_token_ids) if outcome is TurnOutcome.STOPPED else ()
        cached = self._cached_blocks(request)
        self._queue.own(cached, ticket.program.id)
        lease = self.steward.finished(
            TurnEnd(
                request_id=request.request_id,
                outcome=outcome,
                tool_calls=calls,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                cached_blocks=len(cached),
                block_hashes=request.block_hashes,
            ),
            now,
        )
        self._carry_out(now)
        if lease is not None:
            self._held.hold(lease.program_id, cached)
        self._took("retention", now)

    def preempted(self, request: Request) -> None:
        """Before a running request is preempted."""
        self._restore_victim()
        ticket = self.steward.tickets.get(request.request_id)
        if ticket is not None and ticket.program is not None:
            self._queue.own(self._cached_blocks(request), ticket.program.id)
        self.steward.preempted(request.request_id, self._clock())

    def cache_reset(self) -> None:
        """Before the prefix cache is cleared: nothing may be held."""
        now = self._clock()
        self.steward.cache_reset(now)
        self._carry_out(now)

    def call(self, operation: str, payload: str) -> str:
        """One operation asked for over HTTP, between two steps."""
        now = self._clock()
        self.steward.tick(now)
        self._carry_out(now)
        answer = self.service.call(operation, payload, now)
        self._carry_out(now)
        if operation == "events":
            self._took("event", now)
        self._save_now_and_then(now)
        return answer

    def shutdown(self) -> None:
        """The engine stops: save what was learned."""
        self._save_history()

    # -- room -------------------------------------------------------------------

    def _allocate_with_leases(self, original: Callable[..., Any]) -> Callable[..., KVCacheBlocks | None]:
        """Stand in for the KV manager's ``allocate_slots``: leases give way before anybody waits in vain.

        A closure, since it is called for every running request in every step.
        """

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
            self._allocating = request
            blocks: KVCacheBlocks | None = original(request, *args, **kwargs)
            if blocks is None:
                blocks = self.guarded(self._after_shortage, request, args, kwargs)
            return blocks

        return allocate_slots

    def _after_shortage(
        self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KVCacheBlocks | None:
        running = request.status == RequestStatus.RUNNING
        ticket = self.steward.tickets.get(request.request_id)
        blocks: KVCacheBlocks | None = None
        while blocks is None and len(self.steward.leases):
            now = self._clock()
            need = RoomNeed(
                program_id=ticket.program.id if ticket and ticket.program else None,
                program_rank=ticket.rank if ticket else sys.maxsize,
                blocks=self._short(request, args, kwargs, running),
                running=running,
                anything_running=bool(self._scheduler.running),
            )
            if not self.steward.make_room(need, now):
                break
            self._carry_out(now)
            blocks = self._allocate(request, *args, **kwargs)
        if blocks is None and running:
            self._choose_victim(request)
        return blocks

    def _short(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool) -> int:
        """Blocks missing, from above: what may turn out to be shared counts as needed."""
        block_size = self._scheduler.block_size
        if running:
            new_tokens = args[0] if args else kwargs.get("num_new_tokens", 1)
            needed = -(-new_tokens // block_size) + 1
        else:
            needed = -(-(request.num_tokens + 1) // block_size)
            hits = kwargs.get("new_computed_blocks")
            if hits is not None and hits.blocks:
                needed -= sum(1 for block in hits.blocks[0] if block.ref_cnt > 0)
            needed += getattr(self._scheduler.kv_cache_manager, "watermark_blocks", 0)
        return max(1, needed - self._pool.get_num_free_blocks())

    def _choose_victim(self, request: Request) -> None:
        """Make upstream's priority branch pick the request that the policy names.

        Where it names none, the engine's own first-come choice is made: the last admitted.
        """
        running = self._scheduler.running
        least = max(candidate.priority for candidate in running) if self._user_priority else None
        candidates = [
            (position, candidate)
            for position, candidate in enumerate(running)
            if least is None or candidate.priority == least
        ]
        views = []
        for position, candidate in candidates:
            ticket = self.steward.tickets.get(candidate.request_id)
            blocks = self._scheduler.kv_cache_manager.get_blocks(candidate.request_id).blocks
            views.append(
                VictimView(
                    candidate.request_id,
                    ticket.rank if ticket else sys.maxsize,
                    position,
                    sum(len(group) for group in blocks),
                )
            )
        chosen = self.steward.victim(views, 1, self._clock())
        victim = next((c for _, c in candidates if c.request_id == chosen), candidates[-1][1])
        self._restore_victim()
        self._chosen_victim = (victim, victim.priority)
        victim.priority = sys.maxsize

    def _restore_victim(self) -> None:
        if self._chosen_victim is not None:
            victim, priority = self._chosen_victim
            victim.priority = priority
            self._chosen_victim = None

    # -- orders -----------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        while self.steward.actions:
            for action in self.steward.take_actions():
                self._carry_out_one(action, now)

    def _carry_out_one(self, action: Action, now: float) -> None:
        program_id = action.program_id
        if action.kind is ActionKind.DROP:
            self._held.drop(program_id)
        elif action.kind is ActionKind.RELEASE:
            self._held.release(program_id)
        elif action.kind is ActionKind.PIN_CACHED:
            hashes = self.steward.contexts.get(program_id)
            blocks = self._held.still_cached(hashes) if hashes is not None else []
            if self.steward.pinned(program_id, len(blocks), now) is not None:
                self._held.hold(program_id, blocks)
        self._queue.rescore(program_id)
        program = self.steward.table.get(program_id)
        if program is not None:
            for request_id in program.live_requests:
                request = self._scheduler.requests.get(request_id)
                if request is not None:
                    self._scheduler.waiting.rekey(request)

    # -- state ------------------------------------------------------------------

    def pool_state(self) -> dict[str, int]:
        """Blocks by state. In use and cached are told apart: cached blocks are free to be reused."""
        now = self._clock()
        blocks = self._pool.num_gpu_blocks
        age_s = now - self._pool_state_at
        if self._pool_state is None or blocks < EASILY_COUNTED or age_s >= blocks * COUNTING_S_PER_BLOCK:
            self._pool_state, self._pool_state_at = self._count_blocks(), now
        return self._pool_state

    def _count_blocks(self) -> dict[str, int]:
        pool = self._pool
        total = pool.num_gpu_blocks - 1
        available = pool.get_num_free_blocks()
        cached_and_free = 0
        if available:
            cached_and_free = sum(
                1 for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0
            )
        leased = self._held.blocks()
        return {
            "total": total,
            "running": total - available - leased,
            "leased": leased,
            "cached": cached_and_free,
            "free": available - cached_and_free,
        }

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run one hook; our failure is counted and logged, never the engine's (unless ``strict``)."""
        try:
            return call(*args)
        except Exception:
            if self._settings.strict:
                raise
            self.failures += 1
            if self.failures <= 10 or self.failures % 1000 == 0:
                logger.exception("sojourn: a hook failed (%d so far); the engine goes on", self.failures)
            return None

    # -- inside -----------------------------------------------------------------

    def _took(self, hook: str, since: float) -> None:
        self.steward.recorder.observe("sojourn_policy_seconds", self._clock() - since, hook=hook)

    def _admitted(self, request_id: str, computed: int, now: float) -> None:
        ticket = self.steward.tickets.get(request_id)
        request = self._scheduler.requests.get(request_id)
        if ticket is None or request is None:
            return
        self.steward.admitted(
            Admission(
                request_id=request_id,
                cached_tokens=computed,
                tokens=request.num_tokens,
                block_hashes=request.block_hashes,
                resumed=ticket.admitted,
            ),
            now,
        )

    def _cached_blocks(self, request: Request) -> list[KVCacheBlock]:
        groups = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return [b for group in groups for b in group if b.block_hash is not None and not b.is_null]

    def _queue_key(self, request: Request) -> Key:
        ticket = self.steward.tickets.get(request.request_id)
        if ticket is None:  # a request we failed to take in: in line by its arrival, behind nobody of ours
            key: Key = (request.status != RequestStatus.PREEMPTED, 0.0)
        else:
            ticket.preempted = request.status == RequestStatus.PREEMPTED
            key = self.steward.preset.order.key(self.steward.waiting_view(ticket))
        return (request.priority, *key) if self._user_priority else key

    def _owner_score(self, program_id: ProgramId) -> tuple[float, ...]:
        program = self.steward.table.get(program_id)
        if program is None:
            return (float("-inf"),)
        view = OwnerView(program.rank, program.status in OVER, program.turn_over_s or program.last_contact_s)
        return self.steward.preset.eviction.score(view)

    def _evicted(self, block: KVCacheBlock, owner: Owner) -> None:
        taker = self.steward.tickets.get(self._allocating.request_id) if self._allocating else None
        evictor = taker.program.id if taker is not None and taker.program is not None else None
        name = owner if isinstance(owner, str) else None
        recorder = self.steward.recorder
        recorder.count("sojourn_evictions_total", tier="device", cause="evicted")
        recorder.count(
            "sojourn_evicted_bytes_total", self.steward.pool.block_bytes, tier="device", cause="evicted"
        )
        self.steward.graveyard.bury(
            chain_hash(block), Tombstone(Lost.EVICTED, name, evictor, self._scheduled_at or 0.0)
        )

    def _save_now_and_then(self, now: float) -> None:
        if self._settings.history_file is None or now - self._saved_at < SAVE_EVERY_S:
            return
        self._saved_at = now
        document = self._history_document()
        threading.Thread(target=_write, args=(self._settings.history_file, document), daemon=True).start()

    def _save_history(self) -> None:
        if self._settings.history_file is not None:
            _write(self._settings.history_file, self._history_document())

    def _history_document(self) -> dict[str, Any]:
        histories = self.steward.histories
        return {"tools": histories.tools.snapshot(), "turns": histories.turns.snapshot()}


def ticket_of(adapter: SchedulerAdapter, request: Request) -> Ticket | None:
    """What the steward keeps of a request; for tests and tools."""
    return adapter.steward.tickets.get(request.request_id)


def _load_histories(path: str | None) -> Histories:
    if path is None or not Path(path).exists():
        return Histories()
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        return Histories(
            tools=ToolHistory.restore(document["tools"]), turns=TurnHistory.restore(document["turns"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        kept = f"{path}.unreadable"
        os.replace(path, kept)
        logger.warning(
            "sojourn: history %s cannot be used (%s); kept as %s, starting cold", path, error, kept
        )
        return Histories()


def _write(path: str, document: dict[str, Any]) -> None:
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        logger.warning("sojourn: history %s not saved: %s", path, error)


def _block_bytes(scheduler: Scheduler) -> int:
    config = scheduler.kv_cache_config
    tensors = getattr(config, "kv_cache_tensors", None) or []
    blocks = max(1, config.num_blocks)
    return sum(tensor.size for tensor in tensors) // blocks


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
