"""vLLM's scheduler with sojourn: ``--scheduler-cls sojourn_server.vllm.scheduler.make_scheduler``.

``make_scheduler`` is a factory. It adds a mix-in, which calls the ``SchedulerAdapter``, to the scheduler
class that the engine would use without sojourn. If sojourn fails in a hook, vLLM's own behaviour remains.
"""

from __future__ import annotations

import time
from typing import Any

from .compat import AsyncScheduler, Scheduler, SchedulerOutput, check_vllm_version, running_vllm
from .kv_cache_groups import UnsupportedModel
from .plugin_settings import PluginSettings
from .scheduler_adapter import SchedulerAdapter


class SojournMixin:
    """Reports a scheduler's events to a ``SchedulerAdapter``. Comes before the scheduler class in the
    bases."""

    sojourn: SchedulerAdapter
    sojourn_clock = staticmethod(time.monotonic)
    """Clock in monotonic seconds. The simulator replaces it with its virtual clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.read(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        self.sojourn = SchedulerAdapter(self, settings, clock=self.sojourn_clock)

    def add_request(self, request: Any) -> None:
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None  # from vllm_xargs it may be text, which would stop the engine
        # With one that ends at once, vLLM frees the KV of a request that its client gave up.
        ends_at_once = getattr(request, "abort_immediately", False)
        if not ends_at_once and request.request_id not in self.requests:  # type: ignore[attr-defined]
            self.sojourn.guarded(self.sojourn.arrived, request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.sojourn.guarded(self.sojourn.before_step)
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.sojourn.guarded(self.sojourn.after_step, output)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.sojourn.before_results(scheduler_output, args[0] if args else None)
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.sojourn.guarded(self.sojourn.after_results)
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.sojourn.guarded(self.sojourn.finished, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.sojourn.guarded(self.sojourn.preempted, request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        self.sojourn.guarded(self.sojourn.before_cache_reset, reset_running_requests)
        reset_connector = reset_connector and not self.sojourn.connector_is_reset
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
                self.sojourn.guarded(self.sojourn.after_cache_reset, True)
        if reset_connector and not is_cleared:
            self.sojourn.guarded(self.sojourn.after_cache_reset, False)
        return done

    def sojourn_weights_called(self, method: str, what: Any) -> None:
        """Handle the end of a call of ``EngineCore`` that may have changed weights, with its first
        argument."""
        self.sojourn.guarded(self.sojourn.weights_called, method, what)

    def shutdown(self) -> None:
        self.sojourn.guarded(self.sojourn.shutdown)
        super().shutdown()  # type: ignore[misc]

    def sojourn_call(self, operation: str, payload: str) -> str:
        """Answer a call of the API server, in JSON. Errors go back to it."""
        return self.sojourn.call(operation, payload)


class SojournScheduler(SojournMixin, Scheduler):
    """vLLM's synchronous scheduler with sojourn mixed in."""


class SojournAsyncScheduler(SojournMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with sojourn mixed in."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Return the engine's scheduler with sojourn mixed in. Raises ``UnsupportedEngine`` for an untested vLLM
    release, ``UnsupportedModel``, and ``SettingsError`` or ``PresetError`` for a wrong configuration."""
    check_vllm_version(running_vllm())
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UnsupportedModel(
            "this is a diffusion language model; vLLM has a scheduler of its own for these, which sojourn "
            "does not extend. Serve it with --policy stock."
        )
    chosen = SojournAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SojournScheduler
    return chosen(*args, vllm_config=vllm_config, **kwargs)
