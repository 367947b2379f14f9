"""Runs of a few agents: the ablation's order, how evenly links are used, the command, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import typer.testing
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.lab.pd.machine import PdMachine
from sojourn_server.lab.pd.outcome import PdOutcome
from sojourn_server.lab.pd.report import COLUMNS, document, draw, row, table
from sojourn_server.lab.pd.run import PdSpec, calibrate, run, run_all
from sojourn_server.lab.pd.simulation import Simulation
from sojourn_server.lab.pd.space import Space
from sojourn_server.lab.pd.storage_nic import WINDOW_S, StorageNic
from sojourn_server.lab.pd.systems import PUBLISHED_SYSTEMS, SYSTEMS
from sojourn_server.lab.pd.trajectories import agents, load_trajectories

SLOW_STORAGE = PdMachine(devices=2, storage_nic_bytes_per_s=2e9)
"""Storage is the bottleneck with few agents already."""
SMALL = PdSpec(
    workload="synthetic:dualpath-32k", agents=40, prefill_nodes=1, decode_nodes=2, machine=SLOW_STORAGE
)


@pytest.fixture(scope="module")
def ablation() -> dict[str, PdOutcome]:
    return {name: run(replace(SMALL, system=name)) for name in (*PUBLISHED_SYSTEMS, "split")}


def test_each_part_helps_and_the_second_path_most(ablation: dict[str, PdOutcome]) -> None:
    took_s = [ablation[name].virtual_s for name in PUBLISHED_SYSTEMS]
    assert took_s == sorted(took_s, reverse=True)
    gains = [before - after for before, after in pairwise(took_s[:4])]
    assert max(gains) == gains[1]
    assert ablation["basic"].virtual_s / ablation["scheduling"].virtual_s > 1.5


def test_links_are_used_evenly_where_they_are_the_bottleneck(ablation: dict[str, PdOutcome]) -> None:
    """Figure 13: round robin over sides gives the one prefill node half of all reads, 1.5 times its share."""
    around, scheduled = ablation["dual-path"], ablation["scheduling"]
    assert around.nic_max_over_mean == pytest.approx(1.5, abs=0.08)
    assert scheduled.nic_max_over_mean is not None
    assert scheduled.nic_max_over_mean <= 1.18
    assert ablation["basic"].nic_busy[1] == 0.0
    assert ablation["oracle"].read_tokens == 0


def test_all_did_the_same_work(ablation: dict[str, PdOutcome]) -> None:
    assert len({(o.turns, o.prompt_tokens, o.output_tokens) for o in ablation.values()}) == 1
    assert len({o.read_tokens for name, o in ablation.items() if name != "oracle"}) == 1
    assert {o.finished_agents for o in ablation.values()} == {40}


def test_twice_the_cluster_takes_twice_the_agents() -> None:
    players = agents(load_trajectories(SMALL.workload, SMALL.shaping), 40, seed=0)
    one = Simulation(SMALL.cluster, SYSTEMS["scheduling"], players)
    two = Simulation(
        replace(SMALL, prefill_nodes=2, decode_nodes=4).cluster, SYSTEMS["scheduling"], players * 2
    )
    one.run()
    two.run()
    assert two.now == pytest.approx(one.now, rel=0.1)


def test_online_agents_come_and_latencies_are_kept() -> None:
    spec = replace(SMALL, rate_per_s=0.05, until_s=400.0, warm_up_s=100.0, agents=10**6)
    quiet, busy = run(spec), run(replace(spec, rate_per_s=1.0, system="basic"))
    assert quiet.seen is not None
    assert busy.seen is not None
    assert quiet.seen.within_slo
    assert not busy.seen.within_slo
    assert quiet.seen.ttft_mean <= quiet.seen.ttft_p95 < busy.seen.ttft_mean
    assert quiet.virtual_s <= 400.0


def test_side_by_side_is_as_one_by_one() -> None:
    specs = [replace(SMALL, agents=8, system=name) for name in ("basic", "split")]
    told: list[str] = []
    outcomes = run_all(
        specs,
        processes=2,
        on_start=lambda number, spec: told.append(spec.system),
        on_progress=lambda number, now, finished: told.append("on its way"),
        on_done=lambda number, outcome: told.append("done"),
    )
    assert {"basic", "split", "on its way", "done"} == set(told)
    for spec, outcome in zip(specs, outcomes, strict=True):
        assert msgspec.structs.replace(outcome, cpu_s=0.0) == msgspec.structs.replace(run(spec), cpu_s=0.0)


def test_calibration_finds_what_it_is_asked_for() -> None:
    spec = replace(SMALL, system="oracle")
    there = replace(spec, machine=replace(SLOW_STORAGE, efficiency=0.2))
    wanted_s = run(there).virtual_s
    tried = calibrate(spec, wanted_s, tolerance=0.01)
    assert tried[-1][0] == pytest.approx(0.2, rel=0.1)
    with pytest.raises(ValueError, match="no efficiency from 5 % to 100 %"):
        calibrate(spec, 1.0)


def test_a_report_has_every_column(ablation: dict[str, PdOutcome], tmp_path: Path) -> None:
    outcomes = list(ablation.values())
    assert row(outcomes[0], outcomes[0]).keys() == COLUMNS.keys()
    assert table(outcomes).row_count == len(outcomes)
    assert json.dumps(document(outcomes, {}))
    draw(outcomes, tmp_path / "pd.svg")
    assert (tmp_path / "pd.svg").stat().st_size > 1000


def test_a_nic_reads_in_turn_and_counts_by_window() -> None:
    nic = StorageNic(0, rate_blocks_per_s=2.0)
    assert nic.read(10, 3.0) == 8.0
    assert nic.read(20, 4.0) == 18.0
    assert nic.blocks_in == [10 + 2 * (WINDOW_S - 8.0), 2 * (18.0 - WINDOW_S)]


def test_memory_is_given_in_the_order_of_asking() -> None:
    space: Space[str] = Space(10)
    assert space.take(6, "a")
    assert not space.take(6, "b")
    assert not space.take(1, "c")  # not past b
    assert space.waiting == 7
    assert list(space.leave(6)) == ["b", "c"]
    assert not space.take(99, "too large")
    assert list(space.leave(6)) == []
    assert list(space.leave(1)) == ["too large"]  # once nobody else is there


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"system": "duel"}, "unknown system 'duel'"),
        ({"model": "gpt"}, "unknown model 'gpt'"),
        ({"agents": 0}, "agents is 0"),
        ({"rate_per_s": 1.0}, "expected until_s"),
        ({"rate_per_s": -1.0, "until_s": 5.0}, "rate_per_s is -1.0"),
        ({"until_s": 0.0}, "until_s is 0.0"),
        ({"until_s": 5.0, "warm_up_s": 5.0}, "warm_up_s is 5.0"),
    ],
)
def test_what_makes_no_sense_is_refused(told: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PdSpec(**told)  # type: ignore[arg-type]


def sojourn(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(build_app(), ["simulate-pd", *arguments])


def test_the_command_shows_writes_and_draws(tmp_path: Path) -> None:
    written, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    result = sojourn(
        "synthetic:dualpath-32k", "--system", "basic,scheduling", "--programs", "6", "--prefill-nodes", "1",
        "--decode-nodes", "1", "--jobs", "1", "--json", str(written), "--plot", str(drawn),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(written.read_text())
    assert [each["system"] for each in told["outcomes"]] == ["basic", "scheduling"]
    assert all(each["finished_agents"] == 6 for each in told["outcomes"])
    assert drawn.exists()


@pytest.mark.parametrize(
    ("arguments", "message", "step"),
    [
        (["--system", "schedulign"], "unknown system 'schedulign'", "did you mean scheduling?"),
        (["--system", ","], "names no system", "for example"),
        (["--model", "ds-27"], "unknown model 'ds-27'", "did you mean ds-27b?"),
        (["--hours", "nan"], "--hours is nan", "for example"),
        (["--rate", "0"], "rate_per_s is 0", "docs/dualpath.md"),
        (["--storage-nic-gbit", "0"], "storage_nic_bytes_per_s is 0", "docs/dualpath.md"),
        (["nowhere.jsonl"], "No such file", "docs/traces.md"),
        (["--plot", "pd.gif"], "neither .svg nor .png", "pd.svg"),
        (["--plot", "/no/such/folder/pd.svg"], "is no folder", "make it first"),
        (["--model", "qwen2.5-32b", "--device-memory-gb", "82"], "holds", "--max-context"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, step: str) -> None:
    error = sojourn(*arguments).exception
    assert isinstance(error, CliError)
    assert message in error.message
    assert step in error.next_step
