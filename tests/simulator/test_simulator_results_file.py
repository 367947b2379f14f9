"""Results and saved runs: what is written is read, and a bad file is named with what is wrong in it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulation_results import read_results
from simulator_run_logs import synthetic_run_log
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.program_explanation import explain_program
from sojourn_server.simulator.report.results_file import (
    SUFFIXES,
    Provenance,
    ResultsError,
    document,
    load_runs,
    made_with,
    save_runs,
)
from sojourn_server.simulator.report.run_metrics import summarize_run

MADE = Provenance(command="sojourn simulate t", versions={"sojourn": "1"}, machine={"cores": 2})
RUN = synthetic_run_log("stock", 3, virtual_s=300.0)


@pytest.fixture
def results(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "out.json"
    plain = document([summarize_run(RUN)], MADE)
    write_json(plain, str(path))
    return path, plain


def test_results_are_read_back_as_written(results: tuple[Path, dict[str, Any]]) -> None:
    read = read_results(results[0])
    assert (read.version, read.made_with, read.runs) == (1, MADE, [summarize_run(RUN)])


def test_the_command_names_no_folder_of_the_users() -> None:
    arguments = [
        "simulate",
        "/home/me/t.jsonl",
        "--policy",
        "stock,/home/me/mine.toml",
        "--json=/home/me/o.json",
    ]
    assert made_with(["/home/me/bin/sojourn", *arguments, "../traces/u.jsonl", "/"]).command == (
        "sojourn simulate t.jsonl --policy stock,mine.toml --json=o.json ../traces/u.jsonl /"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xc1", b"\x1f\x8bxx", b'"\xff"', b"[" * 100_000])
def test_what_is_no_such_file_is_one_clear_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ResultsError) as caught:
        load_runs(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nowhere: No such file or directory"):
        load_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_saved_runs_come_back_and_can_be_explained(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"runs.1{suffix}"
    save_runs(path, [RUN], MADE)
    saved = load_runs(path)
    assert (saved.runs, saved.made_with) == ([RUN], MADE)
    explain_program(saved.runs[0], saved.runs[0].programs[0])
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == suffix.endswith(".gz")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_same_runs_are_the_same_bytes_under_any_name(tmp_path: Path) -> None:
    for name in ("a.msgpack.gz", "b.msgpack.gz"):
        save_runs(tmp_path / name, [RUN], MADE)
    assert (tmp_path / "a.msgpack.gz").read_bytes() == (tmp_path / "b.msgpack.gz").read_bytes()
    # The header's time of writing is left out: two files made within a second would be the same anyway.
    assert (tmp_path / "a.msgpack.gz").read_bytes()[4:8] == bytes(4)
    (tmp_path / "a.msgpack.gz").rename(tmp_path / "renamed")
    assert load_runs(tmp_path / "renamed").runs == [RUN]


def test_a_truncated_gzip_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "runs.msgpack.gz"
    save_runs(path, [RUN], MADE)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ResultsError, match="the gzip data is cut off or damaged"):
        load_runs(path)


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
