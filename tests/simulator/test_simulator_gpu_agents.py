"""benchmarks/gpu/engine.py without a GPU: its agents in the simulator, its comparison and its page."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from script_modules import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/gpu/engine.py")


@pytest.fixture(scope="module")
def agents() -> Any:
    return load_script("benchmarks/gpu/engine_agents.py")


@pytest.fixture(scope="module")
def tokens() -> Any:
    return load_script("benchmarks/gpu/engine_tokens.py")


def arguments(**other: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "seed": 0, "programs": 4, "turns": 3, "pool_tokens": 32_768, "host_gib": 8.0, "profile": "h200",
        "agents_limit_s": 300.0,
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **other})


def test_agents_are_those_of_the_seed_and_their_prompts_grow(agents: Any) -> None:
    programs = agents.coding_agents(arguments())
    assert programs == agents.coding_agents(arguments())
    assert programs != agents.coding_agents(arguments(seed=1))
    for agent in programs:
        lengths = [turn.prompt_tokens for turn in agent.turns]
        outputs = [turn.output_tokens for turn in agent.turns]
        assert len(lengths) == 3
        assert all(
            after >= before + output
            for before, output, after in zip(lengths, outputs, lengths[1:], strict=False)
        )
        assert [turn.gap_s is None for turn in agent.turns] == [False, False, True]


def test_the_simulator_runs_the_same_turns_and_finds_what_vllm_alone_lost(agents: Any) -> None:
    stock, sojourn = (agents.simulate_agents(policy, arguments()) for policy in ("stock", "sojourn"))
    assert stock["turns"] == sojourn["turns"] == 12
    assert stock["prompt_tokens"] == sojourn["prompt_tokens"]
    assert sojourn["cached_tokens"] > stock["cached_tokens"]
    assert sojourn["completion_s"]["mean"] < stock["completion_s"]["mean"]
    cut = agents.simulate_agents("stock", arguments(agents_limit_s=stock["turn_ends_s"][5] + 0.01))
    assert cut["turns"] == 6


def found(tokens: list[list[int]], loaded: int = 0, staged: int = 0, **other: Any) -> dict[str, Any]:
    """What an arm's process tells."""
    moves = {"stored": 3, "saved": 1, "staged": staged}
    return {
        "tokens": tokens, "async": True, "layout": "LBNHC", "layout asked for": None,
        "attention": "TRITON_ATTN", "runner": "vllm.v1.worker.gpu.model_runner",
        "stats": {"tiers": {"moves": moves}, "ledger": {"host_tokens": loaded}, "leases": {"count": 0}},
        **other,
    }  # fmt: skip


def test_an_arm_fails_with_other_tokens_without_a_reference_and_where_nothing_was_loaded(
    tokens: Any,
) -> None:
    alone, host = {"arm": "vLLM alone"}, {"arm": "host memory", "policy": "sojourn", "host_blocks": 9}
    disk, brief = {**host, "disk": True}, {**host, "dtype": "bfloat16"}
    right, wrong = [[1, 2, 3, 4] * 4], [[1, 2, 3, 5] * 4]
    expected: dict[tuple[str, ...], list[list[int]]] = {}
    assert "to compare with" in tokens.token_row(host, found(right, 5), expected)["failed"]
    assert "failed" not in tokens.token_row(alone, found(right), expected)
    good = tokens.token_row(host, found(right, 5), expected)
    assert "failed" not in good
    assert (good["tokens"], good["differ"], good["tokens loaded"], good["blocks saved"]) == (16, 0, 5, 4)
    assert tokens.token_row(host, found(wrong, 5), expected)["failed"] == "other tokens"
    assert tokens.token_row(host, found(right), expected)["failed"] == "nothing was loaded"
    assert tokens.token_row(disk, found(right, 5), expected)["failed"] == "nothing was read from disk"
    assert "failed" not in tokens.token_row(disk, found(right, 5, staged=1), expected)
    assert tokens.token_row(host, {"failed": "why"}, expected)["failed"] == "why"
    lost = tokens.token_row(host, found(right, 5, **{"layout asked for": "BLHNC"}), expected)
    assert lost["failed"] == "vLLM did not take the layout BLHNC"
    old = found(right, 5, runner="vllm.v1.worker.gpu_model_runner")
    assert tokens.token_row(host, old, expected)["failed"] == "ran on vllm.v1.worker.gpu_model_runner"
    leases = {"arm": "leases", "policy": "continuum"}
    assert tokens.token_row(leases, found(right), expected)["failed"] == "no lease was held"
    held = found(right, stats={"tiers": {}, "leases": {"count": 2}})
    assert "failed" not in tokens.token_row(leases, held, expected)
    # Rounding alone makes some tokens differ in bfloat16. That data type has a reference of its own.
    assert "to compare with" in tokens.token_row(brief, found(right, 5), expected)["failed"]
    tokens.token_row({**alone, "dtype": "bfloat16"}, found(right), expected)
    assert "failed" not in tokens.token_row(brief, found([[1, 2, 3, 5] + [1, 2, 3, 4] * 3], 5), expected)
    assert tokens.token_row(brief, found(wrong, 5), expected)["failed"] == "other tokens"


def test_the_page_has_what_failed_and_the_ratio_only_of_policies_that_ran(script: Any, agents: Any) -> None:
    run = agents.simulate_agents("stock", arguments(programs=1))

    def page(*rows: dict[str, Any]) -> str:
        part = {"command": "python x", "made_with": "a GPU", "rows": rows, "remarks": ["By hand."]}
        text: str = script.page({"device": "GPU", "agents": part})
        assert text.endswith("By hand.\n")
        return text

    one = page(run, {"policy": "sojourn", "failed": "ServerStartError: why"})
    assert "| sojourn | failed |" in one
    assert "ServerStartError: why" in one
    assert "Mean completion time of vLLM alone over" not in one
    assert "Mean completion time of vLLM alone over" not in page(run, {**run, "policy": "mori"})
    empty = agents.simulate_agents("sojourn", arguments(programs=1, agents_limit_s=0.001))
    assert empty["turns"] == 0
    assert "| sojourn | 0 of 1 | – |" in page(run, empty)
    assert "5 of its requests" in page(run, {**run, "policy": "sojourn", "failed": "5 of its requests"})
    faster = {**run, "policy": "sojourn", "completion_s": {"mean": run["completion_s"]["mean"] / 2}}
    assert "**2.00**" in page(run, faster)


def test_wrong_parts_and_a_missing_profile_are_named(script: Any, capsys: Any, monkeypatch: Any) -> None:
    for given, said in (
        (["token"], "--parts of tokens, agents, attention, simulator"),
        (["simulator"], "needs --profile"),
        (["tokens", "--arms", "99"], "--arms of 0, 1,"),
    ):
        monkeypatch.setattr("sys.argv", ["engine.py", "--out", "x", "--parts", *given])
        with pytest.raises(SystemExit):
            script.main()
        assert said in capsys.readouterr().err
