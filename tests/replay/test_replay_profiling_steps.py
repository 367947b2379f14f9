"""What ``sojourn profile`` measures of an engine whose steps cost a known time, and reads of its limits."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fake_completions_server import FakeServer
from sojourn_server.policies.costs.engine_profile import EngineLimits
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.profiling.cost_fitting import fit_step_costs
from sojourn_server.profiling.prefill_measurement import MeasurementRun, measure_prefill, read_limits
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


def run_on(engine: Any, budget_s: float) -> MeasurementRun:
    return MeasurementRun(
        client=engine, model="m", repeats=2, budget_s=budget_s, vocabulary=8000, clock=lambda: engine.now,
        rng=random.Random(1),
    )  # fmt: skip


async def measure(engine: Any, budget_s: float = 1e6) -> tuple[StepMeasurement, list[str]]:
    run = run_on(engine, budget_s)
    measured = StepMeasurement(run, LIMITS, BLOCK)
    await measured.measure(prefill_points(), 8000)
    return measured, run.notes


@pytest.mark.parametrize(
    ("budget_s", "longest", "notes"),
    [(1e6, 8000, []), (4.5, 4000, ["the time budget of 4 s left out these lengths: 8000"])],
)
async def test_a_budget_leaves_out_the_longest_prefills_and_is_kept(
    budget_s: float, longest: int, notes: list[str]
) -> None:
    engine = ModelledEngine()
    run = run_on(engine, budget_s)
    points = await measure_prefill(run, 8000, budget_s)
    assert points == [pytest.approx(point) for point in prefill_points() if point[0] <= longest]
    assert engine.now <= budget_s
    assert run.notes == notes


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


METRICS = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="300"} 1.0\n'
)
REPORTED = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "kv_bytes_per_token": 131_072}


@pytest.mark.parametrize(
    ("metrics", "engine", "limits", "block_size"),
    [
        (METRICS, None, {"kv_pool_tokens": 38_400}, 128),
        (METRICS, {"block_size": "16", "num_blocks": "1000", **REPORTED},
         {"kv_pool_tokens": 16_000, **REPORTED}, 128),
        ("", ["odd"], {}, None),
    ],
)  # fmt: skip
async def test_limits_come_from_capabilities_or_metrics(
    metrics: str, engine: Any, limits: dict[str, int], block_size: int | None
) -> None:
    sojourn = engine is not None
    with FakeServer(metrics=metrics, sojourn=sojourn, engine=engine, max_model_len=8000) as server:
        async with CompletionsClient(server.url) as client:
            found = await read_limits(client, await client.discover(None))
    assert found == (EngineLimits(max_context_tokens=8000, **limits), block_size)
