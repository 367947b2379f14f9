"""benchmarks/gpu without a GPU: the plan of runs, what fails an arm, and the arithmetic of the roofline."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import load_script
from sojourn_server.simulator.latency.latency_models import StepWork
from sojourn_server.simulator.latency.latency_profiles import load_hardware_profile, load_model_shape
from sojourn_server.simulator.latency.latency_selection import load_latency_model
from trace_windows import write_windows

load_script("benchmarks/gpu/engine.py")
tokens = load_script("benchmarks/gpu/engine_tokens.py")
loads = sys.modules["engine_loads"]


def test_the_plan_takes_the_most_important_runs_and_pays_for_each_start() -> None:
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
def test_the_simulator_runs_the_same_turns_and_finds_what_vllm_alone_lost(tmp_path: Path) -> None:
    traces = loads.read_programs(write_windows(tmp_path / "traces.jsonl", programs=120))
    load = loads.LOADS[1]
    programs, _ = loads.draw_programs(traces, load, loads.H200, 0)
    arms = {arm.name: arm for arm in loads.ARMS}
    stock, sojourn = (
        sys.modules["engine_agents"].simulate_agents(arms[name], load, programs, "h200", loads.H200, 0)
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


def test_an_arm_fails_with_other_tokens_without_a_reference_and_where_nothing_was_loaded() -> None:
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


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    pytest.importorskip("torch")
    return load_script("benchmarks/gpu/roofline.py")


def test_a_smoke_run_writes_a_profile_that_a_simulation_takes(roofline: ModuleType, tmp_path: Path) -> None:
    profile = tmp_path / "smoke.toml"
    document = roofline.measure(profile, None, smoke=True)
    hardware = load_hardware_profile(str(profile))
    assert "not a measurement" in hardware.title
    sources = dict(hardware.sources)
    assert "gpu/roofline.py" in sources["linear_efficiency"]
    # What was not measured stays as the data sheet, or the guess, has it.
    assert sources["expert_efficiency"] == dict(load_hardware_profile("h100").sources)["expert_efficiency"]
    assert "expert_efficiency" in hardware.estimates
    assert "linear_efficiency" not in hardware.estimates
    latency, _ = load_latency_model(str(profile), "llama-3.1-8b", kv_pool_tokens=10_000, max_model_len=8000)
    assert latency.step_s(StepWork(1, 1, 1, 1, 1)) > 0
    assert [row["tokens"] for row in document["layer"]] == [1, 8, 64]
    assert all(row["attention_s"] > 0 for row in document["decode_attention"])


def test_curves_made_of_known_efficiencies_give_them_back(roofline: ModuleType) -> None:
    base, model = load_hardware_profile("h100"), load_model_shape("llama-3.1-8b")
    parameters = model.attention_parameters + model.mlp_parameters
    flops, bandwidth = base.bf16_flops_per_s, base.memory_bandwidth_bytes_per_s
    gemm_one_s = 2 * parameters / (0.8 * bandwidth)
    layers = [{"tokens": 1, "layer_s": gemm_one_s + 17e-6, "gemm_s": gemm_one_s}]
    layers += [
        {"tokens": n, "layer_s": 2 * parameters * n / (0.6 * flops), "gemm_s": 1.0} for n in (512, 4096, 8192)
    ]
    layers[1]["layer_s"] *= 2  # short prompts do worse and do not count
    prefills = [
        {"tokens": n, "pairs": n * n, "attention_s": 4 * 32 * 128 * n * n / (0.4 * flops)}
        for n in (2048, 4096)
    ]
    decodes = [{"kv_bytes": b, "attention_s": b / (0.7 * bandwidth)} for b in (10**9, 10**10)]
    copies = {"host_to_device_bytes_per_s": 5e10, "both_ways_bytes_per_s": 8e10}
    found = roofline.constants(base, model, layers, prefills, decodes, copies, 1.5e11)
    assert found == pytest.approx(
        {
            "linear_efficiency": 0.6,
            "attention_efficiency": 0.4,
            "weight_read_efficiency": 0.8,
            "kv_read_efficiency": 0.7,
            "layer_overhead_s": 17e-6,
            "host_to_device_bytes_per_s": 5e10,
            "memory_bytes": 1.5e11,
        }
    )
