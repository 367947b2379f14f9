"""vLLM's scheduler with sojourn: ``--scheduler-cls sojourn_server.vllm.scheduler.make_scheduler``.

``make_scheduler`` is a factory, not a class. It adds a mix-in to the scheduler class that the engine would
use without sojourn (``AsyncScheduler`` on CUDA, ``Scheduler`` on CPU). The mix-in calls the
``SchedulerAdapter``. If sojourn fails in a hook, vLLM's own behaviour remains.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from .compat import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Request,
    Scheduler,
    SchedulerOutput,
    check_vllm_version,
    running_vllm,
)
from .hidden_state_capture import OUTPUT_ATTRIBUTE
from .kv_cache_groups import UnsupportedModel
from .kv_offload_connector import copy_wait_s
from .plugin_settings import PluginSettings
from .prefill_quota import PrefillQuota
from .scheduler_adapter import SchedulerAdapter


def _append_refusal(outputs: dict[int, EngineCoreOutputs], request: Request) -> None:
    """Add the final error of a refused request to the outputs of its client."""
    client_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
    client_outputs.outputs.append(
        EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
    )


class SojournMixin:
    """Mix-in that reports a vLLM scheduler's events to a ``SchedulerAdapter``. It must come before the
    scheduler class in the list of bases."""

    prefill_capacity_bound: bool
    """Attribute of vLLM's scheduler: whether the last step with prefills left requests in the queue that
    could run."""
    sojourn: SchedulerAdapter
    sojourn_quota: PrefillQuota | None
    """The prefill quota; ``None`` if the settings have no compute quota."""
    sojourn_clock = staticmethod(time.monotonic)
    """Clock in monotonic seconds. The simulator replaces it with its virtual clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.read(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        self.sojourn = SchedulerAdapter(self, settings, clock=self.sojourn_clock)
        self.sojourn_quota = PrefillQuota.install(
            self, settings, self.sojourn.program_scheduler, self.sojourn.guarded
        )

    def add_request(self, request: Any) -> None:
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None  # from vllm_xargs it may be text, which would stop the engine
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            self.sojourn.guarded(self.sojourn.arrived, request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.sojourn.guarded(self.sojourn.before_step)
        quota = self.sojourn_quota
        if quota is not None:
            quota.open_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        # vLLM counts parked requests too, and would then not throttle prefills (prefill_schedule_interval).
        if self.prefill_capacity_bound and self.sojourn.guarded(self.sojourn.waiting.only_parked_wait):
            self.prefill_capacity_bound = False
        self.sojourn.guarded(self.sojourn.after_step, output)
        if quota is not None:
            self.sojourn.guarded(quota.close_step, output)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        copies = getattr(args[0] if args else None, "kv_connector_output", None)
        waited_s = copy_wait_s(copies) if copies is not None else 0.0
        self.sojourn.guarded(self.sojourn.before_results, scheduler_output, waited_s)
        if copies is not None:
            self.sojourn.guarded(self.sojourn.drop_cancelled, copies)
        if copies is not None and copies.invalid_block_ids:
            self.sojourn.guarded(self.sojourn.evict_unfilled, set(copies.invalid_block_ids))
        rows = getattr(args[0] if args else None, OUTPUT_ATTRIBUTE, None)
        if rows is not None:
            self.sojourn.guarded(self.sojourn.observe_hidden_states, rows, scheduler_output)
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.sojourn.guarded(self.sojourn.after_results)
        for request_id in self.sojourn.guarded(self.sojourn.take_refused) or ():
            self.sojourn.guarded(self.sojourn.refuse, request_id, partial(_append_refusal, result))
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.sojourn.guarded(self.sojourn.finished, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.sojourn.guarded(self.sojourn.preempted, request)
        if self.sojourn_quota is not None:
            self.sojourn.guarded(self.sojourn_quota.preempted, request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        self.sojourn.guarded(self.sojourn.before_cache_reset)
        if reset_running_requests:
            self.sojourn.guarded(self.sojourn.requeue_loading)
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        cached = pool.cached_block_hash_to_block
        try:
            done: bool = super().reset_prefix_cache(  # type: ignore[misc]
                reset_running_requests, reset_connector, *args, **kwargs
            )
        finally:
            # vLLM first clears the device, by a new hash table, and then resets the connector. It may refuse
            # to clear the device, and the connector's reset may fail.
            is_cleared = pool.cached_block_hash_to_block is not cached
            if is_cleared:
                self.sojourn.guarded(self.sojourn.after_cache_reset)
        if reset_connector and not is_cleared:
            self.sojourn.guarded(self.sojourn.after_connector_reset)
        return done

    def shutdown(self) -> None:
        self.sojourn.guarded(self.sojourn.shutdown)
        super().shutdown()  # type: ignore[misc]

    def sojourn_call(self, operation: str, payload: str) -> str:
        """Answer a call of the API server, in JSON. Errors are raised and go back to the API server."""
        return self.sojourn.call(operation, payload)


class SojournScheduler(SojournMixin, Scheduler):
    """vLLM's synchronous scheduler with sojourn mixed in."""


class SojournAsyncScheduler(SojournMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with sojourn mixed in."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Return the engine's scheduler with sojourn mixed in. Raises ``UnsupportedEngine`` for an untested vLLM
    release. Raises ``UnsupportedModel`` for a model that sojourn cannot serve, such as a diffusion language
    model. Raises ``SettingsError`` or ``PresetError`` for a wrong configuration."""
    check_vllm_version(running_vllm())
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UnsupportedModel(
            "this is a diffusion language model; vLLM has a scheduler of its own for these, which sojourn "
            "does not extend. Serve it with --policy stock."
        )
    chosen = SojournAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SojournScheduler
    return chosen(*args, vllm_config=vllm_config, **kwargs)
