"""Measures this machine's throughput of matrix multiplication, for the closed-form model of prefill."""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

REPEATS = 5
CPU_SIDE, CUDA_SIDE = 2048, 8192
"""Side lengths of the multiplied square matrices, large enough that only the multiplication matters."""
TRIAL_SIDE = 256
"""Side length of the matrices that show which type a CPU multiplies faster."""


class ComputeThroughput(NamedTuple):
    """Measured operations per second. Without a measurement, they are ``None`` and ``reason`` says why."""

    flops_per_s: float | None
    reason: str = ""


def measure_compute() -> ComputeThroughput:
    """Return the throughput of one device, in operations per second. It is the median over a few products of
    two matrices: in bfloat16 on a CUDA device, and on a CPU in bfloat16 or float32, whichever is faster,
    since a CPU may only emulate bfloat16. Never raises; a failed measurement gives ``None`` and the
    reason."""
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


def _matmul_rate(dtype: torch.dtype, side: int, device: str) -> float:
    import torch

    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    # The first product is left out, because it also selects the kernel.
    return 2 * side**3 / max(statistics.median(times[1:]), 1e-9)
