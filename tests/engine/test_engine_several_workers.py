"""An engine whose model is split over two workers: stock's tokens, with blocks from host memory and disk."""

from __future__ import annotations

import pytest
from engine_tools import LOUD_BLOCK_BYTES, with_tiers
from multi_turn_programs import generate

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

AMPLE_BYTES = 2 * 350 * LOUD_BLOCK_BYTES
SHORT_BYTES = 2 * 40 * LOUD_BLOCK_BYTES
PROGRAMS = 5


def test_two_workers_give_the_tokens_of_stock_from_host_memory_and_disk(loud_model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    usual = {"programs": PROGRAMS, "distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    stock, _ = generate(loud_model, None, hints=False, **usual)
    below = with_tiers(host_bytes=SHORT_BYTES, disk=str(tmp_path), disk_bytes=AMPLE_BYTES)
    tokens, report = generate(loud_model, {"policy": "mori"}, hints=True, **below, **usual)
    assert tokens == stock
    assert report["stats"]["ledger"]["host_tokens"] > 300
    assert report["stats"]["ledger"]["lost_tokens"] == {}
    assert report["stats"]["tiers"]["moves"]["spilled"] > 0
    assert report["stats"]["tiers"]["moves"].get("failed", 0) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rank0of2", "rank1of2"}
