"""vLLM's offloading connector with transfers in virtual time.

The scheduler side is vLLM's own. It decides which blocks are stored and when, looks blocks up, and evicts
them from host memory (LRU). Only the worker side is simulated. Its transfers have vLLM's order:

- A store (device to host) begins with the step after the one that computed the blocks.
- A load (host to device) begins with the step that orders it.
- A step waits for the stores of blocks that it overwrites.
- Each direction is one FIFO, like a DMA engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..vllm.compat import (
    KVConnectorOutput,
    KVTransferConfig,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)

if TYPE_CHECKING:
    from .latency.latency_protocol import LatencyModel

_ALIGNMENT_BYTES = 4096
"""The connector rounds the size of a block up to a multiple of this many bytes."""


class _Transfer(NamedTuple):
    job_id: int
    request_id: str
    done_s: float


class VllmOffloadTransfers:
    """Simulated copies between device and host memory of one engine. All times are virtual seconds."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        self._latency = latency
        self._block_bytes = block_bytes
        self._stores: deque[_Transfer] = deque()
        self._loads: deque[_Transfer] = deque()
        self._to_submit: dict[int, TransferJob] = {}
        """Stores that begin with the next step, by job id."""
        self._store_lane_free_s = 0.0
        self._load_lane_free_s = 0.0
        self.to_host_bytes = 0
        self.to_device_bytes = 0
        self.to_disk_bytes = self.from_disk_bytes = 0  # there is no disk

    def loads(self, metadata: OffloadingConnectorMetadata) -> Iterable[tuple[str, int]]:
        """Return (request id, number of blocks) for each load that this step starts."""
        return [(job.req_id, len(job.dst_spec.block_ids)) for job in metadata.load_jobs.values()]

    def begin_step(self, metadata: OffloadingConnectorMetadata, now: float) -> float:
        """Start the transfers of a step. Returns the time at which the step may begin. It is later than
        ``now`` if the step or one of its loads overwrites blocks that are still being stored. The step does
        not wait for loads."""
        waits_for = metadata.jobs_to_flush or ()
        for job_id in waits_for:
            job = metadata.store_jobs.pop(job_id, None)
            if job is not None:
                self._to_submit[job_id] = job
        for job_id, job in self._to_submit.items():
            self._store(job_id, job, now)
        self._to_submit.clear()
        begins_s = max([now, *(copy.done_s for copy in self._stores if copy.job_id in waits_for)])
        for job_id, job in metadata.load_jobs.items():
            size = len(job.dst_spec.block_ids) * self._block_bytes
            self.to_device_bytes += size
            start_s = max(begins_s, self._load_lane_free_s)
            self._load_lane_free_s = start_s + self._latency.copy_s(size, to_host=False)
            self._loads.append(_Transfer(job_id, job.req_id, self._load_lane_free_s))
        self._to_submit.update(metadata.store_jobs)
        return begins_s

    def _store(self, job_id: int, job: TransferJob, now: float) -> None:
        size = len(job.src_spec.block_ids) * self._block_bytes
        self.to_host_bytes += size
        start_s = max(now, self._store_lane_free_s)
        self._store_lane_free_s = start_s + self._latency.copy_s(size, to_host=True)
        self._stores.append(_Transfer(job_id, job.req_id, self._store_lane_free_s))

    def get_finished(self, now: float) -> KVConnectorOutput | None:
        """Return, as a worker would, the transfers that have ended by ``now`` and were not returned before.
        ``None`` if there are none."""
        metadata = OffloadingWorkerMetadata()
        for copy in self._take_done(self._stores, now):
            metadata.mark_completed(copy.job_id)
        received: set[str] = set()
        for copy in self._take_done(self._loads, now):
            metadata.mark_completed(copy.job_id)
            received.add(copy.request_id)
        if not metadata.completed_jobs:
            return None
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=metadata)

    def next_done_s(self) -> float:
        """Time at which the next transfer ends; ``inf`` if none is running."""
        return min((lane[0].done_s for lane in (self._stores, self._loads) if lane), default=float("inf"))

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is running, or will begin with the next step."""
        return bool(self._stores or self._loads or self._to_submit)

    @staticmethod
    def _take_done(lane: deque[_Transfer], now: float) -> Iterable[_Transfer]:
        while lane and lane[0].done_s <= now:
            yield lane.popleft()


def vllm_offload_transfer_config(host_blocks: int, page_bytes: int) -> KVTransferConfig:
    """Return vLLM's configuration for ``host_blocks`` blocks of host memory.

    ``page_bytes`` is the size of a block in the KV cache specification. Unlike in vLLM's default, outputs are
    stored too, because the next prompt of an agent contains its last output.
    """
    chunk_bytes = -(-page_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id="lab",
        kv_connector_extra_config={
            "cpu_bytes_to_use": host_blocks * chunk_bytes,
            "offload_prompt_only": False,
        },
    )
