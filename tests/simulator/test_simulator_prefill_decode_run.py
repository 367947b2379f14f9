"""Runs of a few agents: the ablation's order, how evenly links are used, the command, and what it refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.testing
from rich.console import Console
from rich.text import Text
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.simulator.prefill_decode.cluster_devices import WINDOW_S, FcfsMemoryPool, StorageNic
from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import PD_MODELS, PdMachine
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import LatencySummary, PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_report import (
    COLUMNS,
    outcome_row,
    outcome_table,
    outcomes_document,
    plot_outcomes,
    storage_note,
)
from sojourn_server.simulator.prefill_decode.prefill_decode_run import (
    PdSpec,
    calibrate,
    run_prefill_decode,
    run_prefill_decode_suite,
)
from sojourn_server.simulator.prefill_decode.prefill_decode_simulation import PdSimulation
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS, PUBLISHED_SYSTEMS
from sojourn_server.simulator.prefill_decode.trajectories import load_trajectories, sample_agents

SLOW_STORAGE = PdMachine(devices=2, storage_nic_bytes_per_s=2e9)
"""Storage is the bottleneck with few agents already."""
SMALL = PdSpec(
    workload="synthetic:dualpath-32k", agents=40, prefill_nodes=1, decode_nodes=2, machine=SLOW_STORAGE
)


@pytest.fixture(scope="module")
def ablation() -> dict[str, PdOutcome]:
    return {name: run_prefill_decode(replace(SMALL, system=name)) for name in (*PUBLISHED_SYSTEMS, "split")}


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
    players = sample_agents(load_trajectories(SMALL.workload, SMALL.shaping), 40, seed=0)
    one = PdSimulation(SMALL.cluster, PD_SYSTEMS["scheduling"], players)
    two = PdSimulation(
        replace(SMALL, prefill_nodes=2, decode_nodes=4).cluster, PD_SYSTEMS["scheduling"], players * 2
    )
    one.run()
    two.run()
    assert two.now == pytest.approx(one.now, rel=0.1)


def test_online_agents_come_and_latencies_are_kept() -> None:
    spec = replace(SMALL, rate_per_s=0.05, until_s=400.0, warm_up_s=100.0, agents=10**6)
    quiet, busy = run_prefill_decode(spec), run_prefill_decode(replace(spec, rate_per_s=1.0, system="basic"))
    assert quiet.seen is not None
    assert busy.seen is not None
    assert quiet.seen.within_slo
    assert not busy.seen.within_slo
    assert quiet.seen.ttft_mean <= quiet.seen.ttft_p95 < busy.seen.ttft_mean
    assert quiet.virtual_s <= 400.0


def test_side_by_side_is_as_one_by_one() -> None:
    specs = [replace(SMALL, agents=8, system=name) for name in ("basic", "split")]
    told: list[str] = []
    outcomes = run_prefill_decode_suite(
        specs,
        processes=2,
        on_start=lambda number, spec: told.append(spec.system),
        on_progress=lambda number, now, finished: told.append("on its way"),
        on_done=lambda number, outcome: told.append("done"),
    )
    assert {"basic", "split", "on its way", "done"} == set(told)
    for spec, outcome in zip(specs, outcomes, strict=True):
        assert msgspec.structs.replace(outcome, cpu_s=0.0) == msgspec.structs.replace(
            run_prefill_decode(spec), cpu_s=0.0
        )


def test_calibration_finds_what_it_is_asked_for() -> None:
    spec = replace(SMALL, system="oracle")
    there = replace(spec, machine=replace(SLOW_STORAGE, efficiency=0.2))
    wanted_s = run_prefill_decode(there).virtual_s
    tried = calibrate(spec, wanted_s, tolerance=0.01)
    assert tried[-1][0] == pytest.approx(0.2, rel=0.1)
    with pytest.raises(ValueError, match="no efficiency from 5 % to 100 %"):
        calibrate(spec, 1.0)


def test_a_report_has_every_column(ablation: dict[str, PdOutcome], tmp_path: Path) -> None:
    outcomes = list(ablation.values())
    assert outcome_row(outcomes[0], outcomes[0]).keys() == COLUMNS.keys()
    assert outcome_table(outcomes).row_count == len(outcomes)
    assert json.dumps(outcomes_document(outcomes, {}))
    plot_outcomes(outcomes, tmp_path / "pd.svg")
    assert (tmp_path / "pd.svg").stat().st_size > 1000


def shown_of(outcomes: Sequence[PdOutcome], width: int = 80) -> list[str]:
    screen = Console(width=width, file=io.StringIO(), color_system=None)
    screen.print(outcome_table(outcomes))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("online", [False, True])
def test_the_table_fits_80_columns(ablation: dict[str, PdOutcome], online: bool) -> None:
    """Of the largest figures that a cluster of 1,152 devices has."""
    seen = LatencySummary(turns=9, ttft_mean=1234.5, ttft_p95=2000.0, ttst_mean=120.25, tpot_mean=0.1234)
    outcomes = [
        msgspec.structs.replace(
            each, virtual_s=98765.4, turns=200_000_000, finished_agents=48_000, nic_busy=(1.0, 1.0),
            prefill_busy=1.0, rate_per_s=8.8 if online else None, seen=seen if online else None,
        )
        for each in ablation.values()
    ]  # fmt: skip
    lines = shown_of(outcomes)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    title, units, names, *rows = lines
    assert len(rows) == len(outcomes)
    assert title.startswith("1P2D")
    assert names.split()[0] == "system"
    assert ("TTFT" in units) is online
    assert "98,765" in rows[0] or online
    assert "1,234" in rows[0] or not online


def test_how_long_the_one_path_was_full_is_measured(ablation: dict[str, PdOutcome]) -> None:
    busy, few = ablation["basic"], run_prefill_decode(replace(SMALL, agents=2, system="basic"))
    assert busy.prefill_nics_full is not None
    assert few.prefill_nics_full is not None
    assert few.prefill_nics_full < 0.1 < 0.5 < busy.prefill_nics_full <= 1.0
    assert ablation["oracle"].prefill_nics_full == 0.0


def test_a_note_says_where_there_was_nothing_for_a_second_path_to_save(
    ablation: dict[str, PdOutcome],
) -> None:
    basic, dual = ablation["basic"], ablation["scheduling"]
    assert storage_note([basic, dual]) is None
    idle = msgspec.structs.replace(basic, prefill_nics_full=0.0123)
    told = storage_note([dual, idle])
    assert told is not None
    assert "Basic" in told
    assert "1 % of the time" in told
    assert "--programs" in told
    assert storage_note([idle]) is None  # nothing is compared
    assert storage_note([idle, ablation["layerwise"]]) is None
    assert storage_note([dual, ablation["split"]]) is None  # nobody has one path
    assert storage_note([msgspec.structs.replace(idle, prefill_nics_full=None), dual]) is None
    online = [msgspec.structs.replace(each, rate_per_s=1.0) for each in (idle, dual)]
    assert storage_note(online) is None


def test_the_page_explains_every_column_and_figure() -> None:
    page = (Path(__file__).parents[2] / "docs" / "prefill-decode.md").read_text(encoding="utf-8")
    part = page.split("## The cluster simulation")[1].split("\n## ")[0]
    told = re.findall(r"^\| ([^|]+) \|", part.split("| column |")[1].split("\n\n")[0], re.MULTILINE)
    for column in COLUMNS:
        assert any(column.removesuffix(" s").removesuffix(" ms") in name for name in told), column
    for name in (*PD_MODELS, *PD_SYSTEMS):
        assert re.search(rf"^\| `{name}` \|", part, re.MULTILINE), name
    for field in (*PdOutcome.__struct_fields__, *LatencySummary.__struct_fields__, "made_with", "outcomes"):
        assert f"`{field}`" in part, field
    for model in ("ds-660b", "qwen2.5-32b"):
        assert f"{PD_MODELS[model].kv_bytes_per_token:,} bytes of KV per token" in part


def test_a_nic_reads_in_turn_and_counts_by_window() -> None:
    nic = StorageNic(rate_blocks_per_s=2.0)
    assert nic.read(10, 3.0) == 8.0
    assert nic.read(20, 4.0) == 18.0
    assert nic.blocks_in == [10 + 2 * (WINDOW_S - 8.0), 2 * (18.0 - WINDOW_S)]


def test_memory_is_given_in_the_order_of_asking() -> None:
    space: FcfsMemoryPool[str] = FcfsMemoryPool(10)
    assert space.take(6, "a")
    assert not space.take(6, "b")
    assert not space.take(1, "c")  # not past b
    assert space.waiting == 7
    assert list(space.release_memory(6)) == ["b", "c"]
    assert not space.take(99, "too large")
    assert list(space.release_memory(6)) == []
    assert list(space.release_memory(1)) == ["too large"]  # after all others have left


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
    assert "note: storage was not the bottleneck" in " ".join(result.output.split())


def test_help_names_every_option_in_full_at_80_columns() -> None:
    result = typer.testing.CliRunner().invoke(
        build_app(), ["simulate-pd", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    )
    shown = Text.from_ansi(result.output).plain
    command: Any = typer.main.get_command(build_app()).commands["simulate-pd"]  # type: ignore[attr-defined]
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for name in (*parameter.opts, *parameter.secondary_opts):
                assert re.search(rf"{name}\s", shown), name
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message", "step"),
    [
        (["--system", "schedulign"], "unknown system 'schedulign'", "did you mean scheduling?"),
        (["--system", ","], "--system is empty", "for example"),
        (["--model", "ds-27"], "unknown model 'ds-27'", "did you mean ds-27b?"),
        (["--hours", "nan"], "--hours is nan", "for example"),
        (["--model", "gpt"], "unknown model 'gpt'", "other models are not supported"),
        (["--system", "fast"], "unknown system 'fast'", "docs/prefill-decode.md"),
        (["--rate", "0"], "--rate is 0", "--rate 0.4"),
        (["--rate", "-1"], "--rate is -1", "--rate 0.4"),
        (["--storage-nic-gbit", "0"], "--storage-nic-gbit is 0", "--storage-nic-gbit 400"),
        (["--compute-nic-gbit", "nan"], "--compute-nic-gbit is nan", "--compute-nic-gbit 400"),
        (["--device-memory-gb", "-5"], "--device-memory-gb is -5", "--device-memory-gb 141"),
        (["--append-scale", "0"], "--append-scale is 0", "--append-scale 1"),
        (["--output-scale", "inf"], "--output-scale is inf", "--output-scale 1"),
        (["--efficiency", "3"], "--efficiency is 3", "--efficiency 0.31"),
        (["--efficiency", "0"], "--efficiency is 0", "--efficiency 0.31"),
        (["--hours", "2"], "--hours has no effect without --rate", "--rate 0.4 --hours 2"),
        (["--rate", "0.4", "--programs", "9"], "--programs has no effect with --rate", "leave out"),
        (["--device-memory-gb", "20"], "leaves", "--device-memory-gb"),
        (["nowhere.jsonl"], "No such file", "name a trace file"),
        (["--plot", "pd.gif"], "expected a name ending in .svg or .png", "pd.svg"),
        (["--plot", "/no/such/folder/pd.svg"], "is not a folder", "make it first"),
        (["--model", "qwen2.5-32b", "--device-memory-gb", "82"], "holds", "--max-context"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, step: str) -> None:
    error = sojourn(*arguments).exception
    assert isinstance(error, CliError)
    assert message in error.message
    assert step in error.next_step


def test_where_the_figures_cannot_be_written_is_said_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = sojourn("--json", str(tmp_path / "file" / "out.json")).exception
    assert isinstance(error, CliError)
    assert "is a file" in error.message
    (tmp_path / "pd.svg").mkdir()
    error = sojourn("--plot", str(tmp_path / "pd.svg")).exception
    assert isinstance(error, CliError)
    assert "is a folder" in error.message
