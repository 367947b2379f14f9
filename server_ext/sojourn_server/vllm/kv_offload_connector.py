"""KV connector for vLLM that saves KV blocks to host memory and disk, and loads them back.

It needs sojourn's scheduler, which reports to the connector's planner which blocks the device evicts. With
vLLM's own scheduler the connector saves and finds no blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..kv_offload.context_keys import NeededBlock
from ..kv_offload.offload_jobs import OffloadJobs, OffloadResults, WorkerReports
from ..kv_offload.offload_scheduler import AHEAD, OffloadScheduler
from .compat import KVConnectorRole
from .kv_connector import BlockIds, KVConnector, MatchedTokens, StepOrders, StepReport
from .kv_connector_settings import NO_CONTEXTS, KVOffloadOptions, KVOffloadSettings, keeps_contexts
from .plugin_settings import read_settings

if TYPE_CHECKING:
    import torch

    from ..kv_offload.offload_worker import DeviceBackend, OffloadWorker
    from .compat import KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig
    from .kv_cache_groups import KVCacheGroups

logger = logging.getLogger("vllm.sojourn")

PAUSE_WAIT_S = 30.0
"""Maximum seconds for which a pause of the engine waits for jobs and for copies from and to the device."""

_FIELDS_OF_UNLIKE_LAYERS = (
    "attention_chunk_size", "global_head_dim", "hybrid_layer_pattern", "interleaved_sliding_window",
    "sliding_window_pattern", "swa_num_key_value_heads",
)  # fmt: skip
"""Fields of a model's configuration that only models with several kinds of attention layers have."""


class SojournConnector(KVConnector[OffloadJobs, OffloadResults]):
    """Saves one engine's KV blocks and loads them back. Most attributes exist only on the planner side."""

    settings: KVOffloadSettings
    planner: OffloadScheduler
    _worker: OffloadWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = KVOffloadSettings.read(vllm_config, kv_cache_config)
        self._refusal = ""
        """Worker side: why there is no worker, although the settings allow host memory."""
        self._not_filled: set[int] = set()
        """Worker side: ids of device blocks that an ended load did not fill, until vLLM asks for them."""
        if role is KVConnectorRole.SCHEDULER:
            self.planner = OffloadScheduler(self.settings.limits())
            self.traffic = WorkerReports(self.settings.ranks)
            self.off_because: str | None = None
            if not self.settings.host_slots:
                self.turn_off(self.settings.host_because, logging.WARNING)
            elif not keeps_contexts(kv_cache_config):
                # A load of a context would fill vLLM's placeholder, which all requests share.
                self.turn_off(NO_CONTEXTS)
            elif self.settings.host_because:
                logger.info("sojourn: host memory for KV (auto): %s", self.settings.host_because)
            self.clock = time.monotonic
            self.is_paused: Callable[[], bool] = lambda: False
            self._pause_waits_since_s: float | None = None
            """Time on ``clock`` since which a pause waits for jobs and copies."""
            self.groups: KVCacheGroups | None = None
            """The scheduler's KV cache groups; ``None`` under vLLM's own."""
            self.load_ahead_ended: Callable[[str, int], None] = lambda name, arrived: None
            """Called with (name of a load ahead of need, number of its leading blocks that arrived)."""

    # -- planner side -------------------------------------------------------------

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        if self.groups is None:
            return 0, None
        # At least one token is computed, for its logits.
        context = self.groups.context_keys(request.block_hashes, computed, request.num_tokens - 1)
        found = self.planner.lookup(request.request_id, context, self.clock())
        if found is None:
            return None, None
        # vLLM does not accept an asynchronous load of zero tokens.
        return found, MatchedTokens(computed, is_async=found > 0, context=context)

    def _allocated(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        # For a request that loads, vLLM calls this again at its admission, with no external tokens.
        needed: list[NeededBlock] = []
        if tokens:
            assert match.context is not None
            # In place of other blocks of a window's group, vLLM has placeholders, which must not be filled.
            needed = list(match.context.needed(match.computed + tokens))
        filled = [block_ids[each.group][each.place] for each in needed]
        self.planner.load(request.request_id, [each.key for each in needed], filled)

    def _reject_fill(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        self.planner.reject(request.request_id, [each for group in block_ids for each in group])

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[OffloadJobs]:
        if self._pause_waits_since_s is not None and not self.is_paused():
            self._pause_waits_since_s = None
        try:
            return StepOrders(self.planner.take_jobs(spill=not self.off))
        except Exception as error:
            self.handle_failure(error)
            return StepOrders(self.planner.reject_loads())

    def end_loads(self, output: KVConnectorOutput) -> set[str]:
        """Handle ended loads, before vLLM handles ``output``. Return those to queue again: their load failed.

        Failed and cancelled loads, and those ahead of need, are removed from ``output``, and so are the ids
        of blocks that they did not fill: other requests may have these blocks now, and with several KV cache
        groups vLLM cannot handle them. Those that a pair's transfers did not fill stay. Aborted requests
        stay, because vLLM frees their blocks upon the report."""
        reported = output.finished_recving or set()
        if not reported and not output.invalid_block_ids:
            return set()
        own = {each for load in self.planner.loads.values() for each in load.block_ids}
        ended = self.attempt(self.planner.end_loads, reported, output.invalid_block_ids)
        if ended is None:
            for name in reported:  # no request's blocks may wait for it any more
                self.planner.loads.pop(name, None)
            output.finished_recving = {name for name in reported if not name.startswith(AHEAD)}
            return set()
        failed: set[str]
        output.finished_recving, failed, ahead = ended
        output.invalid_block_ids = output.invalid_block_ids - own
        if isinstance(report := output.kv_connector_worker_meta, StepReport):
            output.invalid_block_ids |= report.not_filled
        for name, arrived in ahead.items():
            self.attempt(self.load_ahead_ended, name, arrived)
        return failed

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.off_because:
            self.turn_off(report.off_because, logging.WARNING)

    def _take_results(self, results: list[OffloadResults]) -> None:
        self.planner.take_results(self.traffic.add(results, self.clock()))

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # vLLM frees the blocks at once, or if the request still loads, when the load ends as usual.
        self.planner.abandon(request.request_id)
        return self._is_loading(request.request_id), None

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even without requests: while jobs are planned, a load ahead of
        need exists, or, in a pause, copies from and to the device run. After it vLLM may unmap the device's
        KV (``/sleep``). A pause waits at most ``PAUSE_WAIT_S``. If the connector is off, only loads ahead of
        need count, because results of other jobs may have been lost."""
        planner, paused, now = self.planner, self.is_paused(), self.clock()
        copies = paused and bool(planner.storing_blocks or planner.loads)
        ahead = any(name.startswith(AHEAD) and planner.is_loading(name) for name in planner.loads)
        pending = ahead or (not self.off and (copies or planner.has_jobs))
        if not (paused and pending):
            self._pause_waits_since_s = None
            return pending
        if self._pause_waits_since_s is None:
            self._pause_waits_since_s = now
        if now - self._pause_waits_since_s < PAUSE_WAIT_S:
            return True
        self._failure_log.log(
            logging.WARNING,
            "sojourn: a pause has waited %.0f s and goes on, but jobs or copies of KV have not ended; if "
            "vLLM unmaps the KV now (/sleep), a copy may fail and end the engine",
            PAUSE_WAIT_S,
        )
        return False

    def reset_cache(self) -> bool:
        """Forget all KV so far, and stop using the disk until a restart."""
        if self.settings.options.disk is not None and not self.planner.disk.is_closed:
            logger.warning(
                "sojourn: the prefix cache was reset, usually because of new weights. Until it restarts, "
                "this engine reads and writes no KV in %s",
                self.settings.options.disk,
            )
        self.attempt(self.planner.forget)
        return True

    def turn_off(self, why: str, level: int = logging.ERROR) -> None:
        """Save and find no more blocks, because evictions are not reported, or wrongly. A waiting request
        still loads the blocks found for it earlier: they are correct. ``why``: for ``off_because``."""
        if not self.off:
            self.off, self.off_because = True, why
            logger.log(level, "sojourn: tiers below the device are off: %s", why)

    def _disable(self, error: Exception) -> None:
        self.turn_off(f"an internal error of sojourn ({type(error).__name__})")

    # -- worker side ------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the setting ``kv_layout``, before vLLM makes the connector; ``None`` for vLLM's choice, if
        the model's layers may differ, and on ROCm, where a kernel needs layers outermost without declaring
        it. If an attention backend does not support the layout, vLLM warns and uses another one."""
        from .compat import current_platform

        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "kv_layout" not in given or current_platform.is_rocm() or _layers_may_differ(vllm_config):
            return None
        return read_settings(given, KVOffloadOptions, "connector setting").kv_layout

    def build_connector_worker_meta(self) -> StepReport[OffloadResults] | None:
        """Return the worker's results, and why host memory must not be used, if that is so."""
        report, why, self._refusal = super().build_connector_worker_meta(), self._refusal, ""
        if self._worker is not None and self._worker.is_broken:
            why = "a copy of KV to host memory has failed"
        if why:
            report = report or StepReport(OffloadResults())
            report.off_because = why
        return report

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> OffloadWorker | None:
        from ..kv_offload.kv_pages import UnsupportedKvCaches, device_layout
        from ..kv_offload.offload_worker import OffloadWorker

        settings = self.settings
        if not settings.host_slots:
            return None
        try:
            memory = open_device_backend(kv_caches, settings.blocks, settings.host_slots)
        except (UnsupportedKvCaches, RuntimeError) as error:
            if settings.options.disk is not None or not settings.host_because:
                raise
            self._refusal = str(error)
            return None
        # Files outlive the engine, and the next one may have another attention backend.
        settings = settings.with_layout(device_layout(kv_caches, settings.blocks))
        store, disk = settings.open_disk(memory.block_bytes, len(kv_caches)), "no disk"
        if store is not None:
            disk = f"disk {store.path} for {settings.disk_blocks} blocks, which has {store.blocks}"
        logger.info(
            "sojourn: room for %d blocks of %d bytes in host memory, %s",
            settings.host_slots, memory.block_bytes, disk,
        )  # fmt: skip
        return OffloadWorker(memory, store)

    def _begin_step(self, orders: StepOrders[OffloadJobs]) -> None:
        if self._worker is None:
            return  # there is no host memory, and the planner knows it
        try:
            self._worker.begin_step(orders.jobs)
        except Exception:
            logger.exception("sojourn: the worker could not begin a step; its loads are computed instead")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        loaded, not_filled = self._worker.take_loaded()
        self._not_filled |= not_filled
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        not_filled, self._not_filled = self._not_filled, set()
        return not_filled


def _layers_may_differ(vllm_config: VllmConfig) -> bool:
    """Return whether layers, including those of a draft model, may have KV of different sizes per block. With
    blocks outermost, vLLM would put such layers into one group, which this connector cannot use; with layers
    outermost, all layers get pages of one size."""
    text = vllm_config.model_config.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    return (
        vllm_config.speculative_config is not None
        or len(set(kinds)) > 1
        or any(getattr(text, name, None) is not None for name in _FIELDS_OF_UNLIKE_LAYERS)
    )


def open_device_backend(
    kv_caches: dict[str, torch.Tensor], blocks: int, slots: int, *, by_layer: bool = False
) -> DeviceBackend:
    """Return a backend that copies blocks between the device's ``blocks`` in ``kv_caches`` (KV tensors by
    layer) and host memory of ``slots`` blocks; with ``by_layer``, of one layer each. Raises
    ``UnsupportedKvCaches`` for another kind of device or an unknown layout, and ``RuntimeError`` if CUDA
    cannot pin the host memory."""
    from ..kv_offload.cpu_device_backend import CpuDeviceBackend
    from ..kv_offload.cuda_device_backend import CudaDeviceBackend, TorchCuda
    from ..kv_offload.kv_pages import KvPages, UnsupportedKvCaches, merge_neighbours, page_views

    layers = [page_views(name, cache, blocks) for name, cache in kv_caches.items()]
    # Layers may share a tensor.
    views = {(view.data_ptr(), view.shape[1]): view for layer in layers for view in layer}
    device = next(iter(views.values())).device
    if device.type == "cpu":
        if by_layer and any(len(layer) > 1 for layer in layers):
            raise UnsupportedKvCaches("a layer's part of a block lies in several places; expected one")
        rows = [layer[0] for layer in layers] if by_layer else views.values()
        return CpuDeviceBackend([view.numpy() for view in rows], slots, by_layer=by_layer)
    if device.type != "cuda":
        raise UnsupportedKvCaches(f"KV on {device}; expected a CUDA device or a CPU")
    from .compat import swap_blocks_batch

    def pages(of: Iterable[torch.Tensor]) -> list[KvPages]:
        return [KvPages(view.data_ptr(), view.stride(0), view.shape[1]) for view in of]

    places = [*map(pages, layers)] if by_layer else merge_neighbours(pages(views.values()))
    return CudaDeviceBackend(places, slots, TorchCuda(device, swap_blocks_batch))
