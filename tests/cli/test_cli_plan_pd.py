"""``sojourn plan-pd``: the paper's example, the JSON, and refused arguments."""

from __future__ import annotations

import json
from functools import partial

import cli_process
import pytest

plan = partial(cli_process.invoke, "plan-pd")


def test_the_papers_example() -> None:
    result = plan("--json", "-")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["least"], told["most"]) == pytest.approx((1 / 7, 3.5))
    by_name = {(each["prefill_nodes"], each["decode_nodes"]): each for each in told["divisions"]}
    assert [each["in_range"] for each in told["divisions"]] == [True, True, True, True, False]
    assert by_name[5, 1]["fullest_load"] > 1
    assert 1 < by_name[2, 4]["gain_at_most"] <= 3


@pytest.mark.parametrize(("new_tokens", "compute", "gain"), [(10, 1600, 1.0), (4, 4000, 2.0)])
def test_what_two_paths_gain_by_hand(new_tokens: int, compute: float, gain: float) -> None:
    """50 MB a turn of 50 GB/s: 1,000 turns/s a node. With ten new tokens computing is the bottleneck."""
    turn = ("--hit-tokens", "1000", "--kv-bytes", "50000", "--new-tokens-per-s", "1000")
    told = json.loads(plan(*turn, "--new-tokens", str(new_tokens), "--json", "-").stdout)
    found = next(each for each in told["divisions"] if each["prefill_nodes"] == 2)
    assert found["turns_per_s"] == {"one_path": 2000, "two_paths": 6000, "compute": compute}
    assert found["gain_at_most"] == gain


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


@pytest.mark.parametrize("option", ["--storage-nic-gbit", "--dram-gbyte", "--kv-bytes", "--new-tokens-per-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_what_makes_no_sense_is_refused(option: str, value: str) -> None:
    assert f"{option} is" in cli_process.refused("plan-pd", option, value).message
