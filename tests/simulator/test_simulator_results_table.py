"""Tables: what is marked best, what is said against stock, and that no figure gets lost on the way."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from script_modules import ROOT
from simulation_results import read_results
from simulator_run_logs import rendered, small_run
from sojourn_server.simulator.report import results_table
from sojourn_server.simulator.report.results_file import (
    SUFFIXES,
    Provenance,
    ResultsError,
    load_runs,
    made_with,
    save_runs,
)
from sojourn_server.simulator.report.results_table import (
    COLUMNS,
    ResultColumn,
    TableCell,
    columns_to_show,
    summary,
    workloads,
)
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow, SummaryStatistics

BASE = summarize_run(small_run())


def cells(rows: list[RunRow], of: ResultColumn) -> list[TableCell]:
    return results_table.cells([rows], of)


def row(policy: str, **changes: object) -> RunRow:
    return msgspec.structs.replace(BASE, policy=policy, notes=(), **changes)


def seconds(value: float | None, *at_least: str) -> SummaryStatistics:
    return SummaryStatistics(
        mean=value, p50=value, p90=value, p95=value, p99=value, count=1, at_least=at_least
    )


def column(title: str, unit: str) -> ResultColumn:
    return next(c for c in COLUMNS if (c.title, c.unit) == (title, unit))


@pytest.mark.parametrize(
    ("times", "factors", "best"),
    [
        (["300", "100", "600"], ["", "3.00×", "0.50×"], 1),
        (["≥300", "100"], ["", "≥3.00×"], 1),
        (["300", "≥100"], ["", "≤3.00×"], None),
        (["≥300", "≥100"], ["", ""], None),
        # What is at least 50 s may be more than 100 s.
        (["300", "100", "≥50"], ["", "3.00×", "≤6.00×"], None),
        (["300", "100", "≥200"], ["", "3.00×", "≤1.50×"], 1),
    ],
)
def test_less_time_is_better_and_a_lower_bound_is_never_best_nor_an_exact_factor(
    times: list[str], factors: list[str], best: int | None
) -> None:
    rows = []
    for policy, time in zip(["stock", "b", "c"], times, strict=False):
        taken = seconds(float(time.removeprefix("≥")), *(["mean"] if "≥" in time else []))
        rows.append(row(policy, loop="open", rate_per_s=1.0, completion_s=taken))
    found = cells(rows, column("completion", "mean s"))
    assert [c.factor for c in found] == factors
    assert [c.best for c in found] == [place == best for place in range(len(times))]
    assert [c.text.removesuffix(".0") for c in found] == times


def test_a_limit_is_compared_but_never_best() -> None:
    rows = [row("stock", output_tok_per_s=1.0), row("free-io", output_tok_per_s=9.0, limit=True)]
    rows.append(row("b", output_tok_per_s=3.0))
    found = cells(rows, column("output", "tok/s"))
    assert [(c.factor, c.best) for c in found] == [("", False), ("9.00×", False), ("3.00×", True)]
    rows[1] = row("free-io", output_tok_per_s=3.0, limit=True)
    assert [c.best for c in cells(rows, column("output", "tok/s"))] == [False, False, True]


def test_finished_programs_of_a_closed_loop_are_not_compared_but_the_estimate_is() -> None:
    # Under stock only a short program finished.
    rows = [
        row("stock", programs_unfinished=9, completion_s=seconds(10), completion_estimate_s=seconds(900)),
        row("b", programs_unfinished=2, completion_s=seconds(50), completion_estimate_s=seconds(90)),
    ]
    assert [(c.factor, c.best) for c in cells(rows, column("completion", "mean s"))] == [("", False)] * 2
    assert [(c.factor, c.best) for c in cells(rows, column("est. of all", "P95 s"))] == [
        ("", False),
        ("10.0×", True),
    ]


def test_workloads_keep_apart_what_may_not_be_compared() -> None:
    rows = [
        row("b", programs=80),
        row("free-io", limit=True, pool_blocks=10**9),
        row("b"),
        row("stock"),
        row("stock", seed=2),
        row("stock", programs=80),
        row("stock", programs=80, trace="z"),
    ]
    groups = [[(r.trace, r.seed, r.programs, r.policy) for r in group] for group in workloads(rows)]
    assert groups == [
        [("t", 0, 2, "stock"), ("t", 0, 2, "b"), ("t", 0, 2, "free-io")],
        [("t", 0, 80, "stock"), ("t", 0, 80, "b")],
        [("t", 2, 2, "stock")],
        [("z", 0, 80, "stock")],
    ]


ROWS = read_results(ROOT / "benchmarks" / "results" / "mori_parts.json").runs
ROWS[0] = msgspec.structs.replace(ROWS[0], policy="stock")  # to compare the others with


@pytest.mark.parametrize("width", [60, 80, 120, 400])
def test_no_figure_is_lost_on_a_console_of_any_width(width: int) -> None:
    text = rendered(ROWS, width)
    # A note's own text may be folded anywhere; figures may not.
    figures = text.split("* best of the policies")[0]
    assert "…" not in figures
    for found in (cells(ROWS, c) for c in columns_to_show(ROWS)):
        for cell in found:
            assert cell.text in figures
            assert cell.factor in figures
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_the_end_says_in_words_what_sojourn_brings() -> None:
    tokens = {"prompt_tokens": 1000, "regenerated_tokens": 500}
    stock = row("stock", completion_estimate_s=seconds(300.0), **tokens)
    ours = row("sojourn", completion_estimate_s=seconds(150.0), host_blocks=10, block_size=16)
    said = summary([stock, msgspec.structs.replace(ours, prompt_tokens=1000, regenerated_tokens=20)])
    assert "programs end 2.00× as soon, after 150 s in place of 300 s; 2 % of the prompt tokens" in said
    assert said.endswith("sojourn has 160 tokens of host memory. vLLM's own offloading to as much: not run; "
                         "add lru-offload to --policy.")  # fmt: skip
    bound = msgspec.structs.replace(stock, completion_estimate_s=seconds(300.0, "mean"))
    assert f"sojourn: {ours.output_tok_per_s / bound.output_tok_per_s:.2f}× as many" in summary([bound, ours])
    assert summary([stock]) == ""


# -- Results and saved runs: what is written is read, and a bad file is named with what is wrong in it.


MADE = Provenance(command="sojourn simulate t", versions={"sojourn": "1"}, machine={"cores": 2})
RUN = small_run()


def test_the_command_names_no_folder_of_the_users() -> None:
    arguments = ["simulate", "/home/me/t.jsonl", "--policy", "stock,/home/me/mine.toml"]
    arguments.append("--json=/home/me/o.json")
    assert made_with(["/home/me/bin/sojourn", *arguments, "../traces/u.jsonl", "/"]).command == (
        "sojourn simulate t.jsonl --policy stock,mine.toml --json=o.json ../traces/u.jsonl /"
    )


MSGPACK = msgspec.msgpack.encode({"version": 1, "runs": []})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((data, "") for data in (b"", b"{", b"[]", b"\xc1", b"\x1f\x8bxx", b'"\xff"', b"[" * 100_000)),
        (None, "No such file or directory"),
        (MSGPACK, "not JSON, or cut off, or msgpack of an earlier checkout, to be made again"),
    ],
)
def test_what_is_no_such_file_is_one_clear_line(tmp_path: Path, data: bytes | None, reason: str) -> None:
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ResultsError) as caught:
        load_runs(path)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_saved_runs_come_back_and_are_the_same_bytes_under_any_name(tmp_path: Path, suffix: str) -> None:
    path, other = (tmp_path / "deep" / f"{name}{suffix}" for name in ("runs.1", "other"))
    for each in (path, other):
        save_runs(each, [RUN], MADE)
    saved = load_runs(path)
    assert (saved.runs, saved.made_with) == ([RUN], MADE)
    data = path.read_bytes()
    assert data == other.read_bytes()
    if suffix.endswith(".gz"):  # without the time of writing, which two files of one second have in common
        assert data[:2] + data[4:8] == b"\x1f\x8b" + bytes(4)
    path.rename(tmp_path / "renamed")
    assert load_runs(tmp_path / "renamed").runs == [RUN]
    assert [entry.name for entry in path.parent.iterdir()] == [other.name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: d["runs"][0]["programs"][1]["turns"][0].update(submitted_s=None),
            r"got `null` - at `\$.runs\[0\].programs\[1\].turns\[0\].submitted_s`",
        ),
        (lambda d: d["runs"][0].pop("seed"), r"missing required field `seed` - at `\$.runs\[0\]`"),
        (lambda d: d.pop("version"), "missing required field `version`"),
        (lambda d: d.update(version=2), "version is 2; this sojourn reads saved runs of version 1"),
        (lambda d: d.update(runs=[]), "holds no runs"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "runs.json.gz"
    save_runs(path, [RUN], MADE)
    plain = msgspec.json.decode(gzip.decompress(path.read_bytes()))
    spoil(plain)
    path.write_bytes(gzip.compress(msgspec.json.encode(plain)))
    with pytest.raises(ResultsError, match=message):
        load_runs(path)
