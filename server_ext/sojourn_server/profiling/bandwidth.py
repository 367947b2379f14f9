"""How fast KV moves between device and host on this machine (Continuum §5.2)."""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

COPY_BYTES = 256 * 1024 * 1024
REPEATS = 5


class Bandwidth(NamedTuple):
    """Bytes a second each way; ``None`` with the ``reason`` where it could not be measured."""

    device_to_host_bytes_per_s: float | None
    host_to_device_bytes_per_s: float | None
    reason: str = ""
    """Why not, or what was measured in its place."""


class KvBlocks(NamedTuple):
    """KV blocks as an engine has them: each layer's part is a piece of its own."""

    block_bytes: int
    """All layers."""
    layers: int


def measure_bandwidth(copy_bytes: int = COPY_BYTES, blocks: KvBlocks | None = None) -> Bandwidth:
    """Median of a few large copies. Never raises.

    Pinned memory with CUDA. On a CPU engine the host tier's own mover with such ``blocks``; plain copies of
    memory where none are given.
    """
    if importlib.util.find_spec("torch") is None:
        return Bandwidth(None, None, "torch is not installed here")
    try:
        import torch

        if torch.cuda.is_available():
            return _cuda(torch, copy_bytes)
        if blocks is not None:
            return _mover(torch, copy_bytes, blocks)
        rate = _rate(torch, copy_bytes, torch.empty(copy_bytes, dtype=torch.uint8), None)
        return Bandwidth(
            rate, rate, "no CUDA device: memory copies within the host, in one piece and not in blocks"
        )
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

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device is not None:
            torch.cuda.synchronize()

    return copy_bytes / _seconds(copy)


def _mover(torch: Any, copy_bytes: int, blocks: KvBlocks) -> Bandwidth:
    """What a CPU engine's host tier does in a step that saves many blocks, and in one that loads them."""
    from sojourn_server.tiers.host_memory import HostMemory
    from sojourn_server.tiers.jobs import Copy, TierJobs
    from sojourn_server.tiers.mover import Mover

    count = max(1, copy_bytes // blocks.block_bytes)
    piece = max(1, blocks.block_bytes // blocks.layers)
    caches = {f"layer{n}": torch.ones(count, piece, dtype=torch.uint8) for n in range(blocks.layers)}
    memory = HostMemory(caches, count, count)
    # A pool that has been in use for a while gives a context blocks from everywhere.
    draw = random.Random(0)
    copies = [Copy(*pair) for pair in zip(*(draw.sample(range(count), count) for _ in range(2)), strict=True)]
    mover = Mover(memory)

    def save() -> None:
        mover.begin_step(TierJobs(saves=copies))
        if mover.take_results().lost_slots:
            raise MemoryError("blocks could not be copied to host memory")

    def load() -> None:
        mover.begin_step(TierJobs(loads={"profile": copies}))
        if mover.end_step():
            raise MemoryError("blocks could not be copied back")

    try:
        moved = count * memory.block_bytes
        return Bandwidth(
            moved / _seconds(save),
            moved / _seconds(load),
            f"no CUDA device: copies between a CPU engine's KV and host memory, as --kv-host-gib makes them, "
            f"of {memory.block_bytes:,} bytes a block",
        )
    finally:
        mover.close()


def _seconds(copy: Callable[[], None]) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        copy()
        times.append(time.perf_counter() - started)
    # The first copy touches its pages for the first time.
    return max(statistics.median(times[1:]), 1e-9)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
