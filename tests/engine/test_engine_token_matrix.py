"""Six policies on each tier below the device, in steps one after the other and planned ahead, while loads
fail: every token is stock's. ``test_engine_tokens.py`` has the combinations that every run tests."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import LOUD_BLOCK_BYTES, with_tiers
from multi_turn_programs import OUTPUT_TOKENS, generate
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from test_engine_tokens import in_one_thread, stock_in_short
from test_engine_vllm_tiers import host_memory

__all__ = ["in_one_thread", "stock_in_short"]  # fixtures
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

POLICIES = ("observe", "continuum", "saga", "mori", "tetris", "sojourn")
TIERS = ("our host memory", "our host memory and disk", "vLLM's host memory")
FAILING = 0.3
"""Share of the loads that fail."""
HOST_BYTES = 120 * LOUD_BLOCK_BYTES
"""For a third of the contexts, so that host memory evicts too, to the disk where there is one."""


def tier(name: str, folder: Path) -> dict[str, Any]:
    if name == "vLLM's host memory":
        return host_memory(HOST_BYTES)
    more = {"disk": str(folder), "disk_bytes": 1 << 30} if "disk" in name else {}
    return with_tiers(host_bytes=HOST_BYTES, **more)


@pytest.mark.parametrize(
    ("policy", "below", "ahead"), itertools.product(POLICIES, TIERS, (False, True)), ids=str
)
def test_tokens_are_stocks_while_loads_fail(
    loud_model: str,
    stock_in_short: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: str,
    below: str,
    ahead: bool,
) -> None:
    from sojourn_server.vllm.cpu_offload_worker import CpuOffloadWorker

    draw, loads = random.Random(8), Counter[str]()

    def maybe_fail() -> None:
        fails = draw.random() < FAILING
        loads["failed" if fails else "done"] += 1
        if fails:
            raise OSError("failed on purpose")

    ours, theirs = CpuDeviceBackend.to_device, CpuOffloadWorker.copy

    def to_device(device: Any, *args: Any, **more: Any) -> Any:
        maybe_fail()
        return ours(device, *args, **more)

    def copy(worker: Any, device: Any, chunks: Any, *, is_load: bool) -> int:
        if is_load:
            maybe_fail()
        return theirs(worker, device, chunks, is_load=is_load)

    monkeypatch.setattr(CpuDeviceBackend, "to_device", to_device)
    monkeypatch.setattr(CpuOffloadWorker, "copy", copy)
    with asynchronous_scheduling() if ahead else nullcontext():
        tokens, _ = generate(
            loud_model, {"policy": policy}, hints=True, turns=2, output_tokens=OUTPUT_TOKENS // 2,
            **tier(below, tmp_path),
        )  # fmt: skip
    assert tokens == stock_in_short
    assert loads["failed"] > 0
    assert loads["done"] > 0
