"""Two ways to storage, and from engine to engine, as a connector of vLLM's (DualPath §4).

One class for prefill and decode engines: what a request says of itself (``paths/request_params``) tells what
is done for it. Beside the scheduler it asks the planner, beside the model it has the worker carry that out;
nothing is decided here. It needs no scheduler of ours.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from ..paths.orders import Orders, Reports
from ..paths.planner import PathPlanner, Scheduled
from .paths_member import PathsMember, reachable
from .paths_settings import PathsSettings
from .paths_stats import PathsStats
from .settings import SettingsError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ..paths.kv_blocks import Bytes
    from ..paths.manager import TrafficManager
    from ..paths.teller import Teller
    from ..paths.worker import PathWorker
    from ..tiers.store import Store

logger = init_logger("vllm.sojourn")

GIB = 1 << 30

CLOSE_S = 10.0
"""Seconds in which traffic that was ended has to be over."""

ANSWERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""How a request ends that has an answer."""


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What goes to the worker with a step."""

    orders: Orders = field(default_factory=Orders)
    stop: bool = False
    """End the traffic: the engine's weights may be others than at its start."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What comes back."""

    reports: Reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Raises ``NotImplementedError``: engines of several workers are refused when they start."""
        raise NotImplementedError("the paths of several workers are not brought together yet")


class PathsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Either half, by ``role``. Raises ``SettingsError`` where it cannot serve."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = PathsSettings.read(vllm_config, kv_cache_config)
        self.strict = False
        """Raise our own errors. For tests."""
        self._requests: dict[str, Request] = {}
        self._promised: dict[str, tuple[int, bool]] = {}
        """Where the tokens begin that a request was promised from elsewhere, and whether they come beside."""
        self._worker: PathWorker | None = None
        self._traffic: TrafficManager | None = None
        self._store: Store | None = None
        self._said_too_large = False
        self._closing: threading.Thread | None = None
        self._teller: Teller | None = None
        """Begins when another process asks."""
        self._off = False
        """The cache was reset: nothing is asked for any more."""
        self._stop_said = False
        self._pool: BlockPool | None = None
        """vLLM's, where its resets count; and what it was made with: a reset puts another there."""
        self._cached: object = None
        if role is KVConnectorRole.SCHEDULER:
            self.planner = PathPlanner(
                block_tokens=self.settings.block_tokens,
                blocks_per_full=self.settings.per_full,
                saves=self.settings.save,
            )
            self.member = PathsMember(self.settings, self.planner.counts)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for, and sent, one by one: what a whole graph would not stop for."""
        return True

    # -- beside the scheduler -----------------------------------------------------
    # vLLM calls these where an error would end the engine.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The scheduler's: a reset of it alone is told to no connector."""
        if not self.settings.keep_on_reset:
            self._pool, self._cached = gpu_block_pool, gpu_block_pool.cached_block_hash_to_block

    def on_new_request(self, request: Request) -> None:
        """It is in the queue from now on."""
        if self._is_off():
            return
        try:
            self._requests[request.request_id] = request
            wrong = self.planner.arrived(request)
            if wrong is not None:
                logger.warning("sojourn: kv_transfer_params of %s: %s", request.request_id, wrong)
        except Exception as error:
            self.failed(error)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be had from elsewhere; ``None``: they are being read, or pushed here."""
        if request.skip_reading_prefix_cache or self._is_off():
            return 0, False
        try:
            found = self.planner.ask(request.request_id, num_computed_tokens)
        except Exception as error:
            self.failed(error)
            return 0, False
        self._promised[request.request_id] = num_computed_tokens, found.beside
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has its blocks: those of external tokens are to be filled."""
        block_ids = blocks.get_block_ids()[0]
        first, beside = self._promised.pop(request.request_id, (0, False))
        try:
            self.planner.allocated(request.request_id, block_ids, num_external_tokens)
        except Exception as error:
            if num_external_tokens:  # it counts on them already
                size = self.settings.block_tokens
                unfilled = block_ids[first // size : -(-(first + num_external_tokens) // size)]
                self.planner.cannot_fill(request.request_id, unfilled, beside)
            self.failed(error)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """The orders of the step just planned."""
        if self._is_off():
            return self._last_orders()
        try:
            # What it asks for beside a request's blocks is small; those are looked up only where needed.
            state = scheduler_output.kv_connector_block_state
            step = [
                Scheduled(request_id, self._requests[request_id].num_computed_tokens + count)
                for request_id, count in scheduler_output.num_scheduled_tokens.items()
                if request_id in self._requests
            ]
            if step and state is not None:
                self.planner.scheduled(step, lambda request_id: state.resolve_block_ids(request_id)[0])
        except Exception as error:
            self.failed(error)
        return StepOrders(self.planner.take_orders())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What came of earlier orders."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            try:
                self.planner.take_reports(report.reports)
            except Exception as error:
                self.failed(error)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are still sent from, and what the decode engine is to be told."""
        self._requests.pop(request.request_id, None)
        self._promised.pop(request.request_id, None)
        try:
            well = request.status.name in ANSWERED and not self._is_off()
            return self.planner.finished(request.request_id, well, block_ids)
        except Exception as error:
            self.failed(error)
            return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Orders wait for a step, though no request does."""
        return self.planner.has_orders or (self._is_off() and not self._stop_said)

    def reset_cache(self) -> bool:
        """Nothing that was computed so far is to be found by this engine any more, nor what it computes by
        others: of what weights that is, is not known. What is in the store is others' too, and stays."""
        self._turn_off()
        return True

    def _is_off(self) -> bool:
        pool = self._pool
        if not self._off and pool is not None and pool.cached_block_hash_to_block is not self._cached:
            self._turn_off()
        return self._off

    def _turn_off(self) -> None:
        """Until the engine is started again. Steps are planned one at a time, so what was ordered is done."""
        if self._off:
            return
        self._off = self.member.is_over = True
        self._pool = self._cached = None
        logger.error(
            "sojourn: the cache was reset, for which new weights are the usual reason: until it is started "
            "again this engine computes, reads and writes no KV in %s, and takes and sends none",
            self.settings.store,
        )
        try:
            self.planner.abandon()
        except Exception as error:
            self.failed(error)

    def _last_orders(self) -> StepOrders:
        """Only what lets go of things, and fills what is promised."""
        orders = self.planner.take_orders()
        orders.wants, orders.fetches, orders.expects = [], [], []
        orders.pushes, orders.saves = [], []
        stop, self._stop_said = not self._stop_said, True
        return StepOrders(orders, stop)

    def failed(self, error: Exception) -> None:
        """An error of ours: nothing more is asked for. Raises it where ``strict``."""
        if self.strict:
            raise error
        logger.error(
            "sojourn: a hook of the paths connector failed; the engine goes on and computes", exc_info=error
        )
        self.planner.abandon()

    # -- beside the model -------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's blocks are there: open the store, and take in peers."""
        from ..paths.kv_blocks import KvBlocks
        from ..paths.manager import TrafficManager
        from ..paths.worker import PathWorker

        settings = self.settings
        rows = {name: _rows(name, cache, settings.blocks) for name, cache in kv_caches.items()}
        kv = KvBlocks(rows, settings.per_full)
        if kv.block_bytes != settings.identity.block_bytes or len(kv) != settings.identity.layers:
            raise SettingsError(
                f"the engine's KV has {len(kv)} layers and Full Blocks of {kv.block_bytes} bytes; its "
                f"settings say {settings.identity.layers} and {settings.identity.block_bytes}"
            )
        self._store = settings.open_store()
        self._traffic = TrafficManager(
            self._store,
            settings.limits,
            settings.rates,
            name=settings.store_name or settings.listen,
            listen=[settings.listen],
        )
        self._worker = PathWorker(
            self._traffic,
            self._store.leading,
            kv,
            slots=settings.limits.slots,
            log=lambda what, error: logger.error("sojourn: could not %s", what, exc_info=error),
            strict=self.strict,
            patience_s=settings.limits.patience_s,
        )
        logger.info(
            "sojourn: peers reach this engine at %s; buffers for %d Full Blocks of %d tokens and %d bytes; "
            "store in %s",
            ", ".join(self._traffic.addresses), settings.limits.slots, settings.identity.block_tokens,
            kv.block_bytes, settings.store,
        )  # fmt: skip
        needed = settings.buffers_short_bytes
        if needed:
            logger.warning(
                "sojourn: the longest prompt has %d Full Blocks and the buffers hold %d: longer ones are "
                "computed on the decode engine as well. For all of them give --kv-buffer-gib %.1f "
                "(buffer_bytes %d)",
                settings.longest_blocks, settings.limits.slots, math.ceil(needed / GIB * 10) / 10, needed,
            )  # fmt: skip

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass writes anything."""
        assert isinstance(kv_connector_metadata, StepOrders)
        if kv_connector_metadata.stop and self._traffic is not None and self._closing is None:
            # It waits for its threads, which a store that hangs may hold.
            self._closing = threading.Thread(
                target=self._traffic.close, name="sojourn-paths-end", daemon=True
            )
            self._closing.start()
        if self._worker is not None:
            self._worker.begin_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """What the forward pass needs was begun in ``handle_preemptions``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The forward pass has come to a layer."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer is computed."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass is over, or there was none."""
        if self._worker is not None:
            self._worker.end_step()
            if self._traffic is not None and not self._said_too_large:
                self._say_too_large(self._traffic.core.depot.counts["too_large"])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests that were held and need not be any more, and those that have got their KV."""
        if self._worker is None:
            return None, None
        return self._worker.take_sent(), self._worker.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled."""
        return self._worker.take_not_filled() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        """What has come of orders."""
        reports = self._worker.take_reports() if self._worker is not None else None
        return StepReport(reports) if reports else None

    def get_kv_connector_stats(self) -> PathsStats | None:
        """How long steps stood still for KV since the last call, for vLLM's log."""
        times = self._worker.take_times() if self._worker is not None else None
        return PathsStats.of(times) if times else None

    def _say_too_large(self, contexts: int) -> None:
        """The first time that there are some."""
        if contexts:
            self._said_too_large = True
            logger.warning(
                "sojourn: a context does not fit this engine's buffers of %d Full Blocks of %d bytes and is "
                "computed again; the longest prompts need %d. Give more by --kv-buffer-gib. Said once; "
                "too_large among the counts of paths in /sojourn/v1/stats has how many there were",
                self.settings.limits.slots, self.settings.identity.block_bytes, self.settings.longest_blocks,
            )  # fmt: skip

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PathsStats:
        """What was told, in another process."""
        return PathsStats(data=data or {})

    def told(self) -> dict[str, Any] | None:
        """How the traffic goes, for who asks over HTTP; ``None``: it has not begun, or is over."""
        from ..paths.told import told_of

        traffic, worker = self._traffic, self._worker
        if traffic is None or worker is None or self._closing is not None:
            return None
        told = told_of(traffic, worker.counts)
        return {**told, "addresses": [reachable(address) for address in told["addresses"]]}

    def teller(self) -> str | None:
        """Address at which this process tells the same to others of this machine; ``None``: it cannot."""
        from ..paths.teller import Teller

        if self._teller is None:
            try:
                self._teller = Teller(self.told)
            except OSError as error:
                logger.warning("sojourn: no socket to tell of the paths at", exc_info=error)
                return None
        return self._teller.address

    def shutdown(self) -> None:
        """The worker ends."""
        if self._teller is not None:
            self._teller.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._closing is not None:
            self._closing.join(CLOSE_S)
        if self._traffic is not None:
            self._traffic.close()
        if self._store is not None:
            self._store.close()


def _rows(name: str, cache: Any, blocks: int) -> Bytes:
    """The memory of a layer's tensor, a row of bytes for each block. Raises ``SettingsError``."""
    import torch

    if cache.device.type != "cpu":
        raise SettingsError(f"layer {name}: KV on {cache.device}; the paths serve CPU engines so far")
    if cache.shape[0] != blocks or not cache.is_contiguous():
        shape, strides = tuple(cache.shape), cache.stride()
        raise SettingsError(
            f"layer {name}: KV of shape {shape} and strides {strides}; expected {blocks} blocks, contiguous"
        )
    rows: Bytes = cache.view(blocks, -1).view(torch.uint8).numpy()
    return rows
