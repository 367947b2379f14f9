"""The KV connector for host memory and disk.

Sojourn's scheduler tells the planner which blocks the device evicts. With vLLM's own scheduler the connector
saves and finds no blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..kv_offload.offload_jobs import OffloadJobs, OffloadResults, OffloadStats
from ..kv_offload.offload_planner import OffloadPlanner
from .compat import KVConnectorRole
from .kv_connector import KVConnector, MatchedTokens, StepOrders, StepReport
from .kv_connector_settings import KVOffloadSettings

if TYPE_CHECKING:
    from ..kv_offload.cpu_device_backend import ByteArray
    from ..kv_offload.offload_worker import OffloadWorker
    from .compat import KVCacheConfig, KVConnectorOutput, Request, SchedulerOutput, VllmConfig

logger = logging.getLogger("vllm.sojourn")

MAX_STEPS_IN_FLIGHT = 4
"""Number of newest steps whose loads are remembered. An engine gets the results of a load before it plans so
many further steps."""


class SojournConnector(KVConnector[OffloadJobs, OffloadResults]):
    """Host memory and disk below one engine's device."""

    settings: KVOffloadSettings
    _worker: OffloadWorker | None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = KVOffloadSettings.read(vllm_config, kv_cache_config)
        self._block_size = self.settings.block_tokens
        self._not_filled: set[int] = set()
        """Blocks that no job fills: of the step being planned (planner side), or of the running step (worker
        side)."""
        if role is KVConnectorRole.SCHEDULER:
            self.planner = OffloadPlanner(self.settings.limits())
            self.traffic = OffloadStats()
            self.off = False
            """Whether the connector is off: it saves and finds no more blocks."""
            self.off_because: str | None = None
            self.clock = time.monotonic
            self._loading: deque[list[list[int]]] = deque([[]], maxlen=MAX_STEPS_IN_FLIGHT)
            """Blocks of the requests with loads, for each of the newest steps."""
            self.loaded_tokens: dict[str, int] = {}
            """Request admitted in this step → tokens loaded from host memory."""

    # -- beside the scheduler -----------------------------------------------------

    def _is_off(self) -> bool:
        return self.off

    def _match(self, request: Request, computed: int) -> tuple[int | None, MatchedTokens | None]:
        first = computed // self._block_size
        # At least one token is computed, for its logits.
        keys = request.block_hashes[first : (request.num_tokens - 1) // self._block_size]
        found = self.planner.lookup(request.request_id, keys, self.clock())
        if found is None:
            return None, None
        return found * self._block_size, MatchedTokens(computed, keys=keys[:found])

    def _allocated(
        self, request: Request, block_ids: list[int], match: MatchedTokens, external_tokens: int
    ) -> None:
        first, count = match.computed // self._block_size, external_tokens // self._block_size
        self.planner.load(request.request_id, match.keys[:count], block_ids[first : first + count])
        if count:
            self._loading[-1].append(block_ids)
            self.loaded_tokens[request.request_id] = external_tokens

    def _reject_fill(self, request: Request, block_ids: list[int], match: MatchedTokens) -> None:
        self._not_filled.update(block_ids)

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepOrders[OffloadJobs]:
        self._loading.append([])
        not_filled, self._not_filled = self._not_filled, set()
        try:
            return StepOrders(self.planner.take_jobs(spill=not self.off), not_filled)
        except Exception as error:
            self.failed(error)
            return StepOrders(OffloadJobs(), not_filled)

    def _take_results(self, results: OffloadResults) -> None:
        self.traffic.add(results, self.clock())
        self.planner.take_results(results)

    def loading(self) -> Iterator[list[int]]:
        """The blocks of each request with a load in a step that may still be running."""
        return chain.from_iterable(self._loading)

    def _finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # The blocks are free at once: they are saved, if at all, when they are reused or when a job says so.
        self.loaded_tokens.pop(request.request_id, None)
        self.planner.abandon(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether jobs wait for a step although no request does."""
        return not self.off and self.planner.has_jobs

    def reset_cache(self) -> bool:
        """Forget all KV computed so far."""
        self._attempt(self.planner.forget)
        return True

    def turn_off(self, why: str) -> None:
        """Save and find no more blocks: evictions are not reported, or the reports cannot be trusted.

        A request that is being admitted still loads the blocks found for it: they were correct.
        """
        if not self.off:
            self.off, self.off_because = True, why
            logger.error("sojourn: tiers below the device are off: %s", why)

    def _disable(self, error: Exception) -> None:
        self.turn_off(f"an error of ours, {type(error).__name__}")

    # -- beside the model -------------------------------------------------------------

    def _open_worker(self, rows: dict[str, ByteArray]) -> OffloadWorker:
        from ..kv_offload.cpu_device_backend import CpuDeviceBackend
        from ..kv_offload.offload_worker import OffloadWorker

        settings = self.settings
        memory = CpuDeviceBackend(rows, settings.host_slots)
        worker = OffloadWorker(memory, *settings.open_disk(memory.block_bytes, len(rows)))
        disk = "no disk"
        if settings.disk:
            disk = f"for {settings.disk_blocks} in {settings.disk}, which holds {worker.on_disk} from before"
            if settings.disk_name is not None:
                disk += f"; as {settings.disk_name}, and other engines' stores there are read"
        logger.info(
            "sojourn: room for %d blocks of %d bytes in host memory, %s",
            settings.host_slots, memory.block_bytes, disk,
        )  # fmt: skip
        return worker

    def _begin_step(self, orders: StepOrders[OffloadJobs]) -> None:
        self._not_filled = set(orders.not_filled)
        if self._worker is None:
            return
        try:
            self._worker.begin_step(orders.jobs)
        except Exception:
            logger.exception("sojourn: the worker could not begin a step; its loads are computed instead")
            for copies in orders.jobs.loads.values():
                self._not_filled.update(copy.block_id for copy in copies)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step that were not filled. No load is running at the return."""
        not_filled, self._not_filled = self._not_filled, set()
        return not_filled | (self._worker.end_step() if self._worker is not None else set())


def copy_wait_s(output: KVConnectorOutput) -> float:
    """Seconds for which a step's forward pass waited for copies from host memory."""
    report = output.kv_connector_worker_meta
    results = report.results if isinstance(report, StepReport) else None
    return results.waited_s if isinstance(results, OffloadResults) else 0.0
