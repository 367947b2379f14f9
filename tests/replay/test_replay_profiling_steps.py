"""The decode half of ``sojourn profile`` against an engine whose steps cost a known time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
from fake_completions_server import FakeServer
from sojourn_server.policies.costs.engine_profile import EngineLimits
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.profiling.cost_fitting import fit_prefill_curve, fit_step_costs
from sojourn_server.profiling.prefill_measurement import MeasurementRun, read_limits
from sojourn_server.profiling.step_measurement import StepMeasurement, decode_sample, prefill_sample
from sojourn_server.replay.completions_client import Completion, CompletionsClient

COSTS = StepCosts(step_s=8e-3, token_s=2e-4, pair_s=2e-8, kv_token_s=3e-7, request_s=1e-4, call_s=5e-3)
LIMITS = EngineLimits(kv_pool_tokens=40_000, max_num_seqs=16, max_num_batched_tokens=1024)
BLOCK = 16


class ModelledEngine:
    """Answers in virtual time with a prefix cache of whole blocks; requests that overlap share steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.live = self.most_live = 0
        self._cache: set[tuple[int, ...]] = set()

    async def complete(self, model: str, prompt: list[int], max_tokens: int) -> Completion:
        assert len(prompt) + max_tokens <= 8001
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        await asyncio.sleep(0)  # let all that were sent at once arrive
        batch = self.live
        cached = 0
        # Fresh prompts are random: where a block stands tells which prefix it ends.
        blocks = [(end, *prompt[end - BLOCK : end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        while cached + BLOCK < len(prompt) and blocks[cached // BLOCK] in self._cache:
            cached += BLOCK
        self._cache.update(blocks)
        ttft_s = COSTS.seconds(prefill_sample(1, len(prompt) - cached, cached, 1024))
        decode = max_tokens - 1
        tpot_s = COSTS.seconds(decode_sample(1, len(prompt) + 33 / 2, batch)) if decode else None
        self.now += (ttft_s + decode * (tpot_s or 0.0)) / batch
        await asyncio.sleep(0)
        self.live -= 1
        return Completion(
            ttft_s=ttft_s,
            latency_s=ttft_s + decode * (tpot_s or 0.0),
            prompt_tokens=len(prompt),
            output_tokens=max_tokens,
            cached_tokens=cached,
        )


def prefill_points() -> list[tuple[int, float]]:
    return [(n, COSTS.seconds(prefill_sample(1, n, 0, 1024))) for n in (1000, 2000, 4000, 8000)]


async def measure(engine: Any, budget_s: float = 1e6) -> tuple[StepMeasurement, list[str]]:
    run = MeasurementRun(
        client=engine, model="m", repeats=2, budget_s=budget_s, vocabulary=8000, clock=lambda: engine.now,
        rng=random.Random(1),
    )  # fmt: skip
    measured = StepMeasurement(run, LIMITS, BLOCK)
    await measured.measure(prefill_points(), 8000)
    return measured, run.notes


async def test_the_costs_of_the_engine_are_found() -> None:
    engine = ModelledEngine()
    measured, notes = await measure(engine)
    assert notes == []
    assert fit_step_costs(measured.samples) == pytest.approx(COSTS, rel=1e-3)
    assert engine.most_live == 16
    contexts = [context for context, _ in measured.decode_points]
    assert contexts == sorted(contexts)
    assert len(contexts) == 4


async def test_a_budget_is_kept_and_what_it_left_out_is_named() -> None:
    engine = ModelledEngine()
    measured, notes = await measure(engine, budget_s=8.0)
    assert engine.now <= 8.0 * 1.2
    assert measured.samples
    (note,) = notes
    assert note.startswith("the time budget left out: ")
    assert "decode of 1 × 7,967 tokens" in note


class TellingServer(FakeServer):
    """Also answers as vLLM and the plugin do, as far as ``metrics`` and ``capabilities`` say."""

    def get(self, handler: Any) -> None:
        if handler.path == "/metrics" and self.metrics:
            handler.answer(self.metrics.encode(), kind="text/plain")
        elif handler.path == "/sojourn/v1/capabilities" and self.capabilities:
            handler.answer(self.capabilities)
        else:
            super().get(handler)


METRICS = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="300"} 1.0\n'
)
CAPABILITIES = {
    "name": "sojourn",
    "wire": [1],
    "engine": {
        "block_size": "16",
        "num_blocks": "1000",
        "max_num_seqs": "64",
        "max_num_batched_tokens": "4096",
        "kv_bytes_per_token": "131072",
    },
}


async def reported(url: str) -> tuple[EngineLimits, int | None]:
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        return await read_limits(client, dataclasses.replace(served, max_context_tokens=8000))


async def test_limits_come_from_capabilities_or_metrics() -> None:
    with TellingServer(metrics=METRICS, capabilities=None) as server:
        limits = EngineLimits(kv_pool_tokens=38_400, max_context_tokens=8000)
        assert await reported(server.url) == (limits, 128)
    with TellingServer(metrics=METRICS, capabilities=CAPABILITIES) as server:
        limits = EngineLimits(
            kv_pool_tokens=16_000,
            max_context_tokens=8000,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            kv_bytes_per_token=131_072,
        )
        assert await reported(server.url) == (limits, 128)
    with TellingServer(metrics="", capabilities={**CAPABILITIES, "engine": ["odd"]}) as server:
        assert await reported(server.url) == (EngineLimits(max_context_tokens=8000), None)


def test_the_curve_and_the_samples_tell_the_same_of_a_prefill() -> None:
    points = prefill_points()
    fitted = fit_prefill_curve(points)
    for tokens, seconds in points:
        assert fitted.seconds(tokens) == pytest.approx(seconds, rel=0.02)
