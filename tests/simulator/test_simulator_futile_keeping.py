"""Chats whose next prompts find little of their contexts, on an engine where computing is cheap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from sojourn_server.simulator.client_hints import ClientHints
from sojourn_server.simulator.simulated_clients import SimulatedOutputs
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation

pytestmark = pytest.mark.slow

USERS, TURNS, NEW_TOKENS, POOL_TOKENS = 8, 8, 600, 13_760
PROFILE = """\
version = 3
model = "small"
hardware = "cheap computing"
engine = "vllm"
block_size = 32
points = [[1000, 0.02], [3000, 0.05], [6000, 0.095]]
device_to_host_bytes_per_s = 1e10
host_to_device_bytes_per_s = 1e10
steps = [0.004, 1.5e-5, 0.0, 0.0, 0.0, 0.001]

[prefill]
a_s = 0.005
b_s_per_token = 1.5e-5
c_s_per_token2 = 0.0

[limits]
kv_pool_tokens = 13760
max_context_tokens = 8192
max_num_seqs = 128
max_num_batched_tokens = 2048
"""


def chats(folder: Path) -> Path:
    """A trace: each prompt has the first 600 tokens of the one before, and is longer."""
    draw = random.Random(7)
    lines = []
    for number in range(3 * USERS):
        turns: list[dict[str, Any]] = []
        prompt = NEW_TOKENS
        for turn in range(TURNS):
            output = max(8, int(draw.gauss(200, 50)))
            kept = {"reset": 1, "prefix_tokens": NEW_TOKENS} if turn else {}
            turns.append(
                {"prompt_tokens": prompt, "output_tokens": output, "gap_s": 2.0, "gap_kind": "human", **kept}
            )
            prompt += output + NEW_TOKENS
        turns[-1]["gap_s"] = None
        lines.append(json.dumps({"program_id": f"chat{number}", "source": "made", "turns": turns}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_first_tokens_of_chats_come_as_soon_as_under_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clients send program ids and nothing else.
    monkeypatch.setattr(ClientHints, "queue_events", lambda *_: False)
    monkeypatch.setattr(ClientHints, "context", lambda _: {})
    monkeypatch.setattr(SimulatedOutputs, "read", lambda *_: ())
    profile = tmp_path / "cheap.toml"
    profile.write_text(PROFILE, encoding="utf-8")

    def first_token_s(policy: str) -> tuple[float, float]:
        """Mean and P95."""
        spec = RunSpec(
            policy=policy, workload=str(chats(tmp_path)), hardware=str(profile), cpu_ratio=0.0,
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
