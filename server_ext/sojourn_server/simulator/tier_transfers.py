"""Sojourn's host and disk tiers in virtual time: the planner of a live engine, with simulated transfers.

Before a step begins, the blocks that it overwrites are saved to host memory. A request takes part in no step
until its blocks are loaded. Each direction (host to device, device to host, host to disk, disk to host) is
one FIFO. The disk is a set of block keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kv_offload.offload_jobs import BlockKey, CopyResult, FileCopy, OffloadJobs, OffloadResults
from ..kv_offload.offload_planner import OffloadPlanner
from ..vllm.compat import KVConnectorOutput, KVTransferConfig
from ..vllm.kv_connector import StepOrders, StepReport
from ..vllm.kv_offload_connector import SojournConnector

if TYPE_CHECKING:
    from ..vllm.compat import KVCacheConfig, KVConnectorRole, VllmConfig
    from .latency.latency_protocol import LatencyModel

_DISK_BLOCKS = "lab_disk_blocks"
"""Key of the connector setting with the number of disk blocks, for ``SimulatedTierConnector``."""


class _FileTransfer(NamedTuple):
    """A running copy from host memory to disk (a spill), or from disk to host memory (a stage)."""

    done_s: float
    job: int
    files: Sequence[FileCopy]


class _Load(NamedTuple):
    """A running load from host memory to the device."""

    done_s: float
    request_id: str


class _DiskTransferLane:
    """Transfers between host memory and disk in one direction, one after the other."""

    def __init__(self, latency: LatencyModel, block_bytes: int, *, to_disk: bool) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._to_disk = to_disk
        self._free_s = 0.0
        self._jobs: deque[_FileTransfer] = deque()
        self.moved_bytes = 0

    def begin(self, jobs: Mapping[int, Sequence[FileCopy]], now: float) -> None:
        """Queue ``jobs``. They begin at ``now`` at the earliest."""
        for job, files in jobs.items():
            size = len(files) * self._block_bytes
            self.moved_bytes += size
            self._free_s = max(now, self._free_s) + self._latency.disk_s(size, to_disk=self._to_disk)
            self._jobs.append(_FileTransfer(self._free_s, job, files))

    def take_done(self, now: float) -> Iterable[_FileTransfer]:
        """Yield the jobs that have ended by ``now``, in order, each once."""
        while self._jobs and self._jobs[0].done_s <= now:
            yield self._jobs.popleft()

    def next_done_s(self) -> float:
        """Time at which the next job ends; ``inf`` if no job is running."""
        return self._jobs[0].done_s if self._jobs else float("inf")


class TierTransfers:
    """Simulated copies between the tiers of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._stores: dict[int, float] = {}
        """End time of each running store (copy from the device to host memory) by job number, in order."""
        self._to_host_free_s = 0.0
        self._to_device_free_s = 0.0
        self._loads: deque[_Load] = deque()
        self._not_filled: set[int] = set()
        """Device blocks of rejected loads, to be reported as invalid."""
        self._to_disk = _DiskTransferLane(latency, block_bytes, to_disk=True)
        self._from_disk = _DiskTransferLane(latency, block_bytes, to_disk=False)
        self._on_disk: set[BlockKey] = set()
        self._results = OffloadResults(on_disk=[])
        self.to_host_bytes = 0
        self.to_device_bytes = 0

    def loads(self, orders: StepOrders[OffloadJobs]) -> Iterable[tuple[str, int]]:
        """Return (request id, number of blocks) for each load that this step starts."""
        return [(request_id, len(copies)) for request_id, copies in orders.jobs.loads.items()]

    def begin_step(self, orders: StepOrders[OffloadJobs], now: float) -> float:
        """Start the transfers of a step. Returns the time at which the step may begin. It is later than
        ``now`` if the step must wait for saves, or for earlier transfers of blocks that it uses."""
        jobs = orders.jobs
        begins_s = max([now, *(self._stores[job] for job in jobs.awaited if job in self._stores)])
        if jobs.settles and self._loads:
            begins_s = max(begins_s, self._loads[-1].done_s)
        if jobs.saves:
            # Saves do not queue behind stores, because they only have to end before the forward pass writes.
            begins_s += self._copy_s(len(jobs.saves), to_host=True)
        for request_id, copies in jobs.loads.items():
            took_s = self._copy_s(len(copies), to_host=False)
            self._to_device_free_s = max(begins_s, self._to_device_free_s) + took_s
            self._loads.append(_Load(self._to_device_free_s, request_id))
        for request_id, block_ids in orders.rejected.items():
            self._loads.append(_Load(begins_s, request_id))
            self._not_filled.update(block_ids)
        for job, copies in jobs.stores.items():
            took_s = self._copy_s(len(copies), to_host=True)
            self._stores[job] = self._to_host_free_s = max(begins_s, self._to_host_free_s) + took_s
        # Deletion takes no time, and comes before spills, which may have the same key.
        self._on_disk.difference_update(jobs.drops)
        # Blocks that this step saves are in host memory when it begins, and may be spilled.
        self._to_disk.begin(jobs.spills, begins_s)
        self._from_disk.begin(jobs.stages, begins_s)
        return begins_s

    def get_finished(self, now: float) -> KVConnectorOutput | None:
        """Return, as a worker would, the transfers that have ended by ``now`` and were not returned before.
        ``None`` if there are none."""
        for job in [job for job, done_s in self._stores.items() if done_s <= now]:
            del self._stores[job]
            self._results.stored[job] = CopyResult.MOVED
        for spill in self._to_disk.take_done(now):
            self._on_disk.update(file.key for file in spill.files)
            self._results.spilled[spill.job] = {file.key: CopyResult.MOVED for file in spill.files}
        for stage in self._from_disk.take_done(now):
            self._results.staged[stage.job] = {
                file.key: CopyResult.MOVED if file.key in self._on_disk else CopyResult.MISSING
                for file in stage.files
            }
        loaded: set[str] = set()
        while self._loads and self._loads[0].done_s <= now:
            loaded.add(self._loads.popleft().request_id)
        if not self._results and not loaded:
            return None
        results, self._results = self._results, OffloadResults()
        not_filled, self._not_filled = self._not_filled, set()
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=StepReport(results) if results else None,
            invalid_block_ids=not_filled,
        )

    def next_done_s(self) -> float:
        """Time at which the next transfer ends; ``inf`` if none is running."""
        stored_s = next(iter(self._stores.values()), float("inf"))
        loaded_s = self._loads[0].done_s if self._loads else float("inf")
        return min(stored_s, loaded_s, self._to_disk.next_done_s(), self._from_disk.next_done_s())

    @property
    def to_disk_bytes(self) -> int:
        """Bytes of all writes to disk so far, queued ones included."""
        return self._to_disk.moved_bytes

    @property
    def from_disk_bytes(self) -> int:
        """Bytes of all reads from disk so far, queued ones included."""
        return self._from_disk.moved_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is running or queued."""
        return self.next_done_s() != float("inf")

    def _copy_s(self, blocks: int, *, to_host: bool) -> float:
        size = blocks * self._block_bytes
        if to_host:
            self.to_host_bytes += size
        else:
            self.to_device_bytes += size
        return self._latency.copy_s(size, to_host=to_host)


class SimulatedTierConnector(SojournConnector):
    """Scheduler side of sojourn's connector with a simulated disk (``tier_transfer_config`` sets its size).
    This disk has no files that another process could read, so ``PYTHONHASHSEED`` need not be set."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Removed before the settings are read, since it is not a user setting.
        disk_blocks = vllm_config.kv_transfer_config.kv_connector_extra_config.pop(_DISK_BLOCKS)
        super().__init__(vllm_config, role, kv_cache_config)
        self.planner = OffloadPlanner(replace(self.settings.limits(), disk_blocks=disk_blocks))


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
