"""Chats whose next prompts find little of their contexts, on an engine where computing is cheap."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.simulator.client_hints import ClientHints
from sojourn_server.simulator.simulated_clients import SimulatedOutputs
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.traces.trace_file import write_trace
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

pytestmark = pytest.mark.slow

USERS, TURNS, NEW_TOKENS, POOL_TOKENS = 8, 8, 600, 13_760
PROFILE = EngineProfile(
    "small", "cheap computing", "vllm", 32, PrefillCurve(0.005, 1.5e-5, 0.0),
    points=((1000, 0.02), (3000, 0.05), (6000, 0.095)),
    device_to_host_bytes_per_s=1e10, host_to_device_bytes_per_s=1e10,
    limits=EngineLimits(
        kv_pool_tokens=POOL_TOKENS, max_context_tokens=8192, max_num_seqs=128, max_num_batched_tokens=2048
    ),
    steps=StepCosts(0.004, 1.5e-5, 0.0, 0.0, 0.0, 0.001),
)  # fmt: skip


def chat(number: int, draw: random.Random) -> TraceProgram:
    """Each prompt has the first 600 tokens of the one before, and is longer."""
    turns: list[TraceTurn] = []
    prompt = NEW_TOKENS
    for turn in range(TURNS):
        output = max(8, int(draw.gauss(200, 50)))
        kept: dict[str, Any] = {"reset": True, "prefix_tokens": NEW_TOKENS} if turn else {}
        gap_s = 2.0 if turn + 1 < TURNS else None
        turns.append(
            TraceTurn(prompt_tokens=prompt, output_tokens=output, gap_s=gap_s, gap_kind="human", **kept)
        )
        prompt += output + NEW_TOKENS
    return TraceProgram(program_id=f"chat{number}", source="made", turns=tuple(turns))


def test_first_tokens_of_chats_come_as_soon_as_under_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clients send program ids and nothing else.
    monkeypatch.setattr(ClientHints, "queue_events", lambda *_: False)
    monkeypatch.setattr(ClientHints, "context", lambda _: {})
    monkeypatch.setattr(SimulatedOutputs, "read", lambda *_: ())
    profile, trace, draw = tmp_path / "cheap.toml", tmp_path / "chats.jsonl", random.Random(7)
    profile.write_text(PROFILE.to_toml(), encoding="utf-8")
    write_trace(trace, [chat(number, draw) for number in range(3 * USERS)])

    def first_token_s(policy: str) -> tuple[float, float]:
        """Mean and P95."""
        spec = RunSpec(
            policy=policy, workload=str(trace), hardware=str(profile), cpu_ratio=0.0,
            programs=USERS, until_s=120.0, pool_tokens=POOL_TOKENS, max_model_len=8192,
        )  # fmt: skip
        turns = [turn for program in run_simulation(spec).programs for turn in program.turns]
        waits = sorted(
            turn.first_token_s - turn.submitted_s for turn in turns if turn.first_token_s is not None
        )
        assert len(waits) > 100
        return mean(waits), waits[int(0.95 * len(waits))]

    (stock_mean, stock_p95), (our_mean, our_p95) = first_token_s("stock"), first_token_s("sojourn")
    assert our_mean <= 1.1 * stock_mean
    assert our_p95 <= 1.2 * stock_p95
