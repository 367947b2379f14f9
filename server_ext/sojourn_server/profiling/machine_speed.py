"""Measures this machine: copies between device and host (Continuum §5.2)."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from sojourn_server.simulator.report.results_file import processor_name

REPEATS = 5
COPY_BYTES = 256 * 1024 * 1024


class CopyBandwidth(NamedTuple):
    """Measured bytes per second in each direction; ``None`` if not measured (``reason`` says why)."""

    device_to_host_bytes_per_s: float | None
    host_to_device_bytes_per_s: float | None
    reason: str = ""
    """Why the bandwidth is missing, or what was measured instead."""


def measure_bandwidth(copy_bytes: int = COPY_BYTES, block_bytes: int | None = None) -> CopyBandwidth:
    """Measure copy bandwidth as the median of a few copies of about ``copy_bytes``, and return it. Never
    raises.

    With CUDA, the copies are between the device and pinned host memory. Without CUDA, they are the copies of
    KV blocks that a CPU engine's host memory tier makes. ``block_bytes``: size of such a block; ``None``: the
    copies are plain memory copies.
    """
    try:
        import torch

        if torch.cuda.is_available():
            host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
            return CopyBandwidth(_copy_rate(torch, host, device), _copy_rate(torch, device, host))
        if block_bytes is not None:
            return _host_tier_bandwidth(torch, copy_bytes, block_bytes)
        source = torch.ones(copy_bytes, dtype=torch.uint8)
        rate = _copy_rate(torch, torch.empty_like(source), source)
        return CopyBandwidth(
            rate, rate, "no CUDA device: memory copies within the host, in one piece and not in blocks"
        )
    except ModuleNotFoundError:
        return CopyBandwidth(None, None, "torch is not installed here")
    except Exception as error:  # an incompatible driver, no free memory next to the engine, …
        return CopyBandwidth(None, None, f"the copy failed: {type(error).__name__}: {str(error)[:200]}")


def describe_hardware() -> str:
    """Return the number and name of the GPUs as text; without GPUs, the number of usable processor cores and
    the name of the processor."""
    with suppress(Exception):  # without torch, or with an incompatible driver
        import torch

        if torch.cuda.is_available():
            return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} cores of {processor_name()}"


def _copy_rate(torch: Any, target: Any, source: Any) -> float:
    """Bytes per second of a copy from ``source`` to ``target``."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if target.is_cuda or source.is_cuda:
            torch.cuda.synchronize()

    return float(target.nbytes) / _median_seconds(copy)


def _host_tier_bandwidth(torch: Any, copy_bytes: int, block_bytes: int) -> CopyBandwidth:
    """Measure how fast the host tier of a CPU engine saves KV blocks and loads them back."""
    from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend, block_rows
    from sojourn_server.kv_offload.offload_jobs import BlockCopy, OffloadJobs
    from sojourn_server.kv_offload.offload_worker import OffloadWorker

    count = max(1, copy_bytes // block_bytes)
    cache = torch.ones(count, block_bytes, dtype=torch.uint8)
    memory = CpuDeviceBackend([block_rows("layer", cache, count)], count)
    # In a pool that has been used for a while, a context's blocks are scattered.
    draw = random.Random(0)
    copies = [
        BlockCopy(*pair) for pair in zip(*(draw.sample(range(count), count) for _ in range(2)), strict=True)
    ]
    mover = OffloadWorker(memory)

    def save() -> None:
        mover.begin_step(OffloadJobs(saves=copies))

    def load() -> None:
        mover.begin_step(OffloadJobs(loads={"profile": copies}))
        mover.wait_for_loads()
        if mover.take_loaded()[1]:
            raise MemoryError("blocks could not be copied back")

    try:
        moved = count * memory.block_bytes
        return CopyBandwidth(
            moved / _median_seconds(save),
            moved / _median_seconds(load),
            f"no CUDA device: copies between a CPU engine's KV and host memory, as --kv-host-gib makes them, "
            f"of {memory.block_bytes:,} bytes a block",
        )
    finally:
        mover.close()


def _median_seconds(run: Callable[[], None]) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    # The first run is left out: a first copy faults its pages in, a first product selects the kernel.
    return max(statistics.median(times[1:]), 1e-9)
