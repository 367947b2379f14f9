"""vLLM's offloading connector with transfers in virtual time.

The scheduler side is vLLM's own. It decides which blocks are stored and when, looks blocks up, and evicts
them from host memory (LRU). Only the worker side is simulated. Its transfers have vLLM's order:

- A store (device to host) begins with the step after the one that computed the blocks.
- A load (host to device) begins with the step that orders it.
- A step waits for the stores of blocks that it overwrites.
- Each direction is one FIFO, like a DMA engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..vllm.compat import (
    KVConnectorOutput,
    KVTransferConfig,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from .event_queue import HostTransfers

if TYPE_CHECKING:
    from .latency.latency_models import LatencyModel

_ALIGNMENT_BYTES = 4096
"""The connector rounds the size of a block up to a multiple of this many bytes."""


class VllmOffloadTransfers(HostTransfers):
    """Simulated copies between device and host memory of one engine. There is no disk."""

    def __init__(self, latency: LatencyModel, block_bytes: int) -> None:
        super().__init__(latency, block_bytes)
        self._to_submit: dict[int, TransferJob] = {}
        """Stores that begin with the next step, by job id."""

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
            self.to_host.begin(job_id, len(job.src_spec.block_ids) * self.block_bytes, now)
        self._to_submit.clear()
        begins_s = max([now, *(done_s for done_s, job_id in self.to_host.running if job_id in waits_for)])
        for job_id, job in metadata.load_jobs.items():
            size = len(job.dst_spec.block_ids) * self.block_bytes
            self.to_device.begin((job_id, job.req_id), size, begins_s)
        self._to_submit.update(metadata.store_jobs)
        return begins_s

    def get_finished(self, now: float) -> KVConnectorOutput | None:
        """Return, as a worker would, the transfers that have ended by ``now`` and were not returned before.
        ``None`` if there are none."""
        metadata = OffloadingWorkerMetadata()
        for job_id in self.to_host.take_done(now):
            metadata.mark_completed(job_id)
        received: set[str] = set()
        for job_id, request_id in self.to_device.take_done(now):
            metadata.mark_completed(job_id)
            received.add(request_id)
        if not metadata.completed_jobs:
            return None
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=metadata)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is running, or will begin with the next step."""
        return bool(super().is_busy or self._to_submit)


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
