"""Measures this machine: copies between device and host (Continuum §5.2)."""

from __future__ import annotations

import os
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

    With CUDA, the copies are between the device and pinned host memory. Without CUDA, they are copies within
    the host, of scattered blocks of ``block_bytes``, as a CPU engine's host memory tier makes them; ``None``:
    in one piece.
    """
    try:
        import torch

        if torch.cuda.is_available():
            host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
            return CopyBandwidth(_copy_rate(torch, host, device), _copy_rate(torch, device, host))
        import numpy

        size = block_bytes or copy_bytes
        source = numpy.ones((max(1, copy_bytes // size), size), numpy.uint8)
        # In a pool that has been used for a while, a context's blocks are scattered.
        target, places = numpy.empty_like(source), numpy.random.default_rng(0).permutation(len(source))
        seconds = _median_seconds(lambda: numpy.take(source, places, 0, out=target, mode="clip"))
        rate, what = (
            source.nbytes / seconds,
            f"in blocks of {size:,} bytes" if block_bytes else "in one piece",
        )
        return CopyBandwidth(rate, rate, f"no CUDA device: memory copies within the host, {what}")
    except ModuleNotFoundError as error:
        return CopyBandwidth(None, None, f"{error.name} is not installed here")
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
        torch.cuda.synchronize()

    return float(target.nbytes) / _median_seconds(copy)


def _median_seconds(run: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    # The first run is left out: a first copy faults its pages in, a first product selects the kernel.
    return max(statistics.median(times[1:]), 1e-9)
