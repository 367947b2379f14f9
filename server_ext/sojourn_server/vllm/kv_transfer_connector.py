"""KV connector for vLLM that transfers KV to and from a shared store and other engines (DualPath §4).

Prefill and decode engines use the same class. A request's ``kv_transfer_params`` select its transfers
(``kv_transfer.transfer_request`` explains them). The connector also works with vLLM's own scheduler.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..core.engine_service import KVTransferStatus
from ..kv_transfer.rank_transfers import combined_status, jobs_of_rank
from ..kv_transfer.transfer_jobs import TransferJobs, TransferResults
from ..kv_transfer.transfer_manager import TransferManager, fetch_stats
from ..kv_transfer.transfer_planner import TransferPlanner
from ..metrics.metrics_recorder import MetricsRecorder
from .compat import KVConnectorRole
from .kv_connector import BlockIds, KVConnector, MatchedTokens, StepOrders
from .kv_connector_settings import GIB, KVTransferSettings
from .kv_offload_connector import open_device_backend
from .plugin_settings import SettingsError

if TYPE_CHECKING:
    import torch

    from ..kv_offload.kv_block_arrays import KvBlockArrays
    from ..kv_transfer.transfer_worker import TransferWorker
    from .compat import BlockPool, KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig

logger = logging.getLogger("vllm.sojourn")

CLOSE_S = 10.0
"""Maximum seconds that ``shutdown`` waits if the transfer manager is being closed already."""

NON_NUMERIC_KEYS = ("addresses", "peer", "epoch", "stats_address")

WILDCARDS = ("0.0.0.0", "[::]", "::")
"""Hosts at which an engine can listen but which peers cannot dial."""

COMPLETED_STATUSES = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class PathsConnector(KVConnector[TransferJobs, TransferResults]):
    """Transfers KV from and to a shared store, and between the engines of a prefill/decode pair."""

    settings: KVTransferSettings
    planner: TransferPlanner
    _worker: TransferWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = KVTransferSettings.read(vllm_config, kv_cache_config)
        self._requests: dict[str, Request] = {}
        self._traffic: TransferManager | None = None
        self._closing: threading.Thread | None = None
        self._stats_address = ""
        self._stop_sent = False
        self._pool: BlockPool | None = None
        """vLLM's block pool; ``None`` if a reset of the pool alone must not turn the connector off."""
        self._cached: object = None
        """Hash table of ``_pool`` at the start. A reset of the pool replaces the table by a new one."""
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
        """Return true: a full CUDA graph cannot wait for a layer's KV."""
        return True

    # -- planner side -------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep vLLM's block pool to detect its resets, which vLLM does not report to connectors."""
        if not self.settings.options.keep_on_reset:
            self._pool, self._cached = gpu_block_pool, gpu_block_pool.cached_block_hash_to_block

    def on_new_request(self, request: Request) -> None:
        if self._is_off():
            return
        self._requests[request.request_id] = request
        wrong = self.attempt(self.planner.arrived, request)
        if wrong is not None:
            logger.warning("sojourn: kv_transfer_params of %s: %s", request.request_id, wrong)

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        found = self.planner.ask(request.request_id, computed)
        return found.tokens, MatchedTokens(computed, found.is_async)

    def _allocated(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        self.planner.allocated(request.request_id, block_ids[0], tokens)

    def _reject_fill(self, request: Request, block_ids: BlockIds, match: MatchedTokens, tokens: int) -> None:
        size = self.settings.block_tokens
        unfilled = block_ids[0][match.computed // size : -(-(match.computed + tokens) // size)]
        self.planner.reject_fill(request.request_id, unfilled, match.is_async)

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[TransferJobs]:
        if not self._is_off():
            self.attempt(self._plan_saves, scheduler_output)
            return StepOrders(self.planner.take_jobs())
        # Remaining jobs release resources and fill blocks that vLLM expects. The links are closed once.
        jobs = self.planner.take_jobs()
        jobs.fetches, jobs.pushes, jobs.saves = [], [], []
        stop, self._stop_sent = not self._stop_sent, True
        return StepOrders(jobs, stop)

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> None:
        state = scheduler_output.kv_connector_block_state
        step = {
            request_id: self._requests[request_id].num_computed_tokens + count
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
            if request_id in self._requests
        }
        if step and state is not None:
            # A request's list of block ids is long. The planner reads it only if there is KV to save.
            self.planner.scheduled(step, lambda request_id: state.resolve_block_ids(request_id)[0])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            self.attempt(self.planner.filled, request_id)
        super().update_connector_output(connector_output)

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        completed = request.status.name in COMPLETED_STATUSES and not self._is_off()
        return self.planner.finished(
            request.request_id, completed, block_ids, is_loading=self._is_loading(request.request_id)
        )

    def has_pending_push_work(self) -> bool:
        """Return whether jobs wait for a step, which vLLM then runs even without requests."""
        return self.planner.has_jobs or (self._is_off() and not self._stop_sent)

    def _is_off(self) -> bool:
        pool = self._pool
        if not self.off and pool is not None and pool.cached_block_hash_to_block is not self._cached:
            PathsConnector.reset_cache(self)  # a pair's host memory has been reset by the scheduler
        return self.off

    def reset_cache(self) -> bool:
        """Turn the connector off until the engine restarts: the weights may be new. The store is kept,
        because other engines use it. Steps that are planned keep their jobs: the worker carries them out
        before it loads new weights, so they transfer KV of the old weights under the old keys."""
        if self.off:
            return True
        self.off = self.pair_status.has_left_pair = True
        self._pool = self._cached = None
        logger.error(
            "sojourn: the prefix cache was reset, usually because of new weights. Until it restarts, this "
            "engine computes all its KV: it reads and writes none in %s, and exchanges none with peers",
            self.settings.options.store,
        )
        self.attempt(self.planner.abandon)
        return True

    def _disable(self, error: Exception) -> None:
        self.planner.abandon()

    # -- worker side ------------------------------------------------------------------

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> TransferWorker:
        from ..kv_transfer.transfer_worker import TransferWorker

        settings = self.settings
        kv, layout = open_kv_blocks(kv_caches, settings.blocks, settings.per_full)
        settings = self.settings = settings.with_layout(layout)
        if kv.block_bytes != settings.identity.block_bytes or len(kv) != settings.identity.layers:
            raise SettingsError(
                f"the engine's KV has {len(kv)} layers and Full Blocks of {kv.block_bytes} bytes; its "
                f"settings say {settings.identity.layers} and {settings.identity.block_bytes}"
            )
        store, name = settings.open_store(), settings.options.store_name
        self._traffic = TransferManager(store, settings.limits, name=name, listen=[settings.listen])
        worker = TransferWorker(
            self._traffic,
            kv,
            log=lambda what, error: logger.error("sojourn: could not %s", what, exc_info=error),
            strict=self.strict,
            layerwise=settings.ranks == settings.concurrent_steps == 1,
        )
        logger.info(
            "sojourn: peers reach this engine at %s; buffers for %d Full Blocks of %d tokens and %d bytes; "
            "store in %s",
            ", ".join(self._traffic.addresses), settings.limits.slots, settings.identity.block_tokens,
            kv.block_bytes, settings.options.store,
        )  # fmt: skip
        if needed := settings.needed_buffer_bytes:
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
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """After the forward pass, wait until the KV that the step pushes and saves is copied, since vLLM may
        reuse its blocks then. Then start its fill jobs."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (ended requests whose blocks vLLM may free now, requests whose load has ended)."""
        if self._worker is None:
            return None, None
        return self._worker.take_sent(), self._worker.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_not_filled() if self._worker is not None else set()

    def status(self) -> dict[str, Any] | None:
        traffic, worker = self._traffic, self._worker
        if traffic is None or worker is None or self._closing is not None:
            return None
        document = traffic.stats(worker.counts)
        return {**document, "addresses": [reachable_address(address) for address in document["addresses"]]}

    def stats_address(self) -> str | None:
        """Return the address of ``status`` for other processes, if a socket opens. Starts the server."""
        if not self._stats_address and self._traffic is not None:
            try:
                self._stats_address = self._traffic.serve_stats(self.status)
            except OSError as error:
                logger.warning("sojourn: no socket for the status of KV transfers", exc_info=error)
        return self._stats_address or None

    def shutdown(self) -> None:
        super().shutdown()
        if self._closing is not None:
            self._closing.join(CLOSE_S)
        if self._traffic is not None:
            self._traffic.close()


class PairStatusReporter(KVTransferStatus):
    """Reports the status of an engine in a pair to the ``EngineService``.

    The transfer manager runs in the worker's process, but the engine core's process answers the API server.
    When a client asks for the status, the engine core asks the workers, between two steps: first through
    vLLM, later, if they are other processes, at sockets of theirs (``serve_stats``). The status does not
    come with each step's results, because an engine that only reads blocks for peers runs no steps.
    """

    def __init__(self, settings: KVTransferSettings, requests: Counter[str]) -> None:
        """``requests``: the planner's counts by name. The planner keeps them up to date."""
        self._settings = settings
        self._requests = requests
        self._status: dict[str, Any] | None = None
        self._stats_addresses: list[str] = []
        """Addresses of the workers' stats servers, by rank; empty until all are known."""
        self._failed = False
        self.has_left_pair = False
        """Whether the engine has left the pair after a reset of its cache. Set by the connector."""
        self.stock_recorder = MetricsRecorder()
        """Counts for an engine whose scheduler is vLLM's own."""

    def refresh_status(self, executor: Any) -> None:
        """Ask the workers for their status and keep it. Without an answer, the last status stays."""
        if self._stats_addresses:
            try:
                documents = [fetch_stats(address) for address in self._stats_addresses]
                self._status = combined_status(documents)
                return
            except (OSError, ValueError):
                self._stats_addresses = []
        try:
            workers = executor.collective_rpc(worker_status, args=(os.getpid(),))
        except Exception as error:
            if not self._failed:
                logger.warning("sojourn: the worker does not report its KV transfers", exc_info=error)
            self._failed = True
        else:
            self._status, self._failed = combined_status(workers), False
            addresses = [worker and worker.get("stats_address") for worker in workers]
            self._stats_addresses = addresses if all(addresses) else []

    def capabilities(self) -> dict[str, Any] | None:
        """Return what a gateway needs to pair this engine. ``None`` if the workers have not reported yet, the
        engine has no role, or it has left the pair."""
        settings, status = self._settings, self._status
        if status is None or settings.options.role is None or self.has_left_pair:
            return None
        return {
            **{name: status[name] for name in ("peer", "epoch", "block_s", "kv")},
            "role": settings.options.role,
            "node": settings.options.node,
            "block_bytes": settings.block_bytes,
            "block_tokens": settings.identity.block_tokens,
            "shape": settings.shape,
        }

    def stats(self) -> dict[str, Any] | None:
        if self._status is None:
            return None
        numbers = {name: status for name, status in self._status.items() if name not in NON_NUMERIC_KEYS}
        return {**numbers, "requests": dict(sorted(self._requests.items()))}


def worker_status(worker: Any, requesting_process: int) -> dict[str, Any] | None:
    """Return the worker's status; ``None`` without transfers. vLLM runs this in the worker's process. If that
    is not the engine core's (``requesting_process``), the status has the address for the next question."""
    from .compat import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, PathsConnector):
        return None
    status = connector.status()
    if status is None or requesting_process == os.getpid():
        return status
    return {**status, "stats_address": connector.stats_address()}


def reachable_address(address: str) -> str:
    """Return ``tcp:HOST:PORT`` or ``unix:PATH`` with this machine's address in place of a wildcard host."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in WILDCARDS:
        return address
    from .compat import get_ip

    found = get_ip()  # VLLM_HOST_IP, where that is set
    if found in WILDCARDS:  # no network
        found = socket.gethostname()
    return f"tcp:[{found}]:{port}" if ":" in found else f"tcp:{found}:{port}"


def open_kv_blocks(
    kv_caches: dict[str, torch.Tensor], blocks: int, per_full: int
) -> tuple[KvBlockArrays, str]:
    """Return (object that copies blocks of ``kv_caches``, the KV tensors by layer, text for the order of
    bytes in a block, empty on a CPU). ``blocks``: number of blocks on the device. ``per_full``: engine blocks
    per Full Block. Raises ``UnsupportedKvCaches`` for another kind of device or an unknown layout, and
    ``RuntimeError`` if CUDA cannot pin host memory."""
    from ..kv_offload.kv_block_arrays import STAGING_BYTES, KvBlockArrays
    from ..kv_offload.kv_pages import device_layout, page_views

    sizes = {
        sum(view.shape[1] for view in page_views(name, cache, blocks)) for name, cache in kv_caches.items()
    }
    if len(sizes) != 1:
        raise ValueError(f"layers have blocks of {sorted(sizes)} bytes; expected one size")
    rows = max(1, STAGING_BYTES // sizes.pop())
    backend = open_device_backend(kv_caches, blocks, 2 * rows, by_layer=True)
    return KvBlockArrays(kv_caches, per_full, backend, rows), device_layout(kv_caches, blocks)
