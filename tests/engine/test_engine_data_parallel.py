"""One server with two data-parallel ranks, each with KV of its own: programs lose their place without a
gateway, and keep it behind one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from gateway_process import GatewayProcess
from gateway_programs import PROGRAMS, TURNS, Run, play, share_that_found, share_that_stayed
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = (
    "--data-parallel-size", "2", "--max-model-len", "1024", "--max-num-seqs", "32",
    "--num-gpu-blocks-override", "1024", "--served-model-name", "tiny",
)  # fmt: skip
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def test_programs_keep_their_rank_behind_a_gateway_alone(tiny_model: str, tmp_path: Path) -> None:
    alone, behind = Run(prefix="alone"), Run(prefix="behind", first_token=2000)
    with EngineServer(
        tiny_model, serve_args=FLAGS, env=ENV, log_path=tmp_path / "engine.log", ready_timeout_s=600
    ) as server:
        asyncio.run(play(server.url, alone))
        with GatewayProcess([server.url], tmp_path / "gateway.log") as gateway:
            asyncio.run(play(gateway.url, behind))
            replicas = httpx.get(f"{gateway.url}/sojourn/v1/replicas", timeout=30, trust_env=False).json()
        stats = httpx.get(f"{server.url}/sojourn/v1/stats", timeout=30, trust_env=False).json()
    assert not alone.failed + behind.failed
    assert alone.answers == behind.answers == PROGRAMS * TURNS
    # vLLM sends each request to the less busy rank, so that some turns find nothing.
    assert any(tokens == 0 for cached in alone.cached.values() for tokens in cached[1:])
    assert len(behind.at_home()) == 2, replicas
    for rank in behind.at_home():
        assert share_that_stayed(behind, rank) == 1.0
        assert share_that_found(behind, rank) == 1.0
    turns = [rank["turns"] for rank in stats["engines"].values()]
    assert sum(turns) == 2 * PROGRAMS * TURNS
    assert min(turns) > PROGRAMS
