"""Limits the prompt tokens in a step of vLLM's scheduler by a compute quota (DualPath §6.2; mechanism D7).

``Scheduler.schedule`` asks ``_reserve_prefill_lookahead`` how many of a request's tokens the step computes
(0: not in this step), after the look-ups in prefix cache and connector and before it allocates blocks. The
quota wraps this method, so it decides about exactly the requests that the scheduler considers. A token budget
set before the step would have to predict admission, hits, loads and preemptions. Once the quota is used up, a
scheduler with a connector still considers further requests, so that their loads begin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.program_scheduler import ProgramScheduler
from ..policies.prefill_decode.prefill_compute_quota import PrefillComputeQuota, StepQuotaUsage
from .compat import Request, RequestStatus, SchedulerOutput
from .plugin_settings import PluginSettings, SettingsError

if TYPE_CHECKING:
    from .compat import Scheduler

logger = logging.getLogger("vllm.sojourn")


class PrefillQuota:
    """Keeps one scheduler's steps within a compute quota. After a failure, prompts are computed without.
    Raises ``SettingsError`` if the quota of ``settings`` is impossible with their profile, this engine or
    model."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: PluginSettings,
        program_scheduler: ProgramScheduler,
        guarded: Callable[..., Any],
    ) -> None:
        costs = settings.attention_costs(chunked=scheduler.scheduler_config.enable_chunked_prefill)
        assert costs is not None, "no quota is set"
        if scheduler.need_mamba_block_aligned_split:
            raise SettingsError(
                f"compute_quota_s is {settings.compute_quota_s}, but this model has state-space layers and "
                "their prompts can only be cut at certain positions; expected 0"
            )
        self.quota = PrefillComputeQuota(
            costs=costs, quota_s=settings.compute_quota_s, block_tokens=scheduler.block_size
        )
        self._scheduler = scheduler
        self._recorder = program_scheduler.recorder
        self._guarded = guarded
        self._reserve: Callable[[Request, int, int], int] = scheduler._reserve_prefill_lookahead
        self._decode_tokens = 1 + scheduler.num_spec_tokens
        self.step: StepQuotaUsage | None = None
        """Use of the quota in the present step; ``None`` before the step's first prompt."""
        scheduler._reserve_prefill_lookahead = self._reserve_within_quota
        logger.info(
            "sojourn: at most %g s of attention a step: %.3g s a pair, %.3g s a token of KV read",
            settings.compute_quota_s, costs.pair_s, costs.kv_token_s,
        )  # fmt: skip

    def preempted(self, request: Request) -> None:
        """Release a preempted request's part of the step's quota, so that other requests can use it."""
        if self.step is not None:
            self.step.undo_take(request.request_id)

    def close_step(self, output: SchedulerOutput) -> None:
        """Record how much of the quota a planned step with prompts uses."""
        step = self.step
        if step is None:
            return
        for request_id in step.taken() - output.num_scheduled_tokens.keys():  # the request got no blocks
            step.undo_take(request_id)
        if not step.prompts_s:
            return
        attention_s = step.decodes_s + step.prompts_s
        self._recorder.observe("sojourn_step_attention_seconds", attention_s)
        if step.closed:
            self._recorder.observe("sojourn_step_quota_ratio", attention_s / self.quota.quota_s)
        if step.cut is not None:
            self._recorder.count("sojourn_quota_cuts_total")

    def _reserve_within_quota(self, request: Request, computed: int, new: int) -> int:
        """Return how many of the ``new`` tokens after ``computed`` the step computes, in place of vLLM's
        method."""
        running = request.status == RequestStatus.RUNNING
        if running and new <= self._decode_tokens and not request.is_prefill_chunk:
            return self._reserve(request, computed, new)
        offered = self._guarded(self._offer, request, computed, new) if new > 0 else new
        chunk = self._reserve(request, computed, new if offered is None else offered)
        if chunk > 0 and self.step is not None:
            self._guarded(self.step.take, request.request_id, computed, chunk)
        return chunk

    def _offer(self, request: Request, computed: int, new: int) -> int:
        if self.step is None:
            decodes_s = sum(
                self.quota.costs.chunk_s(each.num_computed_tokens, 1 + len(each.spec_token_ids))
                for each in self._scheduler.running
                if not each.is_prefill_chunk
            )
            self.step = StepQuotaUsage(self.quota, decodes_s)
        chunk = self.step.offer(
            request.request_id,
            computed,
            new,
            # Images may have to be computed whole. Tokens beyond the prompt include speculative tokens, which
            # the engine schedules all or none.
            chunkable=not request.has_encoder_inputs and computed + new <= request.num_tokens,
        )
        if self.step.closed and self._scheduler.connector is None:
            # Without a connector there are no loads to begin, so later requests need no look-up.
            self._scheduler.waiting.step_closed = True
        return chunk
