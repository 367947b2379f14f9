"""How fast KV moves between device and host on this machine (Continuum §5.2)."""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import time
from typing import Any, NamedTuple

COPY_BYTES = 256 * 1024 * 1024
REPEATS = 5


class Bandwidth(NamedTuple):
    """Bytes a second each way; ``None`` with the ``reason`` where it could not be measured."""

    device_to_host_bytes_per_s: float | None
    host_to_device_bytes_per_s: float | None
    reason: str = ""
    """Why not, or what was measured in its place."""


def measure_bandwidth(copy_bytes: int = COPY_BYTES) -> Bandwidth:
    """Median of a few large copies: pinned memory with CUDA, plain memory on a CPU engine. Never raises."""
    if importlib.util.find_spec("torch") is None:
        return Bandwidth(None, None, "torch is not installed here")
    try:
        import torch

        if torch.cuda.is_available():
            return _cuda(torch, copy_bytes)
        rate = _rate(torch, copy_bytes, torch.empty(copy_bytes, dtype=torch.uint8), None)
        return Bandwidth(rate, rate, "no CUDA device: memory copies within the host")
    except Exception as error:  # a driver that doesn't fit, no memory left beside the engine, …
        return Bandwidth(None, None, f"the copy failed: {type(error).__name__}: {str(error)[:200]}")


def describe_hardware() -> str:
    """The GPUs as CUDA names them, else the processor and its number of usable cores."""
    if importlib.util.find_spec("torch") is not None:
        try:
            import torch

            if torch.cuda.is_available():
                return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
        except Exception:
            pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} cores of {_processor()}"


def _cuda(torch: Any, copy_bytes: int) -> Bandwidth:
    host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
    return Bandwidth(
        _rate(torch, copy_bytes, host, device, into_host=True),
        _rate(torch, copy_bytes, host, device, into_host=False),
    )


def _rate(torch: Any, copy_bytes: int, host: Any, device: Any, *, into_host: bool = True) -> float:
    source = device if device is not None else torch.ones(copy_bytes, dtype=torch.uint8)
    target = host
    if not into_host:
        source, target = host, device
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device is not None:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    # The first copy touches its pages for the first time.
    return copy_bytes / max(statistics.median(times[1:]), 1e-9)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
