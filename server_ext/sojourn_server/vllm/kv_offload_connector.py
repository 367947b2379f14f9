"""KV connector for vLLM that saves KV blocks to host memory and disk, and loads them back.

It needs sojourn's scheduler, which reports to the connector's planner which blocks the device evicts. With
vLLM's own scheduler the connector saves and finds no blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kv_offload.offload_jobs import BlockKey, OffloadJobs, OffloadResults, OffloadStats, RankResults
from ..kv_offload.offload_planner import OffloadPlanner
from .compat import KVConnectorRole
from .kv_connector import GroupBlockIds, KVConnector, MatchedTokens, StepOrders, StepReport
from .kv_connector_settings import NO_CONTEXTS, KVOffloadOptions, KVOffloadSettings, keeps_contexts
from .plugin_settings import read_settings

if TYPE_CHECKING:
    import torch

    from ..kv_offload.offload_worker import DeviceBackend, OffloadWorker
    from .compat import KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig
    from .kv_cache_groups import KVCacheGroups

logger = logging.getLogger("vllm.sojourn")

LoadEnded = Callable[[str, int], None]
"""Called with (name of a load ahead of need, number of its leading blocks that arrived)."""
PAUSE_WAIT_S = 30.0
"""Maximum seconds for which a pause of the engine waits for jobs and for copies from and to the device."""
_AHEAD = "\0ahead:"
"""Beginning of the names of loads ahead of need. No request id begins with it."""

_FIELDS_OF_UNLIKE_LAYERS = (
    "attention_chunk_size", "global_head_dim", "hybrid_layer_pattern", "interleaved_sliding_window",
    "sliding_window_pattern", "swa_num_key_value_heads",
)  # fmt: skip
"""Fields of a model's configuration that only models with several kinds of attention layers have."""


class SojournConnector(KVConnector[OffloadJobs, OffloadResults]):
    """Saves one engine's KV blocks and loads them back. Most attributes exist only on the planner side."""

    settings: KVOffloadSettings
    _worker: OffloadWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = KVOffloadSettings.read(vllm_config, kv_cache_config)
        self._block_size = self.settings.block_tokens
        self._answered: set[str] = set()
        """Worker side: requests whose rejected load has not been reported as ended yet."""
        self._refusal = ""
        """Worker side: why there is no worker, although the settings allow host memory."""
        self._not_filled: set[int] = set()
        """Worker side: ids of device blocks that an ended load did not fill, until vLLM asks for them."""
        if role is KVConnectorRole.SCHEDULER:
            self.planner = OffloadPlanner(self.settings.limits())
            self._rank_results = RankResults(self.settings.ranks)
            self._load_errors: set[int] = set()
            """Ids of device blocks of running loads that at least one worker could not fill."""
            self.traffic = OffloadStats()
            self.off = False
            self.off_because: str | None = None
            if not self.settings.host_slots:
                self.turn_off(self.settings.host_because, logging.WARNING)
            elif not keeps_contexts(kv_cache_config):
                # A load of a context would fill vLLM's placeholder, which all requests share.
                self.turn_off(NO_CONTEXTS)
            elif self.settings.host_because:
                logger.info("sojourn: host memory for KV (auto): %s", self.settings.host_because)
            self.clock = time.monotonic
            self._ordered: dict[str, list[int]] = {}
            """Request → ids of device blocks that the load ordered in this step must fill."""
            self._waiting: set[str] = set()
            """Unfinished requests with a load that has no result yet."""
            self._cancelled: set[str] = set()
            """Requests with a cancelled load that has no result yet."""
            self._ahead: dict[str, LoadEnded] = {}
            """Name of a load ahead of need → the callback for its end."""
            self._ahead_number = 0
            self.is_paused: Callable[[], bool] = lambda: False
            self._pause_waits_since_s: float | None = None
            """Time on ``clock`` since which a pause waits for jobs and copies; -inf if it has given up."""
            self.groups: KVCacheGroups | None = None
            """The scheduler's KV cache groups; ``None`` under vLLM's own."""
            self.windows_missed: Callable[[Sequence[BlockKey]], None] | None = None
            """Only with several groups: called with the keys of the window blocks that a longer prefix needs,
            if a look-up found a shorter one than full attention alone would."""
            self._has_groups = len(kv_cache_config.kv_cache_groups) > 1
            self._group_loads: dict[str, list[int]] = {}
            """With several groups: request → ids of the device blocks that its unreported load fills."""

    # -- planner side -------------------------------------------------------------

    def bind_scheduler(
        self,
        groups: KVCacheGroups,
        clock: Callable[[], float],
        is_paused: Callable[[], bool],
        *,
        strict: bool,
    ) -> None:
        self.groups, self.clock, self.is_paused, self.strict = groups, clock, is_paused, strict

    def _is_off(self) -> bool:
        return self.off

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        if request.request_id in self._cancelled:
            return None, None  # the old load's result would be taken for the result of the new load
        if self._has_groups:
            return self._match_groups(request, computed)
        first = computed // self._block_size
        # At least one token is computed, for its logits.
        keys = request.block_hashes[first : (request.num_tokens - 1) // self._block_size]
        found = self.planner.lookup(request.request_id, keys, self.clock())
        if found is None:
            return None, None
        # vLLM does not accept an asynchronous load of zero tokens.
        return found * self._block_size, MatchedTokens(computed, is_async=found > 0, keys=keys[:found])

    def _match_groups(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        if self.groups is None:
            return 0, None
        context = self.groups.context_keys(request.block_hashes, computed, request.num_tokens - 1)
        is_new = not self.planner.remembers(request.request_id, context)
        tokens = self.planner.lookup_context(request.request_id, context)
        if tokens is None:
            return None, None
        if is_new:  # a request may ask in every step
            self._report_missed_windows(request, tokens)
        found = tokens - context.start_tokens
        return found, MatchedTokens(computed, is_async=found > 0, context=context)

    def _report_missed_windows(self, request: Request, tokens: int) -> None:
        """Call ``windows_missed`` if window blocks are missing behind the ``tokens`` that a look-up found."""
        groups, host = self.groups, self.planner.host
        assert groups is not None
        rest = groups.context_keys(request.block_hashes, tokens, request.num_tokens - 1)
        without = rest.covered_without_windows(lambda key: host.get(key) is not None or groups.is_cached(key))
        if without > tokens and self.windows_missed is not None:
            whole = groups.context_keys(request.block_hashes, 0, without)
            self.windows_missed(whole.window_keys(without))

    def _allocated(
        self, request: Request, block_ids: GroupBlockIds, match: MatchedTokens, external_tokens: int
    ) -> None:
        # For a request that loads, vLLM calls this again at its admission, with no external tokens.
        filled = self._blocks_to_fill(block_ids, match, external_tokens) if external_tokens else []
        keys = match.keys[: len(filled)]
        if match.context is not None and external_tokens:
            keys = [each.key for each in match.context.needed(match.computed + external_tokens)]
        if external_tokens:
            self._reject_fill(request, filled, match)  # rejected unless the next line orders the load
        self.planner.load(request.request_id, keys, filled)

    def _blocks_to_fill(
        self, block_ids: GroupBlockIds, match: MatchedTokens, external_tokens: int
    ) -> list[int]:
        if match.context is None:
            return super()._blocks_to_fill(block_ids, match, external_tokens)
        # In place of the other blocks of a window's group, vLLM has placeholders, which must not be filled.
        needed = match.context.needed(match.computed + external_tokens)
        return [block_ids[each.group][each.place] for each in needed]

    def _reject_fill(self, request: Request, block_ids: list[int], match: MatchedTokens) -> None:
        self._ordered[request.request_id] = block_ids
        self._waiting.add(request.request_id)
        if match.context is not None:
            self._group_loads[request.request_id] = block_ids

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[OffloadJobs]:
        ordered, self._ordered = self._ordered, {}
        if self._pause_waits_since_s is not None and not self.is_paused():
            self._pause_waits_since_s = None
        try:
            jobs = self.planner.take_jobs(spill=not self.off)
        except Exception as error:
            self.handle_failure(error)
            jobs = OffloadJobs(settles=True)  # a load may have been cancelled
        for request_id in jobs.loads.keys() - ordered.keys():
            # This load is from a step whose planning failed. Another request may have its blocks now.
            del jobs.loads[request_id]
        # Without a rejection, a request that no job loads for would wait for ever.
        return StepOrders(
            jobs, {request_id: ids for request_id, ids in ordered.items() if request_id not in jobs.loads}
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle ended loads first, because vLLM may load the same request again in the next step."""
        if connector_output.invalid_block_ids:  # vLLM may repeat block ids of loads that have ended
            self._load_errors |= connector_output.invalid_block_ids & self.planner.loads.blocks()
        for request_id in connector_output.finished_recving or ():
            self._attempt(self._take_loaded, request_id)
        if connector_output.finished_recving:  # vLLM accepts the ids of its own requests only
            connector_output.finished_recving = {
                name for name in connector_output.finished_recving if not name.startswith(_AHEAD)
            }
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.off_because:
            self.turn_off(report.off_because, logging.WARNING)

    def _take_loaded(self, request_id: str) -> None:
        arrived = self.planner.take_loaded(request_id, self._load_errors)
        self._group_loads.pop(request_id, None)
        self._load_errors &= self._loading_blocks()
        if request_id in self._waiting:  # otherwise it was aborted meanwhile
            self._waiting.discard(request_id)
            if request_id in self._ahead:
                self._ahead.pop(request_id)(request_id, arrived)

    def _loading_blocks(self) -> set[int]:
        """Return the device blocks of unreported loads; with several groups, of rejected ones too."""
        if self._has_groups:
            return {block_id for block_ids in self._group_loads.values() for block_id in block_ids}
        return self.planner.loads.blocks()

    def take_failed_requests(self, output: KVConnectorOutput) -> set[str]:
        """Remove failed loads from ``output`` and return the ids of their requests, which the caller must
        queue again. Only with several KV cache groups, where vLLM cannot handle failed blocks itself."""
        failed: set[str] = set()
        if self._has_groups:
            if output.invalid_block_ids:
                self._load_errors |= output.invalid_block_ids & self._loading_blocks()
                output.invalid_block_ids = set()
            for request_id in self._waiting.intersection(output.finished_recving or ()):
                if not self._load_errors.isdisjoint(self._group_loads.get(request_id, ())):
                    failed.add(request_id)
                    self._take_loaded(request_id)
            if failed:  # aborted requests stay reported, because vLLM frees their blocks upon the report
                output.finished_recving = (output.finished_recving or set()) - failed
        return failed

    def load_ahead(self, keys: Sequence[BlockKey], block_ids: list[int], ended: LoadEnded) -> str:
        """Order a load of ``keys``, which ``planner.loadable`` found in this step, into the device blocks
        ``block_ids`` before any request needs them. Return its name. The caller holds the blocks until
        ``ended`` is called with the name and the number of leading blocks that arrived, or it calls
        ``cancel_load_ahead``."""
        self._ahead_number += 1
        name = f"{_AHEAD}{self._ahead_number}"
        self.planner.load_ahead(name, keys, block_ids)
        self._ordered[name] = block_ids
        self._waiting.add(name)
        self._ahead[name] = ended
        return name

    def cancel_load(self, request_id: str) -> None:
        """Cancel the load of a request that gives up its blocks. They may be freed at once: the worker ends
        its writes to them before the next step computes."""
        unanswered = request_id in self._waiting
        self._waiting.discard(request_id)
        self._ahead.pop(request_id, None)
        if self.planner.cancel_load(request_id) or unanswered:
            self._cancelled.add(request_id)

    def cancel_load_ahead(self, name: str) -> None:
        """Cancel a load ahead of need, even if a step has already begun it. Its callback is not called."""
        if self._ordered.pop(name, None) is not None and self.planner.withdraw_load(name):
            self._waiting.discard(name)
            del self._ahead[name]
        else:
            self.cancel_load(name)

    def drop_cancelled(self, output: KVConnectorOutput) -> None:
        if not self._cancelled:
            return
        # Remove the failed blocks of cancelled loads, because other requests may have these blocks now. This
        # is done in every step, because one worker may report a failure several steps before the last worker
        # answers. A block that another load also fills stays, because the other load may have failed too.
        loading = self.planner.loads.blocks()
        output.invalid_block_ids -= loading - self.planner.loads.blocks(without=self._cancelled)
        answered = self._cancelled & (output.finished_recving or set())
        if answered:
            output.finished_recving = (output.finished_recving or set()) - answered
            self._cancelled -= answered
            for request_id in answered:
                self.planner.take_loaded(request_id)
                self._group_loads.pop(request_id, None)
            self._load_errors &= self._loading_blocks()

    def _take_results(self, results: list[OffloadResults]) -> None:
        combined = self._rank_results.add(results)
        self.traffic.add(combined, self.clock())
        self.planner.take_results(combined)

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # vLLM frees the blocks at once. Sojourn saves useful content when they are reused, or earlier.
        # The load of an aborted request ends as usual, and vLLM frees its blocks then.
        self._waiting.discard(request.request_id)
        self.planner.abandon(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must run a step even without requests: while jobs are planned, a load ahead of
        need exists, or, in a pause, copies from and to the device run. After it vLLM may unmap the device's
        KV (``/sleep``). A pause waits at most ``PAUSE_WAIT_S``. If the connector is off, only loads ahead of
        need count, because results of other jobs may have been lost."""
        planner, paused, pending = self.planner, self.is_paused(), bool(self._ahead)
        if not self.off:
            copies = paused and (planner.storing_blocks or len(planner.loads))
            pending = pending or bool(copies) or planner.has_jobs
        if not (paused and pending):
            self._pause_waits_since_s = None
            return pending
        now = self.clock()
        if self._pause_waits_since_s is None:
            self._pause_waits_since_s = now
        if now - self._pause_waits_since_s < PAUSE_WAIT_S:
            return True
        if self._pause_waits_since_s > -math.inf:
            self._pause_waits_since_s = -math.inf
            logger.warning(
                "sojourn: a pause has waited %.0f s and goes on, but jobs or copies of KV have not ended; if "
                "vLLM unmaps the KV now (/sleep), a copy may fail and end the engine",
                PAUSE_WAIT_S,
            )
        return False

    def reset_cache(self) -> bool:
        """Forget all KV so far, and stop using the disk until a restart."""
        if self.settings.options.disk is not None and not self.planner.disk.closed:
            logger.warning(
                "sojourn: the prefix cache was reset, usually because of new weights. Until it restarts, "
                "this engine reads and writes no KV in %s",
                self.settings.options.disk,
            )
        self._attempt(self.planner.forget)
        return True

    def turn_off(self, why: str, level: int = logging.ERROR) -> None:
        """Save and find no more blocks, because evictions are not reported, or wrongly. A waiting request
        still loads the blocks found for it earlier, because they are correct. ``why``: for the log and
        ``off_because``."""
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
        """Return the worker's results, or once why there is no host memory."""
        refusal, self._refusal = self._refusal, ""
        if refusal:
            return StepReport(OffloadResults(), off_because=refusal)
        return super().build_connector_worker_meta()

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
        worker = OffloadWorker(memory, *settings.open_disk(memory.block_bytes, len(kv_caches)))
        disk = "no disk"
        if settings.options.disk:
            disk = f"disk {settings.options.disk} for {settings.disk_blocks} blocks"
            disk += f", {worker.on_disk} stored by earlier runs"
            if settings.disk_name is not None:
                disk += f"; as {settings.disk_name}, and other engines' stores there are read"
        logger.info(
            "sojourn: room for %d blocks of %d bytes in host memory, %s",
            settings.host_slots, memory.block_bytes, disk,
        )  # fmt: skip
        return worker

    def _begin_step(self, orders: StepOrders[OffloadJobs]) -> None:
        for request_id, block_ids in orders.rejected.items():
            self._reject(request_id, block_ids)
        if self._worker is None:
            return  # there is no host memory, and the planner knows it
        try:
            self._worker.begin_step(orders.jobs)
        except Exception:
            logger.exception("sojourn: the worker could not begin a step; its loads are computed instead")
            begun = self._worker.loading
            for request_id, copies in orders.jobs.loads.items():
                if request_id not in begun:
                    self._reject(request_id, (copy.block_id for copy in copies))

    def _reject(self, request_id: str, block_ids: Iterable[int]) -> None:
        self._answered.add(request_id)
        self._not_filled.update(block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        answered, self._answered = self._answered, set()
        if self._worker is not None:
            loaded, not_filled = self._worker.take_loaded()
            answered |= loaded
            self._not_filled |= not_filled
        return None, answered or None

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


def open_device_backend(kv_caches: dict[str, torch.Tensor], blocks: int, slots: int) -> DeviceBackend:
    """Return a backend that copies blocks between the device's ``blocks`` in ``kv_caches`` (KV tensors by
    layer) and host memory of ``slots`` blocks. Raises ``UnsupportedKvCaches`` for another kind of device or
    an unknown layout, and ``RuntimeError`` if CUDA cannot pin the host memory."""
    from ..kv_offload.cpu_device_backend import CpuDeviceBackend
    from ..kv_offload.cuda_device_backend import CudaDeviceBackend, TorchCuda
    from ..kv_offload.kv_pages import KvPages, UnsupportedKvCaches, merge_neighbours, page_views

    views: dict[tuple[int, int], torch.Tensor] = {}
    for name, cache in kv_caches.items():
        for view in page_views(name, cache, blocks):
            views.setdefault((view.data_ptr(), view.shape[1]), view)  # layers may share a tensor
    device = next(iter(views.values())).device
    if device.type == "cpu":
        return CpuDeviceBackend([view.numpy() for view in views.values()], slots)
    if device.type != "cuda":
        raise UnsupportedKvCaches(f"KV on {device}; expected a CUDA device or a CPU")
    from .compat import swap_blocks_batch

    pages = [KvPages(view.data_ptr(), view.stride(0), view.shape[1]) for view in views.values()]
    return CudaDeviceBackend(merge_neighbours(pages), slots, TorchCuda(device, swap_blocks_batch))


def copy_wait_s(output: KVConnectorOutput) -> float:
    """Return the seconds that a step waited for copies under ``SojournConnector``: the most of all
    workers."""
    report = output.kv_connector_worker_meta
    results = report.of_all if isinstance(report, StepReport) else []
    return max((each.waited_s for each in results if isinstance(each, OffloadResults)), default=0.0)
