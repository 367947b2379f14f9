"""benchmarks/gpu without a GPU: loads, plan, page, simulator, and the cut of a CUDA library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script
from trace_windows import write_windows


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/gpu/engine.py")


@pytest.fixture(scope="module")
def loads(script: Any) -> Any:
    import engine_loads  # engine.py has put its folder on the path

    return engine_loads


@pytest.fixture(scope="module")
def tokens() -> Any:
    return load_script("benchmarks/gpu/engine_tokens.py")


@pytest.fixture
def traces(loads: Any, tmp_path: Path) -> Any:
    return loads.read_programs(write_windows(tmp_path / "traces.jsonl", programs=120))


def test_the_plan_takes_the_most_important_runs_and_pays_for_each_start(loads: Any) -> None:
    costs = {(arm.name, load.name): 30.0 for arm in loads.ARMS for load in loads.LOADS}

    def plan(budget_s: float, done: Any = ()) -> tuple[list[Any], list[Any]]:
        runs = loads.plan_runs(budget_s, loads.ARMS, loads.LOADS, costs, range(2), loads.H200, done)
        return [run for run in runs if not run.left_out], [run for run in runs if run.left_out]

    chosen, out = plan(loads.H200.start_s + 4 * 30)
    assert [run.arm.name for run in chosen] == ["vLLM", "sojourn + 1x", "vLLM + 1x", "sojourn"]
    assert {run.load for run in chosen} == {loads.LOADS[0]}
    assert plan(loads.H200.start_s + 4 * 30 - 1)[0] == chosen[:3]
    assert plan(loads.H200.start_s + 5 * 30)[0] == chosen  # one arm on the next load has nothing beside it
    assert {run.left_out for run in out} == {"does not fit the budget"}
    every, none = plan(1e6)
    assert none == []
    assert len(every) == len(chosen) + len(out)
    assert [run.arm.group for run in every] == sorted(run.arm.group for run in every)
    turned = [run.arm.name for run in every if run.seed == 1 and run.load == loads.LOADS[0]]
    assert turned.index("sojourn + 1x") < turned.index("vLLM")
    first = {(run.arm.name, run.load.name, run.seed) for run in chosen}
    assert not first & {(run.arm.name, run.load.name, run.seed) for run in plan(1e6, first)[0]}


@pytest.mark.slow
def test_the_simulator_runs_the_same_turns_and_finds_what_vllm_alone_lost(loads: Any, traces: Any) -> None:
    from engine_agents import simulate_agents

    load = loads.LOADS[1]
    programs, _ = loads.draw_programs(traces, load, loads.H200, 0)
    arms = {arm.name: arm for arm in loads.ARMS}
    stock, sojourn = (
        simulate_agents(arms[name], load, programs, "h200", loads.H200, 0)
        for name in ("vLLM", "sojourn + 1x")
    )
    assert stock["turns"] == sojourn["turns"] == 5 * len(programs)
    assert sum(sojourn["tokens_by_source"].values()) > sum(stock["tokens_by_source"].values())
    assert sojourn["completion_s"]["mean"] < stock["completion_s"]["mean"]


def found(tokens: list[list[int]], loaded: int = 0, staged: int = 0, **other: Any) -> dict[str, Any]:
    """What an arm's process tells."""
    moves = {"stored": 3, "saved": 1, "staged": staged}
    return {
        "tokens": tokens, "async": True, "layout": "LBNHC", "layout asked for": None,
        "attention": "TRITON_ATTN", "runner": "vllm.v1.worker.gpu.model_runner",
        "stats": {"tiers": {"moves": moves}, "host_tokens": loaded, "leases": 0},
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
