"""The catalogue of baselines: complete, buildable, and each gets a small open workload to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sojourn_server.policies.preset import load_preset
from sojourn_server.simulator.request_router import PassThroughRouter
from sojourn_server.simulator.simulator_policies import BASELINES


@pytest.mark.parametrize("name", BASELINES)
def test_each_says_what_it_follows_and_can_be_built(name: str) -> None:
    baseline = BASELINES[name]
    assert baseline.name == name
    assert baseline.paper
    assert baseline.leaves_out
    if baseline.preset is not None:
        assert load_preset(baseline.preset).name == baseline.preset
    if baseline.request_router is not PassThroughRouter:
        first, second = baseline.request_router(), baseline.request_router()
        assert first is not second
        assert baseline.preset is None, "a router stands before an untouched engine"


def programs(number: int) -> list[dict[str, object]]:
    """Programs of five turns that grow from 400 to 900 tokens; every third has a slow tool."""
    made: list[dict[str, object]] = []
    for index in range(number):
        turns = []
        for turn in range(5):
            tool_s = 20.0 if index % 3 == 0 and turn == 1 else 0.5
            turns.append(
                {"prompt_tokens": 400 + 100 * turn, "output_tokens": 20, "tool": "bash", "gap_s": tool_s}
            )
        made.append({"program_id": f"p{index}", "turns": turns})
    return made


@pytest.mark.parametrize("name", BASELINES)
def test_a_small_open_workload_ends(name: str, tmp_path: Path) -> None:
    """Eight programs at nearly the same time, and room for three."""
    from sojourn_server.simulator.simulation_run import RunSpec, run_simulation

    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(program) + "\n" for program in programs(8)), encoding="utf-8")
    spec = RunSpec(
        policy=name, workload=str(trace), programs=8, rate_per_s=5.0, until_s=None, pool_tokens=3200, seed=3
    )
    log = run_simulation(spec)
    assert log.notes == []
    assert log.hook_failures == 0
    assert len(log.programs) == 8
    assert all(program.finished_s is not None for program in log.programs)
    assert log.virtual_s < 600.0
