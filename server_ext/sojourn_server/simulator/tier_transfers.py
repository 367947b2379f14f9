"""Sojourn's host and disk tiers in virtual time: a live engine's offload scheduler with simulated transfers.

Before a step begins, the blocks that it overwrites are saved to host memory. A request takes part in no step
until its blocks are loaded. Each direction (host to device, device to host, host to disk, disk to host) is
one FIFO. The disk has the blocks that the scheduler knows to be there, because no other engine uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults
from ..kv_offload.offload_scheduler import OffloadScheduler
from ..vllm.compat import KVConnectorOutput, KVTransferConfig
from ..vllm.kv_connector import StepOrders, StepReport
from ..vllm.kv_offload_connector import SojournConnector
from .event_queue import HostTransfers

if TYPE_CHECKING:
    from ..vllm.compat import KVCacheConfig, KVConnectorRole, VllmConfig
    from .latency.latency_models import LatencyModel

_DISK_BLOCKS = "lab_disk_blocks"
"""Key of the connector setting with the number of disk blocks, for ``SimulatedTierConnector``."""


class TierTransfers(HostTransfers):
    """Simulated copies between the tiers of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        super().__init__(latency, block_bytes)
        self._not_filled: set[int] = set()
        """Device blocks of rejected loads, to be reported as invalid."""
        self._results = OffloadResults()

    def loads(self, orders: StepOrders[OffloadJobs]) -> Iterable[tuple[str, int]]:
        """Return (request id, number of blocks) for each load that this step starts."""
        return [(request_id, len(copies)) for request_id, copies in orders.jobs.loads.items()]

    def begin_step(self, orders: StepOrders[OffloadJobs], now: float) -> float:
        """Start the transfers of a step. Returns the time at which the step may begin. It is later than
        ``now`` if the step must wait for saves, or for earlier transfers of blocks that it uses."""
        jobs = orders.jobs
        begins_s = max([now, *(done_s for done_s, job in self.to_host.running if job in jobs.awaited)])
        if jobs.settles and self.to_device.running:
            begins_s = max(begins_s, self.to_device.running[-1][0])
        if jobs.saves:
            # Saves do not queue behind stores, because they only have to end before the forward pass writes.
            begins_s += self.to_host.took_s(len(jobs.saves) * self.block_bytes)
        for request_id, copies in jobs.loads.items():
            self.to_device.begin(request_id, len(copies) * self.block_bytes, begins_s)
        for request_id, block_ids in jobs.rejected.items():
            self.to_device.running.append((begins_s, request_id))
            self._not_filled.update(block_ids)
        for job, copies in jobs.stores.items():
            self.to_host.begin(job, len(copies) * self.block_bytes, begins_s)
        # Blocks that this step saves are in host memory when it begins, and may be spilled.
        if spills := [file.key for file in jobs.spills]:
            self.to_disk.begin(spills, len(spills) * self.block_bytes, begins_s)
        for file in jobs.stages:
            self.from_disk.begin(file.key, self.block_bytes, begins_s)
        return begins_s

    def get_finished(self, now: float) -> KVConnectorOutput | None:
        """Return, as a worker would, the transfers that have ended by ``now`` and were not returned before.
        ``None`` if there are none."""
        self._results.stored.update(dict.fromkeys(self.to_host.take_done(now), CopyResult.MOVED))
        for keys in self.to_disk.take_done(now):
            self._results.spilled.update(dict.fromkeys(keys, CopyResult.MOVED))
        self._results.staged.update(dict.fromkeys(self.from_disk.take_done(now), CopyResult.MOVED))
        loaded = set(self.to_device.take_done(now))
        if not self._results and not loaded:
            return None
        results, self._results = self._results, OffloadResults()
        not_filled, self._not_filled = self._not_filled, set()
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=StepReport(results) if results else None,
            invalid_block_ids=not_filled,
        )


class SimulatedTierConnector(SojournConnector):
    """Scheduler side of sojourn's connector with a simulated disk (``tier_transfer_config`` sets its size).
    This disk has no files that another process could read, so ``PYTHONHASHSEED`` need not be set."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Removed before the settings are read, since it is not a user setting.
        disk_blocks = vllm_config.kv_transfer_config.kv_connector_extra_config.pop(_DISK_BLOCKS)
        super().__init__(vllm_config, role, kv_cache_config)
        # Without questions: no other engine writes to this disk, so what it has is known.
        limits = replace(self.settings.limits(), disk_blocks=disk_blocks, min_probe_blocks=sys.maxsize)
        self.planner = OffloadScheduler(limits)


def tier_transfer_config(host_blocks: int, page_bytes: int, disk_blocks: int) -> KVTransferConfig:
    """vLLM's configuration for sojourn's connector with ``host_blocks`` blocks of host memory and
    ``disk_blocks`` of disk (0 for no disk)."""
    settings: dict[str, Any] = {"host_bytes": host_blocks * page_bytes}
    connector = SojournConnector
    if disk_blocks:
        settings[_DISK_BLOCKS] = disk_blocks
        connector = SimulatedTierConnector
    return KVTransferConfig(
        kv_connector=connector.__name__,
        kv_connector_module_path=connector.__module__,
        kv_role="kv_both",
        engine_id="lab",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
