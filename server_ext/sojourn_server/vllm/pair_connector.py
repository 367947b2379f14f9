"""KV connector for an engine of a pair with host memory: ``PathsConnector`` around a ``SojournConnector``.

Host memory keeps what this engine's device evicts. The pair's store is its disk. A request loads from one of
the two: from host memory if the device and it have half of the prompt, otherwise from what has more. The rest
is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..kv_offload.offload_jobs import OffloadResults
from ..kv_transfer.transfer_jobs import TransferJobs, TransferResults
from .compat import KVConnectorRole
from .kv_connector import StepOrders, StepReport
from .kv_offload_connector import SojournConnector
from .kv_transfer_connector import PathsConnector

if TYPE_CHECKING:
    import torch

    from .compat import KVCacheBlocks, KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig


class PairConnector(PathsConnector):
    """The extra config has, besides that of ``PathsConnector``, that of ``SojournConnector`` as ``host``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        host = _with_extra(vllm_config, extra.pop("host"))
        super().__init__(_with_extra(vllm_config, extra), role, kv_cache_config)
        self.host_memory = SojournConnector(host, role, kv_cache_config)
        self._not_filled: set[int] = set()
        """Worker side: ids of device blocks that the step's transfers did not fill, for its report."""

    # -- planner side -------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens, is_async = self.host_memory.get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is None:
            return None, False
        if tokens and 2 * (num_computed_tokens + tokens) >= request.num_tokens:
            return tokens, is_async
        stored = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if stored[0] is not None and stored[0] <= tokens:
            self.matches.pop(request.request_id, None)
            return tokens, is_async
        self.host_memory.matches.pop(request.request_id, None)
        return stored

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        by_host = num_external_tokens * (request.request_id in self.host_memory.matches)
        self.host_memory.update_state_after_alloc(request, blocks, by_host)
        super().update_state_after_alloc(request, blocks, num_external_tokens - by_host)

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[TransferJobs]:
        orders = super()._plan_step(scheduler_output)
        orders.host = self.host_memory.build_connector_meta(scheduler_output)
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport) and report.host is not None:
            connector_output.kv_connector_worker_meta = report.host
            self.host_memory.update_connector_output(connector_output)
            connector_output.kv_connector_worker_meta = report

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.host_memory.request_finished(request, block_ids)
        return super().request_finished(request, block_ids)

    def _is_loading(self, request_id: str) -> bool:
        return super()._is_loading(request_id) or self.host_memory.planner.is_loading(request_id)

    def has_pending_push_work(self) -> bool:
        return self.host_memory.has_pending_push_work() or super().has_pending_push_work()

    def reset_cache(self) -> bool:
        self.host_memory.reset_cache()
        return super().reset_cache()

    # -- worker side ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.host_memory.register_kv_caches(kv_caches)
        super().register_kv_caches(kv_caches)

    def _begin_step(self, orders: StepOrders[TransferJobs]) -> None:
        """Evicted blocks are copied to host memory before transfers write to them."""
        if orders.host is not None:
            self.host_memory.handle_preemptions(orders.host)
        super()._begin_step(orders)

    def build_connector_worker_meta(self) -> StepReport[TransferResults] | None:
        own, host = super().build_connector_worker_meta(), self.host_memory.build_connector_worker_meta()
        not_filled, self._not_filled = self._not_filled, set()
        if own is None and host is None and not not_filled:
            return None
        results = own.results if own is not None else TransferResults()
        return StepReport(results, not_filled=not_filled, host=host)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        _, loaded = self.host_memory.get_finished(finished_req_ids)
        return sent, (received or set()) | (loaded or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._not_filled = super().get_block_ids_with_load_errors()
        return self._not_filled | self.host_memory.get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        try:
            self.host_memory.shutdown()
        finally:
            super().shutdown()


def offload_connector(connector: object) -> SojournConnector | None:
    """Return sojourn's connector of host memory: the engine's, or the one inside of it; ``None`` without."""
    if isinstance(connector, PairConnector):
        return connector.host_memory
    return connector if isinstance(connector, SojournConnector) else None


def copy_wait_s(output: KVConnectorOutput) -> float:
    """Return the seconds that a step waited for copies from and to host memory: the most of all workers."""
    report = output.kv_connector_worker_meta
    results = (report.host or report).of_all if isinstance(report, StepReport) else []
    return max((each.waited_s for each in results if isinstance(each, OffloadResults)), default=0.0)


def _with_extra(vllm_config: VllmConfig, extra: Mapping[str, Any]) -> VllmConfig:
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = dict(extra)
    return changed
