"""Measures this machine's throughput of matrix multiplication, for the closed-form model of prefill."""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any, NamedTuple

REPEATS = 5
CPU_SIDE, CUDA_SIDE = 2048, 8192
"""Side lengths of the multiplied square matrices, large enough that only the multiplication matters."""


class ComputeThroughput(NamedTuple):
    """Measured operations per second. Without a measurement, they are ``None`` and ``reason`` says why."""

    flops_per_s: float | None
    reason: str = ""


def measure_compute() -> ComputeThroughput:
    """Return the throughput of one device, in operations per second. It is the median over a few products of
    two bfloat16 matrices. Never raises; a failed measurement gives ``None`` and the reason."""
    if importlib.util.find_spec("torch") is None:
        return ComputeThroughput(None, "torch is not installed here")
    try:
        import torch

        cuda = torch.cuda.is_available()
        return ComputeThroughput(
            _matmul_rate(torch, CUDA_SIDE if cuda else CPU_SIDE, "cuda" if cuda else "cpu")
        )
    except Exception as error:  # an incompatible driver, no free memory next to the engine, …
        return ComputeThroughput(
            None, f"a product of matrices failed: {type(error).__name__}: {str(error)[:200]}"
        )


def _matmul_rate(torch: Any, side: int, device: str) -> float:
    left, right = (torch.ones(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    # The first product is left out, because it also selects the kernel.
    return 2 * side**3 / max(statistics.median(times[1:]), 1e-9)
