"""Between vLLM's scheduler and the steward: translate facts, carry out orders, report. No rule lives here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ..engine.facts import Action, ActionKind, Admission, Arrival, TurnEnd, TurnOutcome
from ..engine.identity import read_identity
from ..engine.service import Service
from ..engine.state import Pool
from ..policy.recovery import Recovery
from ..program.record import Program
from .below import Below
from .block_order import BlockOrder
from .block_owners import Owner
from .bucket_order import Score
from .connector import SojournConnector
from .engine_facts import (
    below_device,
    block_bytes,
    blocks_below,
    described,
    host_s_per_token,
    member_of_pair,
)
from .held_blocks import HeldBlocks, built_upon, chain_hash
from .hidden_rows import HiddenRows
from .history_file import HistoryFile
from .length_guesses import LengthGuesses, are_read
from .outlook import Outlook, most_tokens
from .outputs import ToolCallReader
from .pool_count import PoolCount
from .settings import Settings, check_scheduling
from .shortage import Shortage
from .steward_of import steward_of
from .waiting_line import WaitingLine

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.sojourn")

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
        parallel = scheduler.vllm_config.parallel_config
        rank = parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None
        self._history = HistoryFile(settings.history_file, clock(), rank=rank)
        preset = settings.preset()
        host_blocks, disk_blocks = blocks_below(scheduler)
        self.steward, desk = steward_of(
            settings,
            preset,
            Pool(
                blocks=self._pool.num_gpu_blocks - 1,
                block_size=scheduler.block_size,
                block_bytes=block_bytes(scheduler),
                max_context_tokens=scheduler.max_model_len,
                dropped_hit_blocks=int(getattr(scheduler, "use_eagle_block_drop", False)),
                step_tokens=scheduler.max_num_scheduled_tokens,
                host_s_per_token=host_s_per_token(scheduler, settings.profile()),
                host_blocks=host_blocks,
                disk_blocks=disk_blocks,
            ),
            self._history.load(),
            rank,
        )
        # Tests want a wrong metric to fail loudly; an engine only wants it counted.
        self.steward.recorder.strict = settings.strict
        self.service = Service(
            self.steward,
            engine=described(scheduler),
            pool_state=self.pool_state,
            desk=desk,
            tier_state=lambda: self._below.state() if self._below is not None else {},
            below_device=lambda: below_device(scheduler),
            network_state=lambda: self._guesses.state() if self._guesses is not None else None,
            persist=self._persist,
            paths=member_of_pair(scheduler),
        )
        self.reader = ToolCallReader(scheduler.vllm_config.model_config)
        connector = scheduler.connector
        self._below: Below | None = None
        """The tiers below the device, where they are ours."""
        if isinstance(connector, SojournConnector):
            connector.clock, connector.strict = clock, settings.strict
            self._below = Below(connector, self.steward)
        self._order = BlockOrder(
            self.steward,
            self._pool.free_block_queue,
            evicted=self._guarded_evicted,
            failed=self._lost_order,
            leaving=self._below.save if self._below is not None else None,
            guarded=self.guarded,
        )
        self._queue = self._pool.free_block_queue = self._order.queue
        self._held = HeldBlocks(self._pool, self._queue)
        self._count = PoolCount(self._pool, self._held, clock)
        check_scheduling(preset, scheduler.policy.value)
        self._line = WaitingLine(scheduler, self.steward, clock=clock, guarded=self.guarded)
        self._outlook = Outlook(scheduler, self.steward, self._below)
        self._shortage = Shortage(
            scheduler,
            self.steward,
            clock=clock,
            carry_out=self._carry_out,
            guarded=self.guarded,
            freed_by=self._held.freed_by,
            outlook=self._outlook,
        )
        self._guesses: LengthGuesses | None = None
        """Where the preset reads hidden states, and the workers let them out."""
        if preset.remaining.reads_states and are_read(scheduler.vllm_config):
            self._guesses = LengthGuesses(scheduler, self.steward, settings.network_file, rank)
        self._scheduled_at: float | None = None
        logger.info(
            "sojourn: policy %s on %s, %d blocks of %d tokens",
            preset.name, type(scheduler).__name__, self.steward.pool.blocks, self.steward.pool.block_size,
        )  # fmt: skip

    # -- facts ------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Before the scheduler files a new request."""
        now = self._clock()
        try:
            self._take_in(request, now)
        finally:
            if request.request_id not in self.steward.tickets:
                self.steward.stranger(request.request_id, now)

    def _take_in(self, request: Request, now: float) -> None:
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
        try:
            self._open_step()
        finally:
            # Whatever failed: after a step with ample memory nobody's lease would give way any more.
            self._shortage.prepare_step()

    def _open_step(self) -> None:
        self._line.open_step()
        self._shortage.restore_victim()
        now = self._clock()
        self.steward.tick(now)
        if self.steward.actions:
            self._carry_out(now)
        self._line.promote(now)
        self._order.before_step()
        # Each by itself: a forecast that fails shall not keep the others from what they do.
        if self._guesses is not None:
            self.guarded(self._guesses.tell, now)
        self.guarded(self._outlook.before_step, now)
        if self._below is not None:
            self._below.store_ahead(self._queue)

    def after_step(self, output: SchedulerOutput) -> None:
        """After the scheduler planned a step."""
        self._shortage.restore_victim()
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
        self._order.after_step()

    def before_results(self, output: SchedulerOutput, waited_s: float = 0.0) -> None:
        """Before the scheduler takes in a step's results: how long the step took is known now, of which it
        ``waited_s`` for copies."""
        if self._scheduled_at is not None:
            # What computing costs is compared with what copying does: the one must not count in the other.
            took_s = max(0.0, self._clock() - self._scheduled_at - waited_s)
            self.steward.step_took(
                output.total_num_scheduled_tokens, took_s, len(output.num_scheduled_tokens)
            )
            self._scheduled_at = None

    def hidden_states(self, rows: HiddenRows, planned: SchedulerOutput) -> None:
        """Before the scheduler takes in a step's results: what came with them from the worker."""
        if self._guesses is not None:
            self._guesses.took(rows, planned)

    def refused(self) -> list[str]:
        """After the scheduler took in a step's results: requests that have been kept out for too long."""
        return self.steward.take_refused() if self.steward.refused else []

    def refuse(self, request_id: str, tell: Callable[[Request], None]) -> None:
        """End such a request with an error; ``tell`` tells its client."""
        request = self._scheduler.requests.get(request_id)
        if request is None or not self._line.is_parked(request):
            return
        logger.error(
            "sojourn: request %s is refused: for %g s (gate_timeout_s) there was no place on the device for "
            "its program",
            request_id, self.steward.limits.gate_timeout_s,
        )  # fmt: skip
        # Before its client is told, whose API server then asks why.
        self.service.refusals.note(request_id, self.steward.limits.gate_timeout_s)
        try:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        finally:
            tell(request)

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
        self._line.left(request.request_id)
        if self._guesses is not None:
            self._guesses.ended(request)
        ticket = self.steward.tickets.get(request.request_id)
        program = ticket.program if ticket is not None else None
        if self._below is not None:
            self._no_longer_away(request, program, self._below)
        if ticket is None:
            return
        now = self._clock()
        if ticket.program is None:
            self.steward.stranger_left(request.request_id)
            return
        if self._below is not None and not ticket.admitted:
            self._below.arrived(ticket.program.id, ())
        outcome = _OUTCOMES.get(request.status, TurnOutcome.ERROR)
        calls = ()
        if outcome is TurnOutcome.STOPPED:
            # By itself: an output that cannot be decoded must not keep its turn from ending.
            calls = self.guarded(self.reader.read, request.output_token_ids) or ()
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
                held_blocks=self._held.blocks(),
                unheld_blocks=self._held.unheld(cached),
                used_blocks=self._count.used_blocks(),
            ),
            now,
        )
        self._carry_out(now)
        if lease is not None:
            self._held.hold(lease.program_id, cached)
        if self._below is not None and outcome in (TurnOutcome.STOPPED, TurnOutcome.LENGTH):
            self._below.turn_over(ticket.program.id, cached)
        self._took("retention", now)

    def preempted(self, request: Request) -> None:
        """Before a running request is preempted."""
        self._shortage.restore_victim()
        self._unname_uncomputed(request)
        ticket = self.steward.tickets.get(request.request_id)
        cached = self._cached_blocks(request)
        if ticket is not None and ticket.program is not None:
            self._queue.own(cached, ticket.program.id)
        # Behind one that has no name nothing is found again.
        in_a_row = self._cached_blocks(request, in_a_row=True)
        copied = self._below.copied(in_a_row) if self._below is not None else 0
        out_s, back_s, queued_s = (
            self._below.link(len(in_a_row) - copied) if self._below is not None else (None, None, 0.0)
        )
        recovery = self.steward.preempted(
            request.request_id,
            self._clock(),
            tokens=request.num_computed_tokens,
            copied_tokens=copied * self._scheduler.block_size,
            out_s_per_token=out_s,
            back_s_per_token=back_s,
            queued_s=queued_s,
        )
        if self._below is None:
            return
        if recovery is Recovery.RECOMPUTE:
            program = ticket.program if ticket is not None else None
            self._below.not_to_save(cached, program.id if program is not None else None, self._queue.owners)
        elif ticket is not None and ticket.program is not None and self.steward.prospects.predicts:
            self._below.to_keep(ticket.program.id, in_a_row)

    def _unname_uncomputed(self, request: Request) -> None:
        """The engine names blocks by what they will hold when it plans the step that computes them. A victim
        that was planned already is not computed: its blocks must not be found by that name."""
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        computed = request.num_computed_tokens // self._scheduler.block_size
        self._pool.evict_blocks(set(block_ids[computed:]))

    def not_filled(self, block_ids: set[int]) -> None:
        """Before the scheduler hears that blocks were not filled: neither they nor what was computed upon
        them may be found again."""
        manager = self._scheduler.kv_cache_manager
        chains: list[Sequence[int]] = [
            manager.get_block_ids(request.request_id)[0] for request in self._scheduler.running
        ]
        if self._below is not None:
            chains += self._below.loading()
        spoilt = built_upon(chains, block_ids)
        if self._below is not None:
            self._below.discard([self._pool.blocks[block_id] for block_id in spoilt])
        self._pool.evict_blocks(spoilt)

    def cache_reset(self) -> None:
        """Before the prefix cache is cleared: nothing may be held."""
        now = self._clock()
        self.steward.cache_reset(now)
        self._carry_out(now)

    def cache_was_reset(self) -> None:
        """After the prefix cache was cleared: no block belongs to anybody any more."""
        self._queue.forget_all()
        if self._below is not None:  # by default vLLM clears what is on the device only
            self._below.reset()

    def call(self, operation: str, payload: str) -> str:
        """One operation asked for over HTTP, between two steps."""
        now = self._clock()
        self.steward.tick(now)
        self._carry_out(now)
        answer = self.service.call(operation, payload, now)
        self._carry_out(now)
        if operation == "events":
            self._took("event", now)
        self._history.save_if_due(self.steward.histories, now)
        return answer

    def shutdown(self) -> None:
        """The engine stops: save what was learned."""
        try:
            self._history.save(self.steward.histories)
        finally:
            self.steward.close_tape("the engine stopped")
            if self._guesses is not None:
                self._guesses.stop()

    # -- orders -----------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        while self.steward.actions:
            for action in self.steward.take_actions():
                # Each by itself: one that fails must not lose the others, whose leases are gone already.
                self.guarded(self._carry_out_one, action, now)

    def _carry_out_one(self, action: Action, now: float) -> None:
        program_id = action.program_id
        if action.kind is ActionKind.DROP:
            if self._below is not None:
                self._below.over(program_id, self._queue.owners)
            self._held.drop(program_id)
        elif action.kind is ActionKind.RELEASE:
            self._held.release(program_id)
        elif action.kind is ActionKind.PIN_CACHED:
            hashes = self.steward.contexts.get(program_id)
            blocks = self._held.still_cached(hashes) if hashes is not None else []
            lease = self.steward.pinned(
                program_id,
                len(blocks),
                now,
                held_blocks=self._held.blocks(),
                unheld_blocks=self._held.unheld(blocks),
                used_blocks=self._count.used_blocks(),
            )
            if lease is not None:
                self._held.hold(program_id, blocks)
        elif action.kind is ActionKind.PREFETCH:
            hashes = self.steward.contexts.get(program_id) or ()
            keys = hashes[len(self._held.still_cached(hashes)) :]
            coming, nowhere = self._below.fetch(keys) if self._below is not None else (0, len(keys))
            self.steward.prefetched(program_id, len(keys), now, coming_blocks=coming, lost_blocks=nowhere)
            return
        elif action.kind is ActionKind.PLACE and self._below is not None and action.tier is not None:
            self._below.place(program_id, action.tier, self._held)
        program = self.steward.table.get(program_id)
        if program is not None:
            for request_id in program.live_requests:
                request = self._scheduler.requests.get(request_id)
                if request is not None:
                    self._line.rekey(request)

    # -- state ------------------------------------------------------------------

    def pool_state(self) -> dict[str, int]:
        """Blocks by state. In use and cached are told apart: cached blocks are free to be reused."""
        return self._count.by_state()

    def _persist(self, hashes: Sequence[Any]) -> dict[str, Any]:
        if self._below is None:
            return {"reason": "nothing of ours is below this engine's device"}
        return self._below.persist(hashes, self._held)

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run one hook; our failure is counted and logged, never the engine's (unless ``strict``)."""
        try:
            return call(*args)
        except Exception as error:
            self._failed(error, "a hook failed")
            return None

    def _failed(self, error: Exception, what: str) -> None:
        if self._settings.strict:
            raise error
        self.failures += 1
        if self.failures <= 10 or self.failures % 1000 == 0:
            logger.error("sojourn: %s (%d so far); the engine goes on", what, self.failures, exc_info=error)

    # -- inside -----------------------------------------------------------------

    def _took(self, hook: str, since: float) -> None:
        self.steward.recorder.observe("sojourn_policy_seconds", self._clock() - since, hook=hook)

    def _admitted(self, request_id: str, computed: int, now: float) -> None:
        below = self._below.loaded_tokens(request_id) if self._below is not None else 0
        ticket = self.steward.tickets.get(request_id)
        request = self._scheduler.requests.get(request_id)
        if ticket is None or request is None:
            return
        if self._below is not None:
            self._no_longer_away(request, ticket.program, self._below)
            if ticket.program is not None:
                self._below.arrived(ticket.program.id, request.block_hashes)
        self.steward.admitted(
            Admission(
                request_id=request_id,
                cached_tokens=computed,
                host_tokens=below,
                tokens=request.num_tokens,
                block_hashes=request.block_hashes,
                resumed=ticket.admitted,
                most_tokens=most_tokens(request, self._scheduler.max_model_len),
            ),
            now,
        )

    def _cached_blocks(self, request: Request, *, in_a_row: bool = False) -> list[KVCacheBlock]:
        """Those of its blocks that have a name; ``in_a_row``: up to the first that has none."""
        groups = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        choose = takewhile if in_a_row else filter
        return [block for group in groups for block in choose(_is_named, group)]

    def _no_longer_away(self, request: Request, program: Program | None, below: Below) -> None:
        """A request was admitted, or has left the engine. A stranger may have been preempted too."""
        if request.block_hashes:  # else it had nothing to be kept
            below.no_longer_away(program.id if program is not None else None, request.block_hashes)
        if program is not None and request.is_finished() and program.live_requests <= {request.request_id}:
            below.no_longer_away(program.id, ())  # nobody of it is left who could come back

    def _guarded_evicted(self, block: KVCacheBlock, owner: Owner, score: Score | None) -> None:
        # The block has left the queue already: a failure here would lose it.
        self.guarded(self._evicted, block, owner, score)

    def _lost_order(self, error: Exception) -> None:
        if self._below is not None:
            self._below.turn_off("the free queue no longer tells what is reused")
        self._failed(error, "the order of reuse failed and is vLLM's own from now on")

    def _evicted(self, block: KVCacheBlock, owner: Owner, score: Score | None) -> None:
        allocating = self._shortage.allocating
        self.steward.evicted(
            chain_hash(block),
            owner if isinstance(owner, str) else None,
            allocating.request_id if allocating is not None else None,
            self._scheduled_at or self._clock(),
            score,
        )


def _is_named(block: KVCacheBlock) -> bool:
    return block.block_hash is not None and not block.is_null
