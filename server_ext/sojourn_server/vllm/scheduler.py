"""``--scheduler-cls sojourn_server.vllm.scheduler.make_scheduler``.

A factory, not a class: it mixes sojourn into whichever scheduler the engine
would have used (``AsyncScheduler`` on CUDA, ``Scheduler`` on CPU). The mix-in
only tells the adapter what happens; every hook and every callback fails open.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from ..launch.versions import check_vllm
from .adapter import SchedulerAdapter
from .connector import waited
from .hidden_rows import CARRIED_AS
from .settings import Settings
from .step_quota import StepQuota


class UnsupportedModel(RuntimeError):
    """The model's KV cache has a shape the adapter has not been run with."""


def _tell_refused(outputs: dict[int, EngineCoreOutputs], request: Request) -> None:
    """Add the end of a request that was refused to what its client is sent."""
    told = outputs.setdefault(request.client_index, EngineCoreOutputs())
    told.outputs.append(
        EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
    )


class SojournMixin:
    """Tells a ``SchedulerAdapter`` what the engine's scheduler does. Mix in before a scheduler class."""

    sojourn: SchedulerAdapter
    sojourn_quota: StepQuota | None
    """Where a compute quota is set."""
    sojourn_clock = staticmethod(time.monotonic)
    """Seconds, monotonic; the lab puts its virtual clock here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
        if groups != 1:
            raise UnsupportedModel(
                f"this model has {groups} KV cache groups (sliding windows, state-space layers); "
                "sojourn has been run with one. Serve it with --policy stock."
            )
        settings = Settings.read(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        self.sojourn = SchedulerAdapter(self, settings, clock=self.sojourn_clock)  # type: ignore[arg-type]
        self.sojourn_quota = StepQuota.of(self, settings, self.sojourn.steward, self.sojourn.guarded)

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            self.sojourn.guarded(self.sojourn.arrived, request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.sojourn.guarded(self.sojourn.before_step)
        quota = self.sojourn_quota
        if quota is not None:
            quota.open_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.sojourn.guarded(self.sojourn.after_step, output)
        if quota is not None:
            self.sojourn.guarded(quota.close_step, output)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        copies = getattr(args[0] if args else None, "kv_connector_output", None)
        waited_s = waited(copies) if copies is not None else 0.0
        self.sojourn.guarded(self.sojourn.before_results, scheduler_output, waited_s)
        if copies is not None and copies.invalid_block_ids:
            self.sojourn.guarded(self.sojourn.not_filled, set(copies.invalid_block_ids))
        rows = getattr(args[0] if args else None, CARRIED_AS, None)
        if rows is not None:
            self.sojourn.guarded(self.sojourn.hidden_states, rows, scheduler_output)
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.sojourn.guarded(self.sojourn.after_results)
        for request_id in self.sojourn.guarded(self.sojourn.refused) or ():
            self.sojourn.guarded(self.sojourn.refuse, request_id, partial(_tell_refused, result))
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.sojourn.guarded(self.sojourn.finished, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.sojourn.guarded(self.sojourn.preempted, request)
        if self.sojourn_quota is not None:
            self.sojourn.guarded(self.sojourn_quota.preempted, request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.sojourn.guarded(self.sojourn.cache_reset)
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self.sojourn.guarded(self.sojourn.cache_was_reset)
        return done

    def shutdown(self) -> None:
        self.sojourn.guarded(self.sojourn.shutdown)
        super().shutdown()  # type: ignore[misc]

    def sojourn_call(self, operation: str, payload: str) -> str:
        """Answer the API server; errors are raised to it, not swallowed."""
        return self.sojourn.call(operation, payload)


class SojournScheduler(SojournMixin, Scheduler):
    """The synchronous scheduler with sojourn."""


class SojournAsyncScheduler(SojournMixin, AsyncScheduler):
    """The asynchronous scheduler with sojourn."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Build the scheduler the engine asked for, with sojourn in it.

    Raises ``UnsupportedEngine`` on a vLLM version this adapter was not tested
    with, and ``SettingsError`` or ``PresetError`` where the configuration is wrong.
    """
    import vllm

    check_vllm(str(vllm.__version__))
    chosen = SojournAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SojournScheduler
    return chosen(*args, vllm_config=vllm_config, **kwargs)
