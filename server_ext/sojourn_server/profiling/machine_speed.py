"""Measures this machine: copies between device and host (Continuum §5.2), and matrix multiplication."""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

REPEATS = 5
COPY_BYTES = 256 * 1024 * 1024
CPU_SIDE, CUDA_SIDE = 2048, 8192
"""Side lengths of the multiplied square matrices, large enough that only the multiplication matters."""
TRIAL_SIDE = 256
"""Side length of the matrices that show which data type a CPU multiplies faster."""


class CopyBandwidth(NamedTuple):
    """Measured bytes per second in each direction; ``None`` if not measured (``reason`` says why)."""

    device_to_host_bytes_per_s: float | None
    host_to_device_bytes_per_s: float | None
    reason: str = ""
    """Why the bandwidth is missing, or what was measured instead."""


class ComputeThroughput(NamedTuple):
    """Measured floating-point operations per second; ``None`` if not measured (``reason`` says why)."""

    flops_per_s: float | None
    reason: str = ""


class KvBlockLayout(NamedTuple):
    """The sizes of an engine's KV blocks. The part of each layer is contiguous in memory."""

    block_bytes: int
    """Bytes of a block over all layers."""
    layers: int


def measure_bandwidth(copy_bytes: int = COPY_BYTES, blocks: KvBlockLayout | None = None) -> CopyBandwidth:
    """Measure copy bandwidth as the median of a few copies of about ``copy_bytes``, and return it. Never
    raises.

    With CUDA, the copies are between the device and pinned host memory. Without CUDA, they are the copies of
    KV blocks that a CPU engine's host memory tier makes. ``blocks``: sizes of these blocks; ``None``: the
    copies are plain memory copies.
    """
    if importlib.util.find_spec("torch") is None:
        return CopyBandwidth(None, None, "torch is not installed here")
    try:
        import torch

        if torch.cuda.is_available():
            return _cuda_bandwidth(torch, copy_bytes)
        if blocks is not None:
            return _host_tier_bandwidth(torch, copy_bytes, blocks)
        rate = _copy_rate(torch, copy_bytes, torch.empty(copy_bytes, dtype=torch.uint8), None)
        return CopyBandwidth(
            rate, rate, "no CUDA device: memory copies within the host, in one piece and not in blocks"
        )
    except Exception as error:  # an incompatible driver, no free memory next to the engine, …
        return CopyBandwidth(None, None, f"the copy failed: {type(error).__name__}: {str(error)[:200]}")


def measure_compute() -> ComputeThroughput:
    """Measure the speed of matrix multiplication on one device, as the median of a few products, and return
    it. Never raises.

    A CUDA device multiplies in bfloat16. A CPU multiplies in bfloat16 or float32, whichever is faster here,
    because some CPUs only emulate bfloat16.
    """
    if importlib.util.find_spec("torch") is None:
        return ComputeThroughput(None, "torch is not installed here")
    try:
        import torch

        if torch.cuda.is_available():
            return ComputeThroughput(_matmul_rate(torch.bfloat16, CUDA_SIDE, "cuda"))
        fastest = max(
            (torch.bfloat16, torch.float32), key=lambda dtype: _matmul_rate(dtype, TRIAL_SIDE, "cpu")
        )
        return ComputeThroughput(_matmul_rate(fastest, CPU_SIDE, "cpu"))
    except Exception as error:  # an incompatible driver, no free memory next to the engine, …
        return ComputeThroughput(
            None, f"a product of matrices failed: {type(error).__name__}: {str(error)[:200]}"
        )


def describe_hardware() -> str:
    """Return the number and name of the GPUs as text; without GPUs, the number of usable processor cores and
    the name of the processor."""
    if importlib.util.find_spec("torch") is not None:
        try:
            import torch

            if torch.cuda.is_available():
                return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
        except Exception:
            pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} cores of {processor_name()}"


def _cuda_bandwidth(torch: Any, copy_bytes: int) -> CopyBandwidth:
    host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
    return CopyBandwidth(
        _copy_rate(torch, copy_bytes, host, device, into_host=True),
        _copy_rate(torch, copy_bytes, host, device, into_host=False),
    )


def _copy_rate(torch: Any, copy_bytes: int, host: Any, device: Any, *, into_host: bool = True) -> float:
    source = device if device is not None else torch.ones(copy_bytes, dtype=torch.uint8)
    target = host
    if not into_host:
        source, target = host, device

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device is not None:
            torch.cuda.synchronize()

    return copy_bytes / _median_seconds(copy)


def _host_tier_bandwidth(torch: Any, copy_bytes: int, blocks: KvBlockLayout) -> CopyBandwidth:
    """Measure how fast the host tier of a CPU engine saves KV blocks and loads them back."""
    from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend, block_rows
    from sojourn_server.kv_offload.offload_jobs import BlockCopy, OffloadJobs
    from sojourn_server.kv_offload.offload_worker import OffloadWorker

    count = max(1, copy_bytes // blocks.block_bytes)
    piece = max(1, blocks.block_bytes // blocks.layers)
    caches = {f"layer{n}": torch.ones(count, piece, dtype=torch.uint8) for n in range(blocks.layers)}
    rows = [block_rows(name, cache, count) for name, cache in caches.items()]
    memory = CpuDeviceBackend(rows, count)
    # In a pool that has been used for a while, a context's blocks are scattered.
    draw = random.Random(0)
    copies = [
        BlockCopy(*pair) for pair in zip(*(draw.sample(range(count), count) for _ in range(2)), strict=True)
    ]
    mover = OffloadWorker(memory)

    def save() -> None:
        mover.begin_step(OffloadJobs(saves=copies))
        if mover.take_results().lost_slots:
            raise MemoryError("blocks could not be copied to host memory")

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


def _matmul_rate(dtype: torch.dtype, side: int, device: str) -> float:
    import torch

    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * side**3 / _median_seconds(multiply)


def _median_seconds(run: Callable[[], None]) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    # The first run is left out: a first copy faults its pages in, a first product selects the kernel.
    return max(statistics.median(times[1:]), 1e-9)


def processor_name() -> str:
    """Return the processor's name as the operating system reports it."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
