"""benchmarks/compute_quota.py, small: engines in step, the quota and two budgets of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import benchmark

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark("compute_quota") as module:
        yield module


def test_the_quota_is_kept_and_used_and_engines_hardly_wait_for_one_another(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--engines", "2", "--agents", "6", "--turns", "3", "--shortest", "2000", "--longest", "16000"]
    told = [*small, "--quota-s", "0.05", "--out", str(tmp_path), "--rows"]
    monkeypatch.setattr(sys, "argv", ["compute_quota.py", *told])
    script.main()
    result = json.loads((tmp_path / "compute_quota.json").read_text())
    few, many, quota = result["ways"]
    assert [few["way"], many["way"], quota["way"]] == ["2,048 tokens", "8,192 tokens", "the quota, 50 ms"]
    assert quota["largest_over_quota"] <= 1 + 1e-9
    assert quota["steps_over_quota"] == 0
    assert quota["quota_used_mean"] >= 0.95
    assert 1 <= quota["max_over_mean"] < 1.05 < few["max_over_mean"]
    assert quota["attention_stdev_s"] < few["attention_stdev_s"] < many["attention_stdev_s"]
    assert many["steps"] < few["steps"]
    page = (tmp_path / "compute_quota.md").read_text()
    assert "| the quota, 50 ms |" in page
    assert "--out" in result["command"]
    assert (tmp_path / "compute_quota.svg").stat().st_size > 1000
    assert "quota used" in capsys.readouterr().out


def test_costs_are_those_of_the_latency_model(script: ModuleType) -> None:
    from sojourn_server.simulator.latency.latency_protocol import StepWork
    from sojourn_server.simulator.latency.latency_selection import load_latency_model

    latency, _ = load_latency_model("h200", "llama-3.1-8b")
    costs = script.costs_of(latency)
    small, large = (
        StepWork(3, 900, 10**6, 5_000, 0),
        StepWork(3, 900, 10**8, 90_000, 0),
    )
    found_s = latency.step_s(large) - latency.step_s(small)
    assert costs.pair_s * (10**8 - 10**6) + costs.kv_token_s * 85_000 == pytest.approx(found_s)
