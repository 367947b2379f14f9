"""benchmarks/soak.py without servers: what a round does, what counts as a leak or as growth, and its page."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")
pytest.importorskip("rich")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("soak")


@pytest.fixture
def report(soak: Any) -> Any:
    return import_module("soak_report")


def state(name: str = "engine a", *, rss_mib: float = 100.0, files: int = 30, half: int = 0) -> Any:
    stack = import_module("soak_stack")
    process = stack.ProcessState(
        role="API server", pid=7, since=time.time(), rss_mib=rss_mib, file_descriptors=files, half_closed=half
    )
    counts = {"requests": 0, "leases": 0, "blocks not back": 0}
    return stack.ServerState(name, counts, [process])


def test_what_is_back_is_no_problem_and_what_is_not_is_named(report: Any) -> None:
    first = {"engine a": state()}
    assert report.problems([state()], first) == []
    for what in ("requests", "leases", "blocks not back"):
        left = state()
        left.counts[what] = 3
        assert report.problems([left], first) == [f"engine a: 3 {what}"]
    (half,) = report.problems([state(half=1)], first)
    assert "1 connections not closed" in half
    assert report.problems([state(files=46)], first) == []
    (files,) = report.problems([state(files=47)], first)
    assert "47 file descriptors, 30 after the first silence" in files
    assert report.problems([state(files=4000)], {}) == [], "the first silence says what is usual"


def test_growth_counts_from_the_settling_on(report: Any) -> None:
    life = report.Life(
        "engine a", "worker", 1, [1.0, 5.0, 10.0, 20.0, 30.0], [50.0, 90.0, 100.0, 101.0, 102.0]
    )
    assert life.growth(10.0) == (pytest.approx(0.02), pytest.approx(0.02))
    assert life.growth(0.0)[0] == pytest.approx(1.04)
    assert life.growth(20.0) is None, "two silences are no line"
    noisy = report.Life("engine a", "worker", 1, [10.0, 20.0, 30.0, 40.0], [100.0, 104.0, 96.0, 100.0])
    assert noisy.growth(10.0)[0] == 0.0


def record_of(report: Any, sizes: list[float]) -> Any:
    """A record of silences ten minutes apart."""
    record = report.Record(seed=24, settle_min=10.0)
    for number, rss_mib in enumerate(sizes):
        one = state(rss_mib=rss_mib)
        one.processes[0].since = 0.0
        record.remember([one])
        row = {"round": number, "did": {"turns": 4}, "left": [], "silence_s": 3.0, "load_average": 1.5}
        record.rounds.append({**row, "wall_s": 100.0})
        record.totals["turns"] += 4
    (life,) = record.lives.values()
    life.minutes = [10.0 * number for number in range(len(sizes))]
    return record


def test_the_verdict_holds_only_without_leaks_failures_and_growth(report: Any) -> None:
    good = record_of(report, [90.0, 100.0, 101.0, 101.5, 101.9])
    assert good.verdict()["holds"]
    assert good.verdict()["largest_rss_growth"] == pytest.approx(0.019, abs=1e-4)
    assert not record_of(report, [90.0, 100.0, 101.0, 102.0, 103.0]).verdict()["holds"]
    leaked = record_of(report, [100.0] * 4)
    leaked.rounds[1]["left"] = ["engine a: 3 blocks not back", "engine a: 1 leases"]
    verdict = leaked.verdict()
    assert (verdict["leaked_blocks"], verdict["leaked_leases"], verdict["other_leaks"]) == (1, 1, 0)
    assert not verdict["holds"]
    failed = record_of(report, [100.0] * 4)
    failed.failed(2, "an agent sat silent")
    assert failed.failures == ["round 2, seed 24: an agent sat silent"]
    assert not failed.verdict()["holds"]
    assert not report.Record(seed=24, settle_min=10.0).verdict()["holds"], "no round shows nothing"
