"""The judge's grid, and what its page says of cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from script_modules import benchmark
from simulator_run_logs import synthetic_run_log
from sojourn_server.cli.console import write_json
from sojourn_server.policies.preset import preset_names
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import validate_specs
from sojourn_server.simulator.simulator_policies import policy_names

LIMITS = ("free-io", "unlimited", "sojourn-oracle")


@pytest.fixture(scope="module")
def judge() -> Iterator[ModuleType]:
    with benchmark("judge") as module:
        yield module


def cell_of(judge: ModuleType, name: str, load: str, host: float, *rows: RunRow) -> Any:
    return judge.Cell(name, load, host, {each.policy: judge.Figures.of(each) for each in rows})


def row(
    policy: str,
    tokens: float = 0.0,
    mean_s: float | None = None,
    again: float = 0.0,
    ended: int = 3,
    work_s: float | None = None,
    slowdown: float | None = None,
) -> RunRow:
    made = summarize_run(synthetic_run_log("stock", 3, virtual_s=300.0))
    return msgspec.structs.replace(
        made, policy=policy, output_tok_per_s=tokens, limit=policy in LIMITS,
        programs_finished=ended, prompt_tokens=1000, regenerated_tokens=round(1000 * again),
        completion_s=msgspec.structs.replace(made.completion_s, mean=mean_s),
        ended_work_s=work_s,
        slowdown=msgspec.structs.replace(made.slowdown, mean=slowdown, p95=slowdown, p99=slowdown),
    )  # fmt: skip


def test_a_share_of_the_grid_has_every_value_of_every_dimension(judge: ModuleType) -> None:
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


def test_every_policy_of_the_grid_exists_and_can_run(judge: ModuleType) -> None:
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


def test_the_runs_of_policies_without_host_memory_are_shared(judge: ModuleType) -> None:
    specs = {}
    for point in judge.grid(["synthetic:continuum-bfcl"]):
        if point.load.name == "closed 20" and point.hardware == "h200":
            specs[point.host] = {s.policy: s for s in judge.specs_of(point, ["stock", "sojourn"], None, 0)}
    assert specs[0.0]["stock"] == specs[2.0]["stock"]
    assert specs[0.0]["sojourn"] != specs[2.0]["sojourn"]


def test_the_capacity_is_programs_not_tokens(judge: ModuleType) -> None:
    spec = judge.RunSpec(policy="unlimited", workload="synthetic:continuum-bfcl")
    programs = judge.load_programs(spec.workload, 0)
    tokens = sum(turn.output_tokens for program in programs for turn in program.turns)
    assert judge.capacity(row("unlimited", tokens=tokens / 500), spec) == pytest.approx(len(programs) / 500)


def test_the_page_has_the_worst_cell_first_and_counts_what_misses_an_aim(
    judge: ModuleType, tmp_path: Path
) -> None:
    cells = [
        cell_of(judge, "good", "closed 40", 1.0,
            row("sojourn", 300.0, again=0.01), row("stock", 100.0), row("mori", 250.0), row("free-io", 310.0),
            row("unlimited", 320.0),
        ),
        cell_of(judge, "bad", "closed 20", 0.0,
            row("sojourn", 90.0, ended=5), row("stock", 100.0), row("admit", 180.0, ended=4),
            row("free-io", 200.0), row("unlimited", 200.0),
        ),
        cell_of(judge, "open", "open 0.95", 0.0,
            row("sojourn", mean_s=80.0), row("stock", mean_s=400.0), row("admit", mean_s=100.0),
            row("sojourn-oracle", mean_s=50.0),
        ),
    ]  # fmt: skip
    page = judge.page(cells, "made so")
    lines = page.splitlines()
    first = lines.index("## Cells, the worst first")
    assert [line.split(" | ")[0].strip("| ") for line in lines[first + 6 :]] == ["bad", "good", "open"]
    assert "| bad | 0.50 | admit | 0.90 | 0.45 | 0.45 | – | 5 / 4 | – | – | – | 0.0% |" in lines
    assert "| closed loop: tokens/s, over the best preset | ≥ 0.97 | 0.5 (worst) | 1 of 2 |" in lines
    assert "| closed loop: over stock | ≥ 1 | 0.9 (worst) | 1 of 2 |" in lines
    assert "| host memory: prompt tokens not computed again | ≥ 0.98 | 0.99 (worst) | 0 of 1 |" in lines
    way = "open loop from 0.95: of the way from the best preset to the oracle"
    assert f"| {way} | ≥ 0.5 | 0.4 (worst) | 1 of 1 |" in lines, "100 to 80 s, and 50 s were possible"
    assert "{by hand}" in page
    assert cells[0].summary().startswith("good: unlimited 3.20, free-io 3.10, sojourn 3.00")
    assert cells[2].document()["policies"]["sojourn"]["completion_mean_s"] == 80.0
    write_json({"cells": [cell.document() for cell in cells]}, str(tmp_path / "judge.json"))
    assert judge.earlier_cells(tmp_path / "judge.json") == cells
    (tmp_path / "judge.json").write_text('{"cells": [{"cell": "a"}]}')
    with pytest.raises(SystemExit, match=r"expected judge\.json of an earlier run"):
        judge.earlier_cells(tmp_path / "judge.json")
    dead = cell_of(judge, "dead", "closed 80", 1.0,
        row("sojourn", 0.0), row("stock", 100.0), row("mori", 300.0),
    )  # fmt: skip
    page = judge.page([*cells, dead], "made so")
    assert (
        "| closed loop: tokens/s, over the best preset | ≥ 0.97 | 0 (worst) | 2 of 3 |" in page.splitlines()
    )
    single = next(line for line in judge.page(cells, "").splitlines() if "single" in line)
    assert "(mori)" in single, "where there is no host memory, a user of mori runs stock"


def test_what_users_feel_is_compared_with_the_best_preset_in_each_figure(judge: ModuleType) -> None:
    closed = cell_of(judge, "closed", "closed 40", 1.0,
        row("sojourn", 300.0, work_s=90.0), row("stock", 100.0, work_s=100.0), row("mori", 250.0, work_s=0.0),
    )  # fmt: skip
    busy = cell_of(judge, "busy", "open 0.95", 1.0,
        row("sojourn", mean_s=80.0, slowdown=5.0), row("stock", mean_s=50.0, slowdown=6.0),
        row("mori", mean_s=90.0, slowdown=4.0),
    )  # fmt: skip
    early = cell_of(judge, "early", "open 1.1", 0.0,
        row("sojourn", mean_s=80.0), row("stock", mean_s=99.0, slowdown=6.0),
    )  # fmt: skip
    assert (busy.best(), early.best(), early.over_best()) == ("mori", "stock", 99.0 / 80.0)
    lines = judge.page([closed, busy, early], "").splitlines()
    aims = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert aims["closed loop: work of the programs that ended, over the best preset"].endswith(
        "| ≥ 0.97 | 0.9 (worst) | 1 of 1 |"
    )
    of_work = (
        "closed loop: work of the programs that ended, geometric mean over the best single preset (stock)"
    )
    assert aims[of_work].endswith("| ≥ 1.05 | 0.90 | – |")
    for figure in ("mean slowdown", "P95 of slowdown", "P99 of slowdown"):
        assert aims[f"open loop from 0.95: {figure}, over the best preset"].endswith(
            "| ≥ 0.98 | 0.8 (worst) | 1 of 1 |"
        )
    assert aims["closed"].endswith("| 3 / 3 | 0.90 | – | – | 0.0% |")
    assert aims["busy"].endswith("| – | – | 0.80 | 0.80 | 0.0% |")


def test_a_changed_policy_runs_again_at_the_same_arrival_rates_and_the_others_do_not(
    judge: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = judge.grid(["synthetic:continuum-bfcl"])
    point = next(p for p in points if p.load.name == "open 0.95" and p.host == 1)
    rated = [
        msgspec.structs.replace(row(name, mean_s=100.0), rate_per_s=0.25)
        for name in ("sojourn", "sojourn-oracle", "stock", "mori")
    ]
    earlier = cell_of(judge, point.name, "open 0.95", 1.0, *rated)
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
