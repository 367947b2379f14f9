"""benchmarks/gpu/engine.py without a GPU: its agents in the simulator, and its page."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from script_modules import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/gpu/engine.py")


def arguments(**other: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "seed": 0, "programs": 4, "turns": 3, "pool_tokens": 32_768, "host_gib": 8.0, "profile": "h200",
        "agents_limit_s": 300.0,
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **other})


def test_agents_are_those_of_the_seed_and_their_prompts_grow(script: Any) -> None:
    agents = script.coding_agents(arguments())
    assert agents == script.coding_agents(arguments())
    assert agents != script.coding_agents(arguments(seed=1))
    for agent in agents:
        lengths = [turn.prompt_tokens for turn in agent.turns]
        outputs = [turn.output_tokens for turn in agent.turns]
        assert len(lengths) == 3
        assert all(
            after >= before + output
            for before, output, after in zip(lengths, outputs, lengths[1:], strict=False)
        )
        assert [turn.gap_s is None for turn in agent.turns] == [False, False, True]


def test_the_simulator_runs_the_same_turns_and_finds_what_vllm_alone_lost(script: Any) -> None:
    stock, sojourn = (script.simulate_agents(policy, arguments()) for policy in ("stock", "sojourn"))
    assert stock["turns"] == sojourn["turns"] == 12
    assert stock["prompt_tokens"] == sojourn["prompt_tokens"]
    assert sojourn["cached_tokens"] > stock["cached_tokens"]
    assert sojourn["completion_s"]["mean"] < stock["completion_s"]["mean"]
    cut = script.simulate_agents("stock", arguments(agents_limit_s=stock["turn_ends_s"][5] + 0.01))
    assert cut["turns"] == 6


def test_the_page_has_what_failed_and_the_ratio_only_of_policies_that_ran(script: Any) -> None:
    run = script.simulate_agents("stock", arguments(programs=1))
    about = dict.fromkeys(("device", "command", "vllm", "torch", "cuda", "python", "seed", "at"), "x")
    page = script.page({**about, "agents": [run, {"policy": "sojourn", "failed": "ServerStartError: why"}]})
    assert "| sojourn | failed |" in page
    assert "ServerStartError: why" in page
    assert "Mean completion time of vLLM alone over" not in page
    faster = {**run, "policy": "sojourn", "completion_s": {"mean": run["completion_s"]["mean"] / 2}}
    assert "over that of sojourn: **2.00**" in script.page({**about, "agents": [run, faster]})
