"""KV connector for vLLM that transfers KV to and from a shared store and other engines (DualPath §4).

Prefill and decode engines use the same class. A request's ``kv_transfer_params`` select its transfers
(``kv_transfer.transfer_request`` explains them). The connector also works with vLLM's own scheduler.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..kv_transfer.rank_transfers import jobs_of_rank
from ..kv_transfer.transfer_jobs import WANT_INTERVAL_S, TransferJobs, TransferResults
from ..kv_transfer.transfer_planner import TransferPlanner
from ..kv_transfer.transfer_request import ScheduledRequest
from .compat import KVConnectorRole, KVConnectorStats
from .kv_connector import GroupBlockIds, KVConnector, MatchedTokens, StepOrders
from .kv_connector_settings import KVTransferSettings
from .pair_status_reporter import PairStatusReporter, reachable_address
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    import torch

    from ..kv_offload.cpu_device_backend import KvBlockArrays
    from ..kv_offload.cuda_block_arrays import CudaBlockArrays
    from ..kv_offload.shared_store import SharedStore
    from ..kv_transfer.transfer_manager import TransferManager
    from ..kv_transfer.transfer_stats import StatsServer
    from ..kv_transfer.transfer_worker import TransferWorker
    from .compat import BlockPool, KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig

logger = logging.getLogger("vllm.sojourn")

GIB = 1 << 30

CLOSE_S = 10.0
"""Maximum seconds that ``shutdown`` waits if the transfer manager is being closed already."""

COMPLETED_STATUSES = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Final statuses of requests that completed their output."""


@dataclass
class KVTransferStats(KVConnectorStats):
    """Seconds that steps spent in KV transfers. vLLM logs them as "KV Transfer metrics: waited_s=…"."""

    data: dict[str, float] = field(default_factory=dict)
    """The fields of ``TransferStepTimes``, by name."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the sums in ``other`` to this object, and return this object."""
        for name, seconds in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + seconds
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums, rounded to 0.1 ms, for a line of vLLM's log."""
        return {name: round(seconds, 4) for name, seconds in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PathsConnector(KVConnector[TransferJobs, TransferResults]):
    """Transfers KV from and to a shared store, and between the engines of a prefill/decode pair."""

    settings: KVTransferSettings
    _worker: TransferWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = KVTransferSettings.read(vllm_config, kv_cache_config)
        self._requests: dict[str, Request] = {}
        self._traffic: TransferManager | None = None
        self._store: SharedStore | None = None
        self._kv: CudaBlockArrays | None = None
        """Object that copies the device's blocks and must be closed; ``None`` on a CPU."""
        self._closing: threading.Thread | None = None
        self._stats_server: StatsServer | None = None
        """Worker side: the server of ``status``; ``None`` until another process needs it."""
        self._off = False
        """Planner side: whether the connector is off, because the cache was reset."""
        self._stop_sent = False
        self._pool: BlockPool | None = None
        """vLLM's block pool; ``None`` if a reset of the pool alone must not turn the connector off."""
        self._cached: object = None
        """Hash table of ``_pool`` at the start. A reset of the pool replaces the table by a new one."""
        self.clock = time.monotonic
        self.next_requests: Callable[[int], Iterable[Request]] = lambda most: ()
        """Returns requests from the front of the queue, in queue order, at most the given number."""
        self._queue_read_s = -math.inf
        if role is KVConnectorRole.SCHEDULER:
            self.planner = TransferPlanner(
                block_tokens=self.settings.block_tokens,
                blocks_per_full=self.settings.per_full,
                saves=self.settings.options.save,
                ranks=self.settings.ranks,
                concurrent_steps=self.settings.concurrent_steps,
            )
            self.pair_status = PairStatusReporter(self.settings, self.planner.counts)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return true: layers are loaded and sent one by one, and a full CUDA graph cannot wait for a
        layer."""
        return True

    # -- planner side -------------------------------------------------------------

    def bind_scheduler(
        self, clock: Callable[[], float], next_requests: Callable[[int], Iterable[Request]]
    ) -> None:
        """Take the clock and the queue of sojourn's scheduler. Its queue is not in order of arrival."""
        self.clock, self.next_requests = clock, next_requests

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep vLLM's block pool to detect its resets. vLLM does not report a reset of the pool alone to
        connectors."""
        if not self.settings.options.keep_on_reset:
            self._pool, self._cached = gpu_block_pool, gpu_block_pool.cached_block_hash_to_block

    def on_new_request(self, request: Request) -> None:
        """Handle a request that has joined the queue. Invalid ``kv_transfer_params`` are logged."""
        if self._is_off():
            return
        self._requests[request.request_id] = request
        wrong = self._attempt(self.planner.arrived, request)
        if wrong is not None:
            logger.warning("sojourn: kv_transfer_params of %s: %s", request.request_id, wrong)

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        found = self.planner.ask(request.request_id, computed)
        return found.tokens, MatchedTokens(computed, found.is_async)

    def _allocated(
        self, request: Request, block_ids: GroupBlockIds, match: MatchedTokens, external_tokens: int
    ) -> None:
        self.planner.allocated(request.request_id, block_ids[0], external_tokens)

    def _reject_fill(self, request: Request, block_ids: list[int], match: MatchedTokens) -> None:
        self.planner.reject_fill(request.request_id, block_ids, match.is_async)

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[TransferJobs]:
        if self._is_off():
            return self._final_orders()
        self._attempt(self._plan_saves, scheduler_output)
        self._attempt(self._order_wants)
        return StepOrders(self.planner.take_jobs())

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> None:
        state = scheduler_output.kv_connector_block_state
        step = [
            ScheduledRequest(request_id, self._requests[request_id].num_computed_tokens + count)
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
            if request_id in self._requests
        ]
        if step and state is not None:
            # A request's list of block ids is long. The planner reads it only if there is KV to save.
            self.planner.scheduled(step, lambda request_id: state.resolve_block_ids(request_id)[0])

    def _order_wants(self) -> None:
        now_s = self.clock()
        if self.planner.wanted > 1 and now_s - self._queue_read_s >= WANT_INTERVAL_S:
            self._queue_read_s = now_s
            # A context takes at least one slot, so more requests than slots do not fit in the buffers.
            queue = self.next_requests(self.settings.limits.slots)
            self.planner.order_wants(request.request_id for request in queue)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle the results of earlier jobs."""
        for request_id in connector_output.finished_recving or ():
            self._attempt(self.planner.filled, request_id)
        super().update_connector_output(connector_output)

    def _take_results(self, results: list[TransferResults]) -> None:
        for each in results:
            self.planner.take_results(each)

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        completed = request.status.name in COMPLETED_STATUSES and not self._is_off()
        return self.planner.finished(request.request_id, completed, block_ids)

    def has_pending_push_work(self) -> bool:
        """Return whether jobs wait for a step. If so, vLLM runs a step even without requests."""
        return self.planner.has_jobs or (self._is_off() and not self._stop_sent)

    def reset_cache(self) -> bool:
        """Turn the connector off until the engine restarts: a reset may mean new weights. Return true.

        From now on this engine neither shares its KV nor uses shared KV. The store is kept, because other
        engines use it too.
        """
        self._turn_off()
        return True

    def _is_off(self) -> bool:
        pool = self._pool
        if not self._off and pool is not None and pool.cached_block_hash_to_block is not self._cached:
            self._turn_off()
        return self._off

    def _turn_off(self) -> None:
        """Turn the connector off until the engine restarts.

        Steps that are planned already keep their jobs. This is safe, because the worker carries these steps
        out before it loads new weights. Their jobs transfer KV of the old weights under the old keys.
        """
        if self._off:
            return
        self._off = self.pair_status.has_left_pair = True
        self._pool = self._cached = None
        logger.error(
            "sojourn: the prefix cache was reset, usually because of new weights. Until it restarts, this "
            "engine computes all its KV: it reads and writes none in %s, and exchanges none with peers",
            self.settings.options.store,
        )
        self._attempt(self.planner.abandon)

    def _final_orders(self) -> StepOrders[TransferJobs]:
        """Return a step's orders while the connector is off. Their jobs only release resources, and fill
        blocks that vLLM already expects. The first orders also make the worker close its links to peers."""
        jobs = self.planner.take_jobs()
        jobs.wants, jobs.fetches, jobs.expects = [], [], []
        jobs.pushes, jobs.saves = [], []
        stop, self._stop_sent = not self._stop_sent, True
        return StepOrders(jobs, stop=stop)

    def _disable(self, error: Exception) -> None:
        self.planner.abandon()

    # -- worker side ------------------------------------------------------------------

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> TransferWorker:
        from ..kv_offload.cpu_device_backend import KvBlockArrays
        from ..kv_transfer.block_saver import MAX_HELD_SHARE
        from ..kv_transfer.transfer_manager import TransferManager
        from ..kv_transfer.transfer_worker import TransferWorker

        settings = self.settings
        kv, layout = open_kv_blocks(kv_caches, settings.blocks, settings.per_full)
        settings = self.settings = settings.with_layout(layout)
        if kv.block_bytes != settings.identity.block_bytes or len(kv) != settings.identity.layers:
            raise SettingsError(
                f"the engine's KV has {len(kv)} layers and Full Blocks of {kv.block_bytes} bytes; its "
                f"settings say {settings.identity.layers} and {settings.identity.block_bytes}"
            )
        self._kv = None if isinstance(kv, KvBlockArrays) else kv
        self._store = settings.open_store()
        self._traffic = TransferManager(
            self._store,
            settings.limits,
            name=settings.options.store_name or settings.listen,
            listen=[settings.listen],
        )
        worker = TransferWorker(
            self._traffic,
            self._store.leading,
            kv,
            slots=settings.limits.slots,
            log=lambda what, error: logger.error("sojourn: could not %s", what, exc_info=error),
            strict=self.strict,
            layerwise=settings.ranks == settings.concurrent_steps == 1,
            concurrent_steps=settings.concurrent_steps,
            max_held_blocks=int(MAX_HELD_SHARE * settings.blocks),
            patience_s=settings.limits.patience_s,
        )
        logger.info(
            "sojourn: peers reach this engine at %s; buffers for %d Full Blocks of %d tokens and %d bytes; "
            "store in %s",
            ", ".join(self._traffic.addresses), settings.limits.slots, settings.identity.block_tokens,
            kv.block_bytes, settings.options.store,
        )  # fmt: skip
        needed = settings.needed_buffer_bytes
        if needed:
            logger.warning(
                "sojourn: the longest prompt needs %d Full Blocks, but the buffers hold %d. Prompts that do "
                "not fit are computed again on the decode engine. To fit all prompts, set "
                "--kv-buffer-gib %.1f (buffer_bytes %d)",
                settings.longest_blocks, settings.limits.slots, math.ceil(needed / GIB * 10) / 10, needed,
            )  # fmt: skip
        return worker

    def _begin_step(self, orders: StepOrders[TransferJobs]) -> None:
        if orders.stop and self._traffic is not None and self._closing is None:
            # Closing waits for the manager's threads, which a store that hangs may block.
            self._closing = threading.Thread(
                target=self._traffic.close, name="sojourn-paths-end", daemon=True
            )
            self._closing.start()
        if self._worker is not None:
            settings = self.settings
            self._worker.begin_step(jobs_of_rank(orders.jobs, settings.identity.tp_rank, settings.ranks))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer's KV is loaded. vLLM calls this when the forward pass reaches the layer."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Send a computed layer to the peers that wait for it. vLLM calls this after each layer."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Wait until the KV that this step pushes and saves is copied. Then start the step's fill jobs. vLLM
        calls this after the forward pass, and in steps without one. After this call, vLLM may reuse the
        step's blocks."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (ids of ended requests whose blocks vLLM may free now, ids of requests whose load has
        ended)."""
        if self._worker is None:
            return None, None
        return self._worker.take_sent(), self._worker.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the ids of blocks that were not filled since the last call."""
        return self._worker.take_not_filled() if self._worker is not None else set()

    def get_kv_connector_stats(self) -> KVTransferStats | None:
        """Return the seconds that steps since the last call spent in KV transfers, for vLLM's log; ``None``
        if there was no such step."""
        times = self._worker.take_times() if self._worker is not None else None
        return KVTransferStats(data=asdict(times)) if times else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTransferStats:
        """Return statistics made from the ``data`` that another process has sent."""
        return KVTransferStats(data=data or {})

    def status(self) -> dict[str, Any] | None:
        """Return the status of the worker's transfer manager; ``None`` before it starts, and once it closes
        after a reset of the cache."""
        from ..kv_transfer.transfer_stats import transfer_manager_stats

        traffic, worker = self._traffic, self._worker
        if traffic is None or worker is None or self._closing is not None:
            return None
        document = transfer_manager_stats(traffic, worker.counts)
        return {**document, "addresses": [reachable_address(address) for address in document["addresses"]]}

    def stats_address(self) -> str | None:
        """Return the address at which other processes of this machine get ``status``; ``None`` if no socket
        could be opened. The first call starts the server."""
        from ..kv_transfer.transfer_stats import StatsServer

        if self._stats_server is None:
            try:
                self._stats_server = StatsServer(self.status)
            except OSError as error:
                logger.warning(
                    "sojourn: no socket could be opened for the status of KV transfers", exc_info=error
                )
                return None
        return self._stats_server.address

    def shutdown(self) -> None:
        """Close the worker, the transfer manager, the store and the status server."""
        if self._stats_server is not None:
            self._stats_server.close()
        super().shutdown()
        if self._kv is not None:
            self._kv.close()
        if self._closing is not None:
            self._closing.join(CLOSE_S)
        if self._traffic is not None:
            self._traffic.close()
        if self._store is not None:
            self._store.close()


def open_kv_blocks(
    kv_caches: dict[str, torch.Tensor], blocks: int, per_full: int
) -> tuple[KvBlockArrays | CudaBlockArrays, str]:
    """Return (object that copies blocks of the KV tensors layer by layer, text that identifies the order of
    bytes in a block). The text is empty on a CPU. ``kv_caches``: KV tensors by layer. ``blocks``: number of
    blocks on the device. ``per_full``: number of engine blocks per Full Block.

    Raises ``UnsupportedKvCaches`` for another kind of device or an unknown layout, and ``RuntimeError`` if
    CUDA cannot pin host memory.
    """
    from ..kv_offload.cpu_device_backend import KvBlockArrays, block_rows
    from ..kv_offload.cuda_block_arrays import CudaBlockArrays
    from ..kv_offload.cuda_device_backend import TorchCuda
    from ..kv_offload.kv_pages import KvPages, UnsupportedKvCaches, device_layout, page_views

    device = next(iter(kv_caches.values())).device
    if device.type == "cpu":
        rows = {name: block_rows(name, cache, blocks) for name, cache in kv_caches.items()}
        return KvBlockArrays(rows, per_full), ""
    if device.type != "cuda":
        raise UnsupportedKvCaches(f"KV on {device}; expected a CUDA device or a CPU")
    from .compat import swap_blocks_batch

    pages = {
        name: [
            KvPages(view.data_ptr(), view.stride(0), view.shape[1])
            for view in page_views(name, cache, blocks)
        ]
        for name, cache in kv_caches.items()
    }
    layout = device_layout(kv_caches, blocks)
    return CudaBlockArrays(pages, per_full, TorchCuda(device, swap_blocks_batch)), layout
