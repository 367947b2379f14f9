"""Our own tiers with copies that take virtual time: the planner is the engine's, the mover is made up here.

What a step overwrites is saved before it begins; what it loads comes layer by
layer while it computes, so a step ends no sooner than its last layer has come and
been computed. Each direction is one lane, first come first served: to and from the
device, to and from a disk that is a set of keys.
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
    from .latency.latency_model import LatencyModel

LAYERS = 32
"""Of a step's time, the share of the layer that is computed after the last load has come."""

_DISK_BLOCKS = "lab_disk_blocks"
"""Of the connector's settings: what ``SimulatedTierConnector`` takes."""


class _FileTransfer(NamedTuple):
    """A spill or a stage under way."""

    done_s: float
    job: int
    files: Sequence[FileCopy]


class _DiskTransferLane:
    """Jobs between host memory and disk in one direction, one after the other."""

    def __init__(self, latency: LatencyModel, block_bytes: int, *, to_disk: bool) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._to_disk = to_disk
        self._free_s = 0.0
        self._jobs: deque[_FileTransfer] = deque()
        self.moved_bytes = 0

    def begin(self, jobs: Mapping[int, Sequence[FileCopy]], now: float) -> None:
        """Queue ``jobs``; they begin no sooner than ``now``."""
        for job, files in jobs.items():
            size = len(files) * self._block_bytes
            self.moved_bytes += size
            self._free_s = max(now, self._free_s) + self._latency.disk_s(size, to_disk=self._to_disk)
            self._jobs.append(_FileTransfer(self._free_s, job, files))

    def take_done(self, now: float) -> Iterable[_FileTransfer]:
        """Those that have ended by ``now``, in the order of their ends. Each is given out once."""
        while self._jobs and self._jobs[0].done_s <= now:
            yield self._jobs.popleft()

    def next_done_s(self) -> float:
        """When the first of them ends; ``inf`` where none is under way."""
        return self._jobs[0].done_s if self._jobs else float("inf")


class TierTransfers:
    """The copies of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._stores: dict[int, float] = {}
        """Of each store under way, when it ends; in the order of their ends."""
        self._to_host_free_s = 0.0
        self._to_device_free_s = 0.0
        self._loaded_s = 0.0
        self._to_disk = _DiskTransferLane(latency, block_bytes, to_disk=True)
        self._from_disk = _DiskTransferLane(latency, block_bytes, to_disk=False)
        self._on_disk: set[BlockKey] = set()
        self._results = OffloadResults(on_disk=[])
        self.to_host_bytes = 0
        self.to_device_bytes = 0

    def loads(self, orders: StepOrders[OffloadJobs]) -> Iterable[tuple[str, int]]:
        """Requests that load something in this step, and how many blocks."""
        return [(request_id, len(copies)) for request_id, copies in orders.jobs.loads.items()]

    def begin_step(self, orders: StepOrders[OffloadJobs], now: float) -> float:
        """Start the copies a step asks for. Returns when the step may begin."""
        jobs = orders.jobs
        begins_s = max([now, *(self._stores[job] for job in jobs.awaited if job in self._stores)])
        if jobs.saves:
            # The lane is not waited for: it is the forward pass that must not write before.
            begins_s += self._copy_s(len(jobs.saves), to_host=True)
        blocks = sum(len(copies) for copies in jobs.loads.values())
        if blocks:
            took_s = self._copy_s(blocks, to_host=False)
            self._to_device_free_s = self._loaded_s = max(begins_s, self._to_device_free_s) + took_s
        for job, copies in jobs.stores.items():
            took_s = self._copy_s(len(copies), to_host=True)
            self._stores[job] = self._to_host_free_s = max(begins_s, self._to_host_free_s) + took_s
        # A file is deleted in no time; what this step spills may be of the same key.
        self._on_disk.difference_update(jobs.drops)
        # What this step saves is in host memory when it begins, and may be written from there.
        self._to_disk.begin(jobs.spills, begins_s)
        self._from_disk.begin(jobs.stages, begins_s)
        return begins_s

    def step_end_s(self, began_s: float, took_s: float) -> float:
        """When a step that computes for so long is over."""
        return max(began_s + took_s, self._loaded_s + took_s / LAYERS if self._loaded_s > began_s else 0.0)

    def finished(self, now: float) -> KVConnectorOutput | None:
        """Copies done by ``now`` that were not reported before, as the worker would report them."""
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
        if not self._results:
            return None
        results, self._results = self._results, OffloadResults()
        return KVConnectorOutput(kv_connector_worker_meta=StepReport(results))

    def next_done_s(self) -> float:
        """When the next copy ends; ``inf`` where none is under way."""
        stored_s = next(iter(self._stores.values()), float("inf"))
        return min(stored_s, self._to_disk.next_done_s(), self._from_disk.next_done_s())

    @property
    def to_disk_bytes(self) -> int:
        """Bytes that were to be written so far."""
        return self._to_disk.moved_bytes

    @property
    def from_disk_bytes(self) -> int:
        """Bytes that were to be read so far."""
        return self._from_disk.moved_bytes

    @property
    def has_unsubmitted(self) -> bool:
        """Nothing waits here for the next step: orders wait in the planner."""
        return False

    def _copy_s(self, blocks: int, *, to_host: bool) -> float:
        size = blocks * self._block_bytes
        if to_host:
            self.to_host_bytes += size
        else:
            self.to_device_bytes += size
        return self._latency.copy_s(size, to_host=to_host)


class SimulatedTierConnector(SojournConnector):
    """Beside the scheduler, with a disk that is a number of blocks: no folder, so nothing of it outlives the
    run, and hashes may differ from start to start."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # No operator can set this: it is taken out before the settings are read.
        disk_blocks = vllm_config.kv_transfer_config.kv_connector_extra_config.pop(_DISK_BLOCKS)
        super().__init__(vllm_config, role, kv_cache_config)
        self.planner = OffloadPlanner(replace(self.settings.limits(), disk_blocks=disk_blocks))


def tier_transfer_config(host_blocks: int, page_bytes: int, disk_blocks: int = 0) -> KVTransferConfig:
    """The engine's settings for our tiers with so many blocks of host memory and of disk; 0: no disk."""
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
