"""Programs that wait in a real engine without KV move to another that has room (MORI §4.3.1, M7)."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from gateway_process import GatewayProcess
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

POOL_TOKENS = 8192
LONG_PROMPT, LONG_OUTPUT = 5900, 2200
"""A request that goes past the gateway. The gateway does not know that its engine is full."""
PROMPT = 2600
"""One such prompt does not fit beside the long one's, and two fit on the other engine. The gateway
compares the peak that it expects with the memory of device and host."""
IMPATIENT = {
    "routing.affinity_strategy.MIN_ENGINE_WAIT_S": 0.3,
}
"""Short intervals, so that the long answer can be short."""
FLAGS = (
    "--max-model-len", str(POOL_TOKENS), "--num-gpu-blocks-override", str(POOL_TOKENS // 32 + 2),
    "--block-size", "32", "--kv-host-gib", "0.05", "--enforce-eager",
)  # fmt: skip


def test_a_program_that_waits_in_its_engine_is_served_by_the_other(tiny_model: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        full, free = (
            stack.enter_context(
                EngineServer(
                    tiny_model,
                    policy="mori",
                    serve_args=(*FLAGS, "--served-model-name", "tiny", f"engine-{name}"),
                    env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
                    log_path=tmp_path / f"{name}.log",
                )
            )
            for name in ("a", "b")
        )
        urls = [full.url, free.url]
        flags = ("--policy", "mori", "--waiting-order", "idleness")
        gateway = stack.enter_context(
            GatewayProcess(urls, tmp_path / "gateway.log", *flags, constants=IMPATIENT)
        )
        answers = asyncio.run(asyncio.wait_for(play(gateway.url, full.url), 200))
        metrics = httpx.get(f"{gateway.url}/metrics", timeout=30, trust_env=False).text
    assert answers == {"p0": free.url.removeprefix("http://"), "p1": free.url.removeprefix("http://")}
    assert 'sojourn_gateway_requests_total{reason="relocated"} 1.0' in metrics


async def play(gateway_url: str, full_url: str) -> dict[str, str]:
    """Replicas that served two new programs while a long answer filled the engine at ``full_url``."""
    answers = {}
    async with aiohttp.ClientSession() as http:

        async def turn(program: str) -> None:
            async with http.post(f"{gateway_url}/v1/completions", json=request(program, PROMPT, 8)) as answer:
                assert answer.status == 200, await answer.text()
                answers[program] = answer.headers["X-Sojourn-Replica"]
                await answer.read()

        # To sample from a part of the vocabulary takes longer than the model: the answer lasts.
        long = {**request("long", LONG_PROMPT, LONG_OUTPUT), "temperature": 1.0, "top_p": 0.9, "logprobs": 5}
        async with http.post(f"{full_url}/v1/completions", json={**long, "stream": True}) as stream:
            assert stream.status == 200, await stream.text()
            await stream.content.readline()  # its prompt is on the device
            rest = asyncio.ensure_future(stream.read())
            try:
                await asyncio.gather(turn("p0"), turn("p1"))
                assert not rest.done(), "the long answer ended first: nothing was shown"
            finally:
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
    return answers


def request(program: str, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A completion of ``program``, whose prompt shares no block with another program's."""
    start = 1 + sum(map(ord, program)) % 500
    return {
        "model": "tiny",
        "prompt": [start + token % 300 for token in range(prompt_tokens)],
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "vllm_xargs": {"agentic_context": json.dumps({"program_id": program})},
    }
