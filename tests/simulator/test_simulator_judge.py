"""The judge's grid, and which of its runs are made again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from script_modules import benchmark
from simulator_run_logs import small_run
from sojourn_server.policies.preset import preset_names
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import validate_specs
from sojourn_server.simulator.simulator_policies import policy_names

judge = benchmark("judge")


def row(policy: str, tokens: float = 0.0, mean_s: float | None = None) -> RunRow:
    made = summarize_run(small_run())
    completion_s = msgspec.structs.replace(made.completion_s, mean=mean_s)
    return msgspec.structs.replace(made, policy=policy, output_tok_per_s=tokens, completion_s=completion_s)


def test_a_share_of_the_grid_has_every_value_of_every_dimension() -> None:
    workloads = ["a", "b", "c", "d", "e", "f", *judge.SYNTHETIC]
    points = judge.grid(workloads)
    assert len(points) == len(set(points)) == 10 * 8 * 3 * 2
    tenth = points[:48]
    for values in (
        Counter(p.workload for p in tenth), Counter(p.load.name for p in tenth),
        Counter(p.host for p in tenth), Counter(p.hardware for p in tenth),
    ):  # fmt: skip
        assert min(values.values()) >= max(values.values()) - 1, values
    assert len({(p.load, p.host) for p in tenth}) >= 18, "not the same pairs again and again"


def test_every_policy_of_the_grid_exists_and_can_run() -> None:
    known = {*policy_names(), *preset_names()}
    [point] = [
        p for p in judge.grid(["synthetic:continuum-bfcl"]) if p.load.name == "bursts" and p.host == 1
    ][:1]
    for host in judge.HOST:
        names = judge.policies_of(host, None)
        assert names[0] == "sojourn"
        assert {name.removesuffix("+host") for name in names} <= known
        names = judge.policies_of(host, None, True)
        assert {name.removesuffix("+host") for name in names} - known == {"sojourn-oracle"}
        names.remove("sojourn-oracle")
        validate_specs(judge.specs_of(point, names, 0.1, 0))
    assert "continuum" in judge.policies_of(0.0, None)
    assert {"continuum+host", "mori"} <= {*judge.policies_of(1.0, None)}
    assert judge.policies_of(1.0, ["mori"]) == ["sojourn", "stock", "mori"]


def test_the_runs_of_policies_without_host_memory_are_shared() -> None:
    specs = {}
    for point in judge.grid(["synthetic:continuum-bfcl"]):
        if point.load.name == "closed 20" and point.hardware == "h200":
            specs[point.host] = {s.policy: s for s in judge.specs_of(point, ["stock", "sojourn"], None, 0)}
    assert specs[0.0]["stock"] == specs[2.0]["stock"]
    assert specs[0.0]["sojourn"] != specs[2.0]["sojourn"]


def test_the_capacity_is_programs_not_tokens() -> None:
    spec = judge.RunSpec(policy="unlimited", workload="synthetic:continuum-bfcl")
    programs = judge.load_programs(spec.workload, 0)
    tokens = sum(turn.output_tokens for program in programs for turn in program.turns)
    assert judge.capacity(row("unlimited", tokens=tokens / 500), spec) == pytest.approx(len(programs) / 500)


def test_a_changed_policy_runs_again_at_the_same_arrival_rates_and_the_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = judge.grid(["synthetic:continuum-bfcl"])
    point = next(p for p in points if p.load.name == "open 0.95" and p.host == 1)
    rated = [
        msgspec.structs.replace(row(name, mean_s=100.0), rate_per_s=0.25)
        for name in ("sojourn", "sojourn-oracle", "stock", "mori")
    ]
    figures = {each.policy: judge.Figures.of(each) for each in rated}
    earlier = judge.Cell(point.name, "open 0.95", 1.0, figures)
    ran = []

    def run(specs: list[Any], options: Any) -> list[RunRow]:
        ran.extend((spec.policy, spec.rate_per_s, spec.cpu_ratio) for spec in specs)
        return [row(spec.policy, mean_s=50.0) for spec in specs]

    monkeypatch.setattr(judge, "run", run)
    ours = [("sojourn", 0.25, 1.0), ("sojourn-oracle", 0.25, 1.0)]
    for names, only, wanted in (
        ("mori", "closed", []),
        ("mori", "bfcl", [("mori", 0.25, 1.0)]),
        (None, None, ours),
    ):
        ran.clear()
        options = SimpleNamespace(seed=0, jobs=1, kept=False, policies=names, only=only)
        [cell] = judge.renewed([earlier], points, options, judge.Console(quiet=True))
        assert ran == wanted
    means = {name: figures.completion_mean_s for name, figures in cell.rows.items()}
    assert means == {"sojourn": 50.0, "sojourn-oracle": 50.0, "stock": 100.0, "mori": 100.0}
    # Interrupted: the finished runs count, and the others stay as they were.
    options.kept = True
    monkeypatch.setattr(judge, "is_kept", lambda spec, options: spec.policy == "sojourn")
    [cell] = judge.renewed([earlier], points, options, judge.Console(quiet=True))
    assert {name for name, figures in cell.rows.items() if figures.completion_mean_s == 50.0} == {"sojourn"}
    options.kept = False
    with pytest.raises(SystemExit, match="expected the traces of the earlier result"):
        list(judge.renewed([earlier], [], options, judge.Console(quiet=True)))
