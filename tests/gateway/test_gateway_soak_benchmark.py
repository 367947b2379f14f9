"""benchmarks/soak.py without servers: what a round does, what counts as a leak or as growth, and its page."""

from __future__ import annotations

import json
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
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


def test_a_round_is_planned_by_its_seed_alone(soak: Any) -> None:
    plans = [soak.plan_round(24, number, 120.0) for number in range(60)]
    assert plans == [soak.plan_round(24, number, 120.0) for number in range(60)]
    assert plans != [soak.plan_round(25, number, 120.0) for number in range(60)]
    for plan in plans:
        assert plan == sorted(plan)
        assert all(0.0 <= action.at_s <= 120.0 for action in plan)
        assert {"kill agents", "flood"} <= {action.what for action in plan}
    assert not any(action.what.startswith("restart") for action in plans[0])
    ends = Counter((action.what, action.how) for plan in plans for action in plan)
    assert {how for what, how in ends if what == "restart engine"} == set(soak.ENGINE_ENDS)
    assert {how for what, how in ends if what == "restart gateway"} == set(soak.GATEWAY_ENDS)


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


def test_a_restarted_process_begins_another_life(report: Any) -> None:
    record = report.Record(seed=24, settle_min=10.0)
    one = state()
    record.remember([one])
    record.remember([one])
    one.processes[0].pid = 8
    record.remember([one])
    assert [(life.number, len(life.rss_mib)) for life in record.lives.values()] == [(1, 2), (2, 1)]


def test_the_page_is_written_and_keeps_what_was_written_by_hand(report: Any, tmp_path: Path) -> None:
    made = SimpleNamespace(
        command="soak.py --hours 2", versions={"python": "3"}, machine={"cores": 2, "processor": "P"}
    )
    record = record_of(report, [90.0, 100.0, 101.0, 101.5, 101.9])
    report.write(record, tmp_path, made, 7200.0, "saga")
    path = tmp_path / "soak.md"
    text = path.read_text(encoding="utf-8")
    assert "**Verdict: holds.**" in text
    assert "| engine a, API server | 40 | 100.0 | 101.9 | +1.9 % |" in text
    assert "seed 24; load average 1.5 to 1.5" in text
    assert "| turns | 20 |" in text
    told = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert told["verdict"]["holds"]
    assert told["command"] == "python benchmarks/soak.py --hours 2"
    path.write_text(text.replace("Nothing has been written yet.", "Mine."), encoding="utf-8")
    record.failed(4, "something")
    report.write(record, tmp_path, made, 7200.0, "saga")
    text = path.read_text(encoding="utf-8")
    assert "Mine." in text
    assert "**Verdict: does not hold.**" in text
    assert "- round 4, seed 24: something" in text


def test_a_killed_client_says_where_it_was(
    soak: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "client.py"
    words = ["turns", "+tool", "-tool", "tool calls", "+tool", "+stream", "+stream"]
    script.write_text(
        f"import time\nfor word in {words!r}: print(word, flush=True)\ntime.sleep(600)\n", encoding="utf-8"
    )
    monkeypatch.setattr(soak, "CLIENTS", script)
    client = soak.Client("agents", "http://127.0.0.1:1", "agents", "1", 5.0)
    end = time.monotonic() + 30
    while sum(client.words.values()) < len(words):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert client.code is None
    told = soak.Soak._killed(client)
    assert client.code is not None
    assert told == Counter(
        {
            "turns": 1, "tool calls": 1, "agents' processes killed": 1,
            "programs killed in a tool call": 1, "programs killed in a stream": 2,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "leave_after", "end"),
    [
        (['{"choices": []}', "[DONE]"], None, "turns"),
        (['{"choices": []}', '{"error": {"message": "x"}}'], None, "streams ended by an error inside"),
        (['{"choices": []}'], None, "streams without an end"),
        (['{"choices": []}', '{"choices": []}', "[DONE]"], 2, "streams left by their client"),
    ],
)
async def test_how_a_stream_ends_is_told_apart(
    soak: Any, lines: list[str], leave_after: int | None, end: str
) -> None:
    clients = import_module("soak_clients")
    text = "".join(f"data: {line}\n\n" for line in lines)
    assert await clients.read_stream(httpx.Response(200, text=text), leave_after) == end


def test_floods_name_the_same_programs_each_time(soak: Any) -> None:
    clients = import_module("soak_clients")
    batch = clients.flood_batch(1000)
    assert batch == clients.flood_batch(1000)
    assert len({event["program_id"] for event in batch["events"]}) == clients.FLOOD_EVENTS
