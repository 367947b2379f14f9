"""``sojourn plan-pd``: the paper's example, the JSON, and refused arguments."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import typer.testing
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError, console


def plan(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(build_app(), ["plan-pd", *arguments])


def test_the_papers_example() -> None:
    result = plan("--json", "-")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["least"], told["most"]) == pytest.approx((1 / 7, 3.5))
    by_name = {(each["prefill_nodes"], each["decode_nodes"]): each for each in told["divisions"]}
    assert [each["in_range"] for each in told["divisions"]] == [True, True, True, True, False]
    assert by_name[5, 1]["fullest_load"] > 1
    assert 1 < by_name[2, 4]["gain_at_most"] <= 3


def test_a_table_and_a_file(tmp_path: object) -> None:
    target = f"{tmp_path}/plan.json"
    result = plan("--nodes", "3", "--json", target)
    assert result.exit_code == 0, result.output
    assert "P/D from 0.143 to 3.5" in result.output
    assert "1P2D" in result.output
    with open(target, encoding="utf-8") as file:
        assert len(json.load(file)["divisions"]) == 2


def test_links_that_can_never_keep_up_are_reported() -> None:
    result = plan("--devices", "1", "--json", "-")
    told = json.loads(result.stdout)
    assert not told["possible"]
    assert told["least"] is None
    assert not any(each["in_range"] for each in told["divisions"])
    assert "No useful ratio" in plan("--devices", "1").output


@pytest.mark.parametrize("slow", [["--compute-nic-gbit", "1"], ["--dram-gbyte", "1"], ["--devices", "1"]])
def test_no_gain_is_promised_where_another_link_is_full(slow: list[str]) -> None:
    told = json.loads(plan(*slow, "--json", "-").stdout)
    for each in told["divisions"]:
        assert each["fullest_load"] > 1
        assert each["gain_at_most"] is None
        assert each["turns_per_s"]["two_paths"] is None
        assert each["turns_per_s"]["one_path"] > 0
    shown = plan(*slow).output
    assert "×" not in shown
    assert "–: another link is full before all storage NICs are" in shown


def test_a_gain_is_printed_if_the_division_is_in_range() -> None:
    told = json.loads(plan("--nodes", "9", "--json", "-").stdout)
    gains = [each["gain_at_most"] is not None for each in told["divisions"]]
    assert gains == [each["in_range"] for each in told["divisions"]]
    assert gains == [False] + [True] * 6 + [False]  # 7P2D is on the bound itself
    assert "–:" not in plan("--nodes", "3").output


@pytest.mark.parametrize(
    "more", [[], ["--compute-nic-gbit", "1"], ["--nodes", "12", "--storage-nic-gbit", "9000"]]
)
def test_the_tables_fit_80_columns(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 80)
    shown = plan(*more).output
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^nodes +range +fullest link +load +path +paths +prefill +most *$", shown, re.MULTILINE)


def test_a_full_disk_is_two_lines_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(files: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sojourn_server.traces.atomic_files.write_atomically", full)
    error = plan("--json", str(tmp_path / "plan.json")).exception
    assert isinstance(error, CliError)
    assert "plan.json: No space left" in error.message
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("option", "usual"), [("--kv-bytes", "48068"), ("--new-tokens-per-s", "2160"), ("--dram-gbyte", "500")]
)
def test_an_example_is_one_of_that_option(option: str, usual: str) -> None:
    error = plan(option, "0").exception
    assert isinstance(error, CliError)
    assert error.next_step == f"for example {option} {usual}"


@pytest.mark.parametrize("option", ["--storage-nic-gbit", "--dram-gbyte", "--kv-bytes", "--new-tokens-per-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_what_makes_no_sense_is_refused(option: str, value: str) -> None:
    result = plan(option, value)
    assert isinstance(result.exception, CliError)
    assert f"{option} is" in result.exception.message
