"""Between vLLM's scheduler and the compute quota: how many tokens of a prompt are computed in a step (D7).

``Scheduler.schedule`` settles a request's tokens in ``_reserve_prefill_lookahead``: for those that run and
those that wait alike, once prefix cache and connector have said what is there, and before blocks are
allocated. What that method answers is computed, and 0 means "not in this step". So the quota stands there,
and decides in the scheduler's own walk about what really is in line. (One number of tokens for the step,
set before the walk, would have to foresee it: gates, hits, loads under way, preemptions.) Where there is a
connector, those behind a prompt that was cut are still asked about until one could be computed: who is to
be read from elsewhere begins to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ..engine.steward import Steward
from ..policy.compute_quota import ComputeQuota, OpenStep
from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.sojourn")


class StepQuota:
    """Keeps one scheduler's steps within a compute quota. ``guarded`` runs a call so that its failure is not
    the engine's: a prompt then gets what the engine would give it."""

    def __init__(
        self,
        scheduler: Scheduler,
        quota: ComputeQuota,
        steward: Steward,
        guarded: Callable[..., Any],
    ) -> None:
        self.quota = quota
        self._scheduler = scheduler
        self._recorder = steward.recorder
        self._guarded = guarded
        self._settled: Callable[[Request, int, int], int] = scheduler._reserve_prefill_lookahead
        self._decode_tokens = 1 + scheduler.num_spec_tokens
        self.step: OpenStep | None = None
        """What is packed of the step under way; ``None`` until a prompt is met."""
        scheduler._reserve_prefill_lookahead = self._settle

    @classmethod
    def of(
        cls, scheduler: Scheduler, settings: Settings, steward: Steward, guarded: Callable[..., Any]
    ) -> StepQuota | None:
        """As the settings say; ``None``: the scheduler is left alone. Raises ``SettingsError``."""
        costs = settings.attention_costs(chunked=scheduler.scheduler_config.enable_chunked_prefill)
        if costs is None:
            return None
        if scheduler.need_mamba_block_aligned_split:
            raise SettingsError(
                f"compute_quota_s is {settings.compute_quota_s}, but this model has state-space layers and "
                "prompts are cut where those allow it; expected 0"
            )
        quota = ComputeQuota(costs=costs, quota_s=settings.compute_quota_s, block_tokens=scheduler.block_size)
        logger.info(
            "sojourn: at most %g s of attention a step: %.3g s a pair, %.3g s a token of KV read",
            quota.quota_s, costs.pair_s, costs.kv_token_s,
        )  # fmt: skip
        return cls(scheduler, quota, steward, guarded)

    def open_step(self) -> None:
        """Before the scheduler plans a step."""
        self.step = None

    def preempted(self, request: Request) -> None:
        """Before a running request is preempted: it may have been given tokens in this step."""
        if self.step is not None:
            self.step.leave(request.request_id)

    def close_step(self, output: SchedulerOutput) -> None:
        """After the scheduler planned a step: count what came of the quota, if prompts met it."""
        step = self.step
        if step is None:
            return
        for request_id in step.taken() - output.num_scheduled_tokens.keys():  # there were no blocks for it
            step.leave(request_id)
        if not step.prompts_s:
            return
        attention_s = step.decodes_s + step.prompts_s
        self._recorder.observe("sojourn_step_attention_seconds", attention_s)
        if step.closed:
            self._recorder.observe("sojourn_step_quota_ratio", attention_s / self.quota.quota_s)
        if step.cut is not None:
            self._recorder.count("sojourn_quota_cuts_total")

    def _settle(self, request: Request, computed: int, new: int) -> int:
        """In the method's place: how many of ``new`` tokens behind ``computed`` ones this step computes."""
        running = request.status == RequestStatus.RUNNING
        if running and new <= self._decode_tokens and not request.is_prefill_chunk:
            return self._settled(request, computed, new)
        offered = self._guarded(self._offer, request, computed, new) if new > 0 else new
        chunk = self._settled(request, computed, new if offered is None else offered)
        if chunk > 0:
            self._guarded(self._take, request, computed, chunk)
        return chunk

    def _offer(self, request: Request, computed: int, new: int) -> int:
        if self.step is None:
            self.step = OpenStep(self.quota, self._decodes_s())
        chunk = self.step.offer(
            request.request_id,
            computed,
            new,
            # Images may have to be computed whole, and were allotted by what the engine would compute. More
            # tokens than are left are rows kept for guesses: the engine counts on all or none.
            divisible=not request.has_encoder_inputs and computed + new <= request.num_tokens,
        )
        if self.step.closed and self._scheduler.connector is None:
            # Nothing is to be read for those behind, and to look up what they have costs as much as ever.
            self._scheduler.waiting.fill_step()
        return chunk

    def _take(self, request: Request, computed: int, chunk: int) -> None:
        if self.step is not None:
            self.step.take(request.request_id, computed, chunk)

    def _decodes_s(self) -> float:
        """Of requests that run and have their prompts behind them; summed only if a step meets a prompt."""
        seconds = self.quota.costs.seconds
        return sum(
            seconds(request.num_computed_tokens, 1 + len(request.spec_token_ids))
            for request in self._scheduler.running
            if not request.is_prefill_chunk
        )
