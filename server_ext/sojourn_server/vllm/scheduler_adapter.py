"""Adapter between vLLM's scheduler and the ``ProgramScheduler``: events in, actions out; no policy."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

from ..core import events_and_actions as ev
from ..core.engine_answers import TierCapabilities
from ..core.engine_service import EngineService, EngineView
from ..core.event_limits import EventTimeBudget
from ..core.request_hints import NO_IDENTITY, read_identity
from ..policies.preemption_policies import RecoveryMethod
from ..programs.tool_call_parsers import plan_items
from .allocation_fallback import AllocationFallback
from .compat import KVCacheBlock, PauseState, Request, RequestStatus, SchedulerOutput, get_block_hash
from .engine_description import connector_name, offload_description, pool_config, profile_description
from .free_block_queue import EvictionScorer, ProgramFreeBlockQueue, Score
from .hidden_state_capture import OUTPUT_ATTRIBUTE
from .history_file import HistoryFile
from .kv_cache_groups import KVCacheGroups
from .kv_prefetcher import KVPrefetcher
from .kv_transfer_connector import PathsConnector
from .length_predictor import LengthPredictor, captures_hidden_states
from .offload_cache_policy import find_cache_policy
from .offload_manager import OffloadManager, host_eviction_rank
from .pair_connector import copy_wait_s, offload_connector
from .plugin_settings import (
    PluginSettings,
    build_program_scheduler,
    check_scheduling,
    data_parallel_rank,
    missing_tiers,
)
from .prefill_quota import PrefillQuota
from .program_offload_connector import ProgramOffloadingConnector
from .tool_call_reader import ToolCallReader, turn_end
from .waiting_queue import EngineContext, WaitingQueueAdapter, max_new_tokens
from .weight_epochs import CHANGES_WEIGHTS, WeightEpochs

if TYPE_CHECKING:
    from .compat import KVConnectorOutput, Scheduler

logger = logging.getLogger("vllm.sojourn")

MAX_STALLED_SHOWN = 10
STALL_WARNING_S = 300.0
"""Seconds without computing, with unfinished requests, after which a warning says what they wait for. By
default, all waits of sojourn's own are shorter."""
COUNTED_BLOCKS = 20_000
"""Of a larger pool, ``pool_state`` looks at every nth block, at most this many (about 2 ms)."""


class SchedulerAdapter(EngineView):
    """Raises ``SettingsError``, ``PresetError`` or ``UnsupportedModel``."""

    def __init__(
        self, scheduler: Scheduler, settings: PluginSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._clock = clock
        self.failures = 0
        self._has_told_hint = False
        self._pool = scheduler.kv_cache_manager.block_pool
        self._groups = groups = KVCacheGroups(scheduler)
        rank = data_parallel_rank(scheduler.vllm_config)
        history = HistoryFile(settings.history_file, clock(), rank=rank)
        preset = settings.preset()
        connector, name = scheduler.connector, connector_name(scheduler)
        self.missing = missing_tiers(preset, name, allowed=settings.allow_missing_tiers)
        if self.missing is not None:
            # Without a connector the user expects no host memory, so this is no warning.
            level = logging.INFO if connector is None else logging.WARNING
            logger.log(level, "sojourn: policy %s: %s", preset.name, self.missing)
        if not scheduler.kv_cache_manager.enable_caching:
            logger.warning(
                "sojourn: prefix caching is off, by --no-enable-prefix-caching or because vLLM turns it off "
                "for this model: every turn is computed in full, and policies keep no KV"
            )
        pool = pool_config(scheduler, settings.profile(), groups)
        self.program_scheduler = build_program_scheduler(settings, preset, pool, history.load(), rank)
        # In tests a wrong metric is an error.
        self.program_scheduler.recorder.strict = settings.strict
        self.reader = ToolCallReader(
            scheduler.vllm_config.model_config, settings.tool_call_parser, settings.tool_parser_plugin
        )
        own = self._connector = offload_connector(connector)
        """Connector of host memory and disk. Others may write to a load's blocks at any time."""
        self._offload: OffloadManager | None = None
        """Manager of host memory and disk; ``None`` without sojourn's connector."""
        if own is not None:
            own.groups, own.clock, own.strict = groups, clock, settings.strict
            own.is_paused = lambda: scheduler.pause_state is not PauseState.UNPAUSED
            own.planner.is_on_device = groups.is_cached
            self._offload = OffloadManager(own, self.program_scheduler, groups)
        self._cache_policy = find_cache_policy(connector)
        """Sojourn's eviction order in the host memory of vLLM's own connector, if in use."""
        if self._cache_policy is not None:
            self._cache_policy.strict = settings.strict
            self._cache_policy.groups = len(groups)
            self._cache_policy.clock = clock
            self._cache_policy.rank = lambda name: host_eviction_rank(self.program_scheduler.label(name))
        self._weights = WeightEpochs(scheduler)
        self.connector_is_reset = False
        """Whether new weights have reset the connector since the last step. vLLM's connector refuses a second
        reset before the next step while copies of the first go on."""
        self._pending: list[ev.EngineAction | ev.LeaseGranted] = []
        context = EngineContext(
            scheduler, self.program_scheduler, groups, clock, self.handle, self.carry_out, self.guarded
        )
        self._scorer: EvictionScorer | None = None
        """Scores of blocks; set if the preset evicts by program."""
        if preset.eviction.by_program:
            self._scorer = EvictionScorer(self.program_scheduler)
        self._queue = self._pool.free_block_queue = ProgramFreeBlockQueue(
            self._pool.free_block_queue,
            owners=self.program_scheduler.owners,
            evicted=self._evicted,
            scorer=self._scorer,
            failed=self._eviction_order_failed,
            before_reuse=self._offload.save if self._offload is not None else None,
        )
        self._pool_blocks = self._pool.num_gpu_blocks - 1
        self._pinned: dict[ProgramId, list[KVCacheBlock]] = {}
        """Program → the blocks that its lease holds, each by one more reference."""
        # By reference counts vLLM 0.31 finds blocks that all requests share, for cascade attention, off by
        # default. Leases are references too, so requests could read blocks that are not theirs.
        scheduler.kv_cache_manager.get_num_common_prefix_blocks = lambda _: [0] * len(groups)
        self._prefetcher = KVPrefetcher(self._pool, self._queue, groups, own)
        check_scheduling(preset, scheduler.policy.value)
        self.waiting = WaitingQueueAdapter(context)
        self._allocation_fallback = AllocationFallback(context, self.waiting, self._prefetcher, self._offload)
        self._length_predictor: LengthPredictor | None = None
        """Set if the preset reads hidden states and the workers capture them."""
        if preset.output_length.reads_hidden_states and captures_hidden_states(scheduler.vllm_config):
            self._length_predictor = LengthPredictor(scheduler, self.handle, settings.network_file, rank)
        self._history = history
        self.engine = profile_description(scheduler, groups.tokens_per_block)
        if isinstance(connector, PathsConnector):
            self.paths = connector.pair_status
        self.service = EngineService(self.program_scheduler, self)
        self._event_budget = EventTimeBudget(clock())
        self._step_ended_s = -math.inf
        self._computed_s = math.inf
        """Time since when steps compute nothing; ``inf`` if the warning is logged."""
        self.quota: PrefillQuota | None = None
        if settings.compute_quota_s:
            self.quota = PrefillQuota(scheduler, settings, self.program_scheduler, self.guarded)
        logger.info(
            "sojourn: policy %s on %s, %d blocks of %g tokens",
            preset.name, type(scheduler).__name__, self._pool_blocks, groups.tokens_per_block,
        )  # fmt: skip

    # -- events -----------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Pass an event to the ``ProgramScheduler`` and return the resulting actions, the answer to the event
        last. Actions on KV wait until ``carry_out``; others are carried out here."""
        actions = self.program_scheduler.handle(event, now)
        for action in actions:
            if type(action) is ev.EngineAction or type(action) is ev.LeaseGranted:
                self._pending.append(action)
            elif type(action) is ev.QueuePlaceChanged and action.request_id in self._scheduler.requests:
                self.waiting.queue.rekey(self._scheduler.requests[action.request_id])
        return actions

    def arrived(self, request: Request) -> None:
        """Handle a new request, before vLLM queues it."""
        now = self._clock()
        if not self._scheduler.requests:
            self._computed_s = now  # an engine without requests does no steps
        try:
            self._weights.mark(request)
            self._take_in(request, now)
        except Exception:
            # A request that the ``ProgramScheduler`` does not know would wait behind all others, without end.
            if self.program_scheduler.request(request.request_id) is None:
                tokens, priority = request.num_prompt_tokens, request.priority
                self.handle(ev.RequestArrived(request.request_id, NO_IDENTITY, tokens, priority), now)
            raise

    def _take_in(self, request: Request, now: float) -> None:
        params = request.sampling_params
        identity = read_identity(
            getattr(request, "session_id", None), params.extra_args if params is not None else None
        )
        if identity.reason and not self._has_told_hint:
            self._has_told_hint = True
            said = "sojourn: a mistake in a request's agentic_context: %.300r; sojourn_hints_total counts all"
            logger.warning(said, identity.reason)
        ours = identity.context.sojourn if identity.context is not None else None
        if ours is not None and ours.events:
            self.service.apply_attached_events(identity, now)
            ended_s = self._clock()
            self._event_budget.spend(ended_s - now, ended_s)  # delays posted events, not attached ones
        hashes = request.block_hashes if identity.program_id is not None else None
        tokens, priority = request.num_prompt_tokens, request.priority
        self.handle(ev.RequestArrived(request.request_id, identity, tokens, priority, hashes), now)
        if self._cache_policy is not None:
            known = self.program_scheduler.request(request.request_id)
            if known is not None and known.program_id is not None:
                self._cache_policy.arrived(request.request_id, known.program_id)
        if self._pending:
            self.carry_out(now)

    def before_step(self) -> None:
        """Prepare a step before vLLM plans it: expire leases, carry out actions, update queues and scores.
        Only parts that have something to do are called."""
        fallback, now = self._allocation_fallback, self._clock()
        self.connector_is_reset = False
        try:
            fallback.restore_victim()
            self.handle(ev.Tick(self._pool_blocks - self._queue.num_free_blocks), now)
            if self._offload is not None:  # otherwise it loads nothing
                self._prefetcher.expire(now)
            if self._pending:
                self.carry_out(now)
            if self._scorer is not None:
                self._scorer.before_step(self._queue)
            if self._length_predictor is not None:
                self._length_predictor.report(now)
            if self.program_scheduler.forecaster.predictor.predicts:
                fallback.forecast(now)
            if self._offload is not None:
                self._offload.store_ahead(self._queue)
        finally:
            self.waiting.open_step(now)  # also after a failure: otherwise the queue could stay closed
            self.guarded(fallback.end_load_deadlock)
            if self.quota is not None:
                self.quota.step = None

    def after_step(self, output: SchedulerOutput) -> None:
        """Handle the step that vLLM has just planned: report its admitted and resumed requests."""
        now = self._clock()
        self._allocation_fallback.restore_victim()
        if output.total_num_scheduled_tokens:
            self._computed_s = now
        elif now - self._computed_s >= STALL_WARNING_S:
            self._warn_of_stall(now)
        output.sojourn_planned_s = now
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        for each in new:
            self._admitted(each.req_id, each.num_computed_tokens, now)
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._admitted(request_id, computed, now)
        if self._pending:
            self.carry_out(now)
        if self._scorer is not None and (new or cached.resumed_req_ids):
            self._scorer.after_step(self._queue)
        if self.quota is not None:
            self.quota.close_step(output)

    def _warn_of_stall(self, now: float) -> None:
        streaming = RequestStatus.WAITING_FOR_STREAMING_REQ  # for their clients
        requests = self._scheduler.requests.values()
        unfinished = [each for each in requests if each.status is not streaming and not each.is_finished()]
        if not unfinished or self._scheduler.pause_state is not PauseState.UNPAUSED:
            self._computed_s = now
            return
        self._computed_s = math.inf
        parked = self.waiting.queue.parked
        waiting = [
            f"{each.request_id}: {'PARKED' if each in parked else each.status.name}, "
            f"holds {sum(map(len, self._groups.used_by(each)))} blocks"
            for each in unfinished[:MAX_STALLED_SHOWN]
        ]
        logger.warning(
            "sojourn: nothing was computed for %.0f s, although %d requests are unfinished. Blocks: %s. "
            "First requests: %s. If sessions that stream their prompts hold all blocks, end one",
            STALL_WARNING_S, len(unfinished), self.pool_state(), "; ".join(waiting),
        )  # fmt: skip

    def before_results(self, output: SchedulerOutput, results: Any) -> None:
        """Handle the workers' ``results`` of the step ``output``, before vLLM does. Does not raise."""
        copies: KVConnectorOutput | None = getattr(results, "kv_connector_output", None)
        self.guarded(self._step_ended, output, copy_wait_s(copies) if copies is not None else 0.0)
        if copies is not None:
            self.guarded(self._end_loads, copies)
            if copies.invalid_block_ids:
                self.guarded(self.evict_unfilled, set(copies.invalid_block_ids))
        rows = getattr(results, OUTPUT_ATTRIBUTE, None)
        if rows is not None and self._length_predictor is not None:
            self.guarded(self._length_predictor.observe, rows, output)

    def _step_ended(self, output: SchedulerOutput, waited_s: float) -> None:
        """Report how long a step took, without the seconds that it waited for copies: policies compare the
        cost of computing with that of copying. The device runs one step at a time, so a step begins when it
        is planned or when the previous step ends, whichever is later."""
        planned_s, now = output.sojourn_planned_s, self._clock()
        took_s = max(0.0, now - max(planned_s, self._step_ended_s) - waited_s)
        self._step_ended_s = now
        link = self._offload.load_costs() if self._offload is not None else None
        if isinstance(self._scheduler.connector, ProgramOffloadingConnector):
            pool = self.program_scheduler.pool
            link = self._scheduler.connector.load_costs(pool.block_bytes / pool.tokens_per_block)
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        kv_tokens = tokens + sum(output.scheduled_cached_reqs.num_computed_tokens)
        kv_tokens += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        self.handle(ev.StepCompleted(tokens, took_s, requests, link, kv_tokens), now)

    def after_results(self) -> None:
        """Report the requests that have their first token, after vLLM handled a step's results."""
        awaiting = self.program_scheduler.awaiting_first_token
        if not awaiting:
            return
        now = self._clock()
        for request_id in tuple(awaiting):
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.num_output_tokens:
                self.handle(ev.FirstToken(request_id), now)

    def finished(self, request: Request) -> None:
        """Handle the end of a request before vLLM frees its blocks, and pin them if its program gets a
        lease."""
        self.waiting.left(request)
        known = self.program_scheduler.request(request.request_id)
        program_id = known.program_id if known is not None else None
        # Outputs of requests without a program are not decoded.
        guarded = self.guarded if program_id is not None else None
        end = turn_end(request, self.reader, guarded, in_pair=self.waiting.in_pair)
        if self._length_predictor is not None:
            # If the end is a guess, the length may be wrong.
            self._length_predictor.request_ended(request, complete=end.is_complete and not end.is_guess)
        if self._offload is not None:
            self._offload.release_preempted(request.request_id, program_id, request.block_hashes)
        if known is None:
            return
        now = self._clock()
        if self._offload is not None and program_id is not None and not known.admitted:
            self._offload.admitted(program_id, ())
        cached, hashes = self._cached_blocks(request, program_id) if program_id is not None else ([], ())
        self.handle(
            ev.TurnFinished(
                request_id=request.request_id,
                outcome=end.reason,
                tool_calls=end.tool_calls,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens * (end.reason is not ev.TurnFinishReason.PREFILLED),
                block_ids=[block.block_id for block in cached],
                block_hashes=hashes,
                plan_items=plan_items(end.tool_calls),
            ),
            now,
        )
        self.carry_out(now)
        if program_id is None:
            if self._offload is not None and not self._groups.is_single:
                self._offload.remember_turn_end(None, self._groups.cached_prefix(request.block_hashes).blocks)
            return
        self._place_freed(cached)
        seconds = self._clock() - now
        self.program_scheduler.recorder.observe("sojourn_policy_seconds", seconds, hook="retention")

    def preempted(self, request: Request) -> None:
        self._allocation_fallback.restore_victim()
        if self.quota is not None:
            self.quota.preempted(request)
        # vLLM sets a block's hash when it plans the step. If the request is preempted within that step, the
        # step does not compute the block.
        self._pool.evict_blocks(self._groups.uncomputed(request))
        known = self.program_scheduler.request(request.request_id)
        program_id = known.program_id if known is not None else None
        cached = self._cached_blocks(request, program_id)[0] if program_id is not None else []
        reusable, hashes = self._groups.cached_prefix(request.block_hashes)
        copied = (self._offload.count_copied(reusable) or 0) if self._offload is not None else 0
        link = self._offload.offload_costs(len(reusable) - copied) if self._offload is not None else None
        actions = self.handle(
            ev.RequestPreempted(
                request.request_id,
                tokens=request.num_computed_tokens,
                block_ids=[block.block_id for block in cached],
                copied_tokens=copied * hashes * self._groups.hash_tokens // max(1, len(reusable)),
                link=link,
            ),
            self._clock(),
        )
        self._place_freed(cached)
        if self._cache_policy is not None and program_id is not None:
            self._cache_policy.waits(program_id)
        if self._offload is None:
            return
        if ev.RecoveryChosen(RecoveryMethod.RECOMPUTE) in actions:
            cached = self._groups.cached_blocks(request)
            self._offload.skip_saving(cached, program_id, self._queue.owners)
        elif program_id is not None and self.program_scheduler.forecaster.predictor.predicts:
            self._offload.keep_preempted(request.request_id, reusable)

    def evict_unfilled(self, block_ids: set[int]) -> None:
        """Remove blocks whose load failed, and all blocks computed from them, from the prefix cache, before
        vLLM handles the failure. Such blocks exist only if a connector loads KV within a step: a request with
        an asynchronous load is not computed before the load has ended."""
        self._pool.evict_blocks(self._groups.blocks_behind(self._scheduler.running, block_ids))

    def before_cache_reset(self, preempts: bool) -> None:
        """End leases and loads ahead of need: vLLM clears the prefix cache only if nothing holds blocks. If
        it ``preempts`` running requests for it, requests that load are queued again."""
        now = self._clock()
        try:
            self.handle(ev.CacheResetStarted(), now)
            self.carry_out(now)
            self._prefetcher.cancel_all()
        finally:
            if preempts and self._connector is not None:
                self.waiting.requeue_loading(self._connector)

    def _end_loads(self, copies: KVConnectorOutput) -> None:
        """Handle ended loads before vLLM does, and queue the requests of failed ones again."""
        if self._connector is None:
            return
        for request_id in self._connector.end_loads(copies):
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                # Otherwise vLLM would keep the request's blocks, and its reservation for the failed load,
                # until the request's turn comes. Other requests may need the blocks.
                self.waiting.give_up_load(request, self._connector)

    def after_cache_reset(self, device: bool) -> None:
        """Forget the KV in all tiers, after vLLM cleared the prefix cache on the ``device``; or that below
        it, if vLLM reset the connector, but refused to clear the prefix cache."""
        if device:
            self._queue.clear_owners()
            self._prefetcher.reset()
        elif self._offload is None:
            return
        now = self._clock()
        try:
            self.handle(ev.CacheReset(device), now)
            self.carry_out(now)
        finally:
            if self._offload is not None:  # vLLM clears only the device by default
                self._offload.reset()

    def weights_called(self, method: str, what: Any) -> None:
        """Handle the end of a call that may have changed weights: of the adapter or adapter id ``what``, or
        by the worker's method ``what`` (``collective_rpc``)."""
        if method != "collective_rpc":
            self._weights.adapter_changed(getattr(what, "lora_int_id", what))
        elif CHANGES_WEIGHTS.match(getattr(what, "__name__", str(what))):
            # A pause clears the cache unless its caller wants to keep the KV over the change.
            if self._scheduler.pause_state is PauseState.UNPAUSED:
                self._weights.model_changed()
            self.before_cache_reset(False)
            if self._scheduler.connector is not None and not self.connector_is_reset:
                self._scheduler.connector.reset_cache()
                self.connector_is_reset = True
            self.after_cache_reset(False)

    # -- calls of the API server ------------------------------------------------

    def call(self, operation: str, payload: str) -> str:
        """Answer one operation of the HTTP API, in JSON, between two steps."""
        now = self._clock()
        # No tick while the engine is paused: nothing could enter. The API server still asks for metrics.
        if self._scheduler.pause_state is not PauseState.PAUSED_ALL:
            self.handle(ev.Tick(self._pool_blocks - self._queue.num_free_blocks), now)
        self.carry_out(now)
        started_s = self._clock()
        answer = self.service.call(operation, payload, now)
        ended_s = self._clock()
        self.carry_out(now)
        seconds = self._clock() - now
        self._history.save_if_due(self.program_scheduler.histories, now)
        if operation == "event_batches":
            self.program_scheduler.recorder.observe("sojourn_policy_seconds", seconds, hook="event")
            wait_s = self._event_budget.spend(ended_s - started_s, ended_s)
            return f'{{"wait_s": {wait_s:.6f}, "batches": {answer}}}'
        return answer

    def pool_state(self) -> dict[str, int]:
        """Return the number of blocks by state: ``total``, ``running`` (used by requests alone), ``leased``,
        ``cached`` (with content, but evictable) and ``free`` (without content). Those two are estimates in a
        large pool."""
        pool, leased = self._pool, self.program_scheduler.leases.held_blocks
        available, every = pool.get_num_free_blocks(), -(-pool.num_gpu_blocks // COUNTED_BLOCKS)
        found = sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks[::every])
        total, cached = self._pool_blocks, min(available, every * found)
        return {
            "total": total,
            "running": total - available - leased,
            "leased": leased,
            "cached": cached,
            "free": available - cached,
        }

    def below_blocks(self, program_id: ProgramId) -> tuple[int, int]:
        if self._cache_policy is not None:
            return self._cache_policy.held_chunks(program_id), 0
        return self._offload.held_blocks(program_id) if self._offload is not None else (0, 0)

    def below_device(self) -> TierCapabilities | None:
        return offload_description(self._scheduler)

    def tier_state(self) -> dict[str, Any]:
        if isinstance(self._scheduler.connector, ProgramOffloadingConnector):
            return self._scheduler.connector.host.state()
        return self._offload.state() if self._offload is not None else {}

    def network_state(self) -> dict[str, Any] | None:
        return self._length_predictor.trainer.state() if self._length_predictor is not None else None

    def persist(self, hashes: Sequence[Any]) -> dict[str, Any]:
        if self._offload is None:
            return {"reason": "this engine has no sojourn connector: no host memory or disk to write to"}
        return self._offload.persist(hashes)

    def shutdown(self) -> None:
        """Save the learned histories and the length predictor's network, and end the recording."""
        try:
            self._history.save(self.program_scheduler.histories)
        finally:
            self.program_scheduler.close_recording("the engine stopped")
            if self._length_predictor is not None:
                self._length_predictor.trainer.stop()

    # -- state ------------------------------------------------------------------

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a hook. If it fails, count and log the error and return ``None``; if ``strict``, raise it."""
        try:
            return call(*args)
        except Exception as error:
            self.report_failure(error, "a hook failed")
            return None

    def report_failure(self, error: Exception, what: str) -> None:
        if self._settings.strict:
            raise error
        self.failures += 1
        self.program_scheduler.recorder.count("sojourn_internal_errors_total")
        if self.failures <= 10 or self.failures % 1000 == 0:
            logger.error("sojourn: %s (%d so far); the engine goes on", what, self.failures, exc_info=error)

    # -- actions on KV ----------------------------------------------------------

    def carry_out(self, now: float) -> None:
        while self._pending:
            actions, self._pending = self._pending, []
            for action in actions:
                # Guarded separately: if one action fails, the others must still be carried out, because their
                # leases have ended already.
                self.guarded(self._execute_one, action, now)

    def _execute_one(self, action: ev.EngineAction | ev.LeaseGranted, now: float) -> None:
        program_id = action.program_id
        if isinstance(action, ev.LeaseGranted):
            self._pinned[program_id] = [self._pool.blocks[each] for each in action.block_ids]
            self._pool.touch(self._pinned[program_id])
        elif action.kind is ev.EngineActionKind.DROP:
            if self._offload is not None:
                self._offload.program_ended(program_id)
            self._prefetcher.program_ended(program_id)
            self._unpin(program_id)
            self._queue.place(action.block_ids)
            if self._cache_policy is not None:
                self._cache_policy.program_ended(program_id)
        elif action.kind is ev.EngineActionKind.RELEASE:
            self._unpin(program_id)
        elif action.kind is ev.EngineActionKind.PREFETCH:
            self._prefetch(program_id, now)
            return
        elif (
            action.kind is ev.EngineActionKind.PLACE and self._offload is not None and action.tier is not None
        ):
            self._offload.place(program_id, action.tier)
        for request_id in self.program_scheduler.live_requests(program_id):
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self.waiting.queue.rekey(request)

    def _unpin(self, program_id: ProgramId) -> None:
        """End a lease's hold. The blocks stay cached; the pool reuses the last first."""
        self._pool.free_blocks(reversed(self._pinned.pop(program_id, [])))

    def _prefetch(self, program_id: ProgramId, now: float) -> None:
        """Prefetch a program's expected prefix: read blocks from disk into host memory, and load as many as
        the policy chooses from there into spare blocks of the device."""
        hashes = self.program_scheduler.prefetch_keys(program_id)
        prefix = self._groups.cached_prefix(hashes)
        missing = len(hashes) - prefix.hashes
        being_read, lost, loadable = 0, missing, 0
        if self._offload is not None:
            being_read, lost, loadable = self._offload.fetch(hashes, prefix.hashes) or (0, missing, 0)
            loadable = min(loadable, self._prefetcher.budget(program_id))
        most = loadable + self.program_scheduler.predictor.reserve_blocks if loadable else 0
        spare = self._queue.spare_blocks(most, {block.block_id for block in prefix.blocks})
        event = ev.PrefetchStarted(program_id, missing, being_read, lost, loadable, spare)
        chosen = ev.answer_of(self.handle(event, now), ev.LoadAheadChosen)
        if chosen is not None:
            self._allocation_fallback.allocating = None  # no request causes these evictions
            end = prefix.hashes + chosen.blocks
            self._prefetcher.load(program_id, hashes[:end], chosen.blocks, now + chosen.keep_s)

    # -- inside -----------------------------------------------------------------

    def _admitted(self, request_id: str, computed: int, now: float) -> None:
        known = self.program_scheduler.request(request_id)
        request = self._scheduler.requests.get(request_id)
        if known is None or request is None:
            return
        if self._cache_policy is not None:
            self._cache_policy.request_admitted(known.program_id, request.block_hashes)
        if self._offload is not None:
            self._offload.release_preempted(request_id, known.program_id, request.block_hashes)
            self._offload.remember_prompt_end(
                known.program_id, request.block_hashes, request.num_prompt_tokens
            )
            if known.program_id is not None:
                self._offload.admitted(known.program_id, request.block_hashes)
                self._prefetcher.uncache_unused(known.program_id)
        loaded, found = 0, request.prefill_stats
        if found is not None:  # by any connector; if a part of a load failed, vLLM lowers ``computed``
            loaded = min(found.num_external_cached_tokens, computed - found.num_local_cached_tokens)
        self.handle(
            ev.RequestAdmitted(
                request_id=request_id,
                cached_tokens=computed,
                host_tokens=max(0, loaded),
                tokens=request.num_tokens,
                block_hashes=request.block_hashes,
                # vLLM also admits each further part of a prompt that a client streams.
                resumed=known.preempted,
                most_tokens=max_new_tokens(request, self._scheduler.max_model_len),
                reads_cache=not request.skip_reading_prefix_cache,
            ),
            now,
        )

    def _cached_blocks(
        self, request: Request, program_id: ProgramId
    ) -> tuple[list[KVCacheBlock], Sequence[Any]]:
        """Return (distinct blocks that an ended or preempted request leaves in the cache, leading block
        hashes that they cover). A prompt that begins with this context finds them."""
        cached = self._groups.cached_blocks(request)
        # A request that ran may have no cached block itself, if the model has states alone.
        if self._groups.is_single or not (cached or request.num_computed_tokens):
            return cached, request.block_hashes[: len(cached)]
        # A window needs its last blocks only. The state that a hit needs may no longer be among the request's
        # blocks: vLLM frees the state's block one step after the state is computed.
        prefix = self._groups.cached_prefix(request.block_hashes)
        if self._offload is not None:
            self._offload.remember_turn_end(program_id, prefix.blocks)
        return prefix.blocks, request.block_hashes[: prefix.hashes]

    def _place_freed(self, blocks: Sequence[KVCacheBlock]) -> None:
        if not self._groups.is_single:  # otherwise the request still holds all of them
            self._queue.place(block.block_id for block in blocks)

    def _eviction_order_failed(self, error: Exception) -> None:
        if self._connector is not None:
            self._connector.turn_off("the free queue no longer reports evictions")
        self.report_failure(error, "the eviction order failed; vLLM's own order is used from now on")

    def _evicted(self, gone: list[KVCacheBlock], score: Score | None) -> None:
        allocating = self._allocation_fallback.allocating
        taker = allocating.request_id if allocating is not None else None
        blocks = [
            (block.block_id, None if block.block_hash is None else get_block_hash(block.block_hash))
            for block in gone
        ]
        self.handle(ev.BlocksEvicted(taker, blocks, score), self._clock())
