"""Copies KV between a CPU engine and the host memory of vLLM's own offloading, whose worker needs a GPU."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .compat import OffloadingWorker, TransferResult

if TYPE_CHECKING:
    from .compat import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec

logger = logging.getLogger("vllm.sojourn")


class CpuOffloadWorker(OffloadingWorker):
    """One thread for each direction, as vLLM's CUDA worker has streams. vLLM asserts that copies succeed, so
    all are reported as done, and ``take_failed`` tells which failed. A chunk that could not be filled cannot
    be loaded until it is filled again."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        pages = [each.page_size_bytes for each in caches.tensors]
        memory = [torch.zeros((chunks, blocks_per_chunk, page), dtype=torch.int8) for page in pages]
        self._groups = [
            [
                (caches.tensors[ref.tensor_idx].tensor, memory[ref.tensor_idx], ref.page_size_bytes)
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        """For each group of KV caches: (device's blocks, chunks in host memory, used bytes of a block)."""
        self._threads = [
            ThreadPoolExecutor(1, f"kv-{name}", torch.set_num_threads, (1,)) for name in ("store", "load")
        ]
        self._running: dict[int, Future[TransferResult]] = {}
        self._unfilled: set[int] = set()
        self._failed: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: Any
    ) -> bool:
        """``options``: vLLM 0.33 has ``expedited``, for loads within a step."""
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[TransferResult]:
        ended = [self._running.pop(job).result() for job in list(self._running) if self._running[job].done()]
        self._failed |= {each.job_id for each in ended if not each.success}
        return [replace(each, success=True) for each in ended]

    def take_failed(self) -> set[int]:
        """Return the failed jobs that ``get_finished`` has returned since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._running.keys():
            self._running[job].result()

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def _submit(self, job: int, device: GPULoadStoreSpec, host: Any, *, is_load: bool) -> bool:
        self._running[job] = self._threads[is_load].submit(self._run, job, device, host.block_ids, is_load)
        return True

    def _run(self, job: int, device: GPULoadStoreSpec, chunks: Any, is_load: bool) -> TransferResult:
        started_s, numbers = time.perf_counter(), set(chunks.tolist())
        try:
            if is_load and not numbers.isdisjoint(self._unfilled):
                raise OSError("a chunk of host memory could not be filled")
            size = self.copy(device, torch.from_numpy(chunks).long(), is_load=is_load)
            self._unfilled -= set() if is_load else numbers
        except Exception as error:
            logger.error("sojourn: a copy %s host memory failed: %r", "from" if is_load else "to", error)
            self._unfilled |= set() if is_load else numbers
            return TransferResult(job, False)
        return TransferResult(job, True, size, time.perf_counter() - started_s)

    def copy(self, device: GPULoadStoreSpec, chunks: torch.Tensor, *, is_load: bool) -> int:
        """Copy blocks group by group, in the order of both lists, and return the number of bytes."""
        size, blocks = 0, torch.from_numpy(device.block_ids).long()
        for group, count, first in zip(self._groups, device.group_sizes, device.block_indices, strict=True):
            if not count:
                continue
            # The first block may lie within its chunk.
            places = torch.arange(count) + first % self._blocks_per_chunk
            rows, parts = chunks[places // self._blocks_per_chunk], places % self._blocks_per_chunk
            for tensor, memory, used in group:
                if is_load:
                    tensor[blocks[:count], :used] = memory[rows, parts, :used]
                else:
                    memory[rows, parts, :used] = tensor[blocks[:count], :used]
                size += count * used
            blocks, chunks = blocks[count:], chunks[int(places[-1]) // self._blocks_per_chunk + 1 :]
        return size
