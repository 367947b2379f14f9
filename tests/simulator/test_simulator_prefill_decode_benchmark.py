"""benchmarks/prefill_decode_cluster.py at a thousandth of its size: all tables, and a cache of runs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_run import PdSpec, run_prefill_decode
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS
from sojourn_server.traces.trace_file import write_trace
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("prefill_decode_cluster")


@pytest.fixture
def runs(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.import_module("prefill_decode_cluster_runs")
    monkeypatch.setattr(found, "ONLINE_S", 100_000.0)
    monkeypatch.setattr(found, "WARM_UP_S", 5_000.0)
    hour = {"until_s": 50_000.0, "warm_up_s": 1_000.0}
    monkeypatch.setattr(importlib.import_module("prefill_decode_cluster_online"), "HOUR", hour)
    monkeypatch.setattr(importlib.import_module("prefill_decode_cluster_offline"), "HOUR", hour)
    rates = {"ds-660b": (0.1, 0.2), "ds-27b": (0.1, 0.2)}
    monkeypatch.setattr(importlib.import_module("prefill_decode_cluster_online"), "RATES", rates)
    return found


def test_every_part_has_its_table(
    script: ModuleType,
    runs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[PdSpec] = []

    def here(
        specs: Sequence[PdSpec], *, processes: int | None, on_done: Callable[[int, PdOutcome], None]
    ) -> list[PdOutcome]:
        outcomes = []
        for number, spec in enumerate(specs):
            ran.append(spec)
            outcomes.append(run_prefill_decode(spec))
            on_done(number, outcomes[-1])
        return outcomes

    def fitted(spec: PdSpec, play: Callable[[PdSpec], PdOutcome]) -> list[tuple[float, float]]:
        assert (spec.system, spec.agents, spec.cluster.name) == ("scheduling", 2000, "2P4D")
        return [(0.3, play(replace(spec, agents=2)).virtual_s)]

    monkeypatch.setattr(runs, "run_prefill_decode_suite", here)
    monkeypatch.setattr(runs, "calibrate", fitted)
    turns = (
        TraceTurn(prompt_tokens=900, output_tokens=20, gap_s=1.0),
        TraceTurn(prompt_tokens=990, output_tokens=9),
    )
    trace = tmp_path / "mine.jsonl"
    write_trace(trace, [TraceProgram(program_id="p", turns=turns)])
    told = [
        "--share", "0.0004", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "kept"),
        "--traces", str(trace),
    ]  # fmt: skip
    script.main(told)
    page = (tmp_path / "out" / "prefill_decode_cluster.md").read_text()
    for title in (
        "Table 3: one row fitted",
        "Ablation",
        "P/D ratios",
        "Online",
        "To 1,152 devices",
        "Traffic classes",
        "Recorded agents",
    ):
        assert f"## {title}" in page
    assert "0.3000 of its FLOP peak" in page
    assert (tmp_path / "out" / "prefill_decode_cluster.svg").exists()
    found: dict[str, Any] = json.loads((tmp_path / "out" / "prefill_decode_cluster.json").read_text())
    assert {each["system"] for each in found["ablation"]} == set(PD_SYSTEMS)
    assert {each["cluster"] for each in found["ratios"]} >= {"1P5D", "2P4D", "3P3D", "4P2D", "5P1D", "1P2D"}
    assert {each["cluster"] for each in found["scale"]} == {"2P4D", "48P96D", "44P88D"}

    count = len(ran)
    page_before = tmp_path / "out" / "prefill_decode_cluster.md"
    page_before.write_text(page.replace(script.FIRST_WORDS, "Words of mine."))
    script.main(told)
    assert len(ran) == count  # all were kept
    assert "Words of mine." in page_before.read_text()


def test_capacity_is_the_highest_rate_within_the_service_levels(
    script: ModuleType, runs: ModuleType, tmp_path: Path
) -> None:
    from prefill_decode_cluster_tables import broken

    bench = runs.Bench(script.arguments(["--out", str(tmp_path)]))
    asked: list[tuple[str, float]] = []
    serves = {"basic": 0.15, "scheduling": 0.9, "oracle": 0.01}
    good = run_prefill_decode(
        PdSpec(workload="synthetic:dualpath-32k", agents=2, rate_per_s=1.0, until_s=60.0)
    )
    some = good.seen
    assert some is not None

    def at_once(part: str, specs: Sequence[PdSpec]) -> list[PdOutcome]:
        outcomes = []
        for spec in specs:
            assert spec.rate_per_s is not None
            asked.append((spec.system, spec.rate_per_s))
            ttft = 1.0 if spec.rate_per_s <= serves[spec.system] else 5.0
            seen = msgspec.structs.replace(some, ttft_mean=ttft, tpot_mean=0.01)
            outcomes.append(msgspec.structs.replace(good, seen=seen))
        return outcomes

    bench.run = at_once
    rates = (0.1, 0.2, 0.3, 0.4, 0.5)
    most = bench.capacity("ds-27b", rates)
    assert {system: found.rate_per_s for system, found in most.items()} == {
        "basic": 0.1, "scheduling": 0.5, "oracle": 0.0,
    }  # fmt: skip
    assert most["scheduling"].above is None
    assert broken(most["basic"]) == "TTFT 5 s"
    assert len(asked) == len(set(asked))


def test_what_was_run_in_one_go_has_a_wall_time(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: ModuleType
) -> None:
    bench = runs.Bench(script.arguments(["--cache", str(tmp_path)]))
    specs = [PdSpec(workload="synthetic:dualpath-32k", agents=2, system=name) for name in ("basic", "oracle")]

    def here(specs: Sequence[PdSpec], *, on_done: Callable[[int, PdOutcome], None], **told: Any) -> None:
        for number, spec in enumerate(specs):
            on_done(number, run_prefill_decode(spec))

    monkeypatch.setattr(runs, "run_prefill_decode_suite", here)
    bench.run("part", specs[:1])
    bench.run("part", specs)
    assert bench.wall_s(specs) is None  # one of them was there already
    other = [replace(spec, agents=3) for spec in specs]
    bench.run("part", other)
    assert bench.wall_s(other) is not None
    assert runs.Bench(script.arguments(["--cache", str(tmp_path)])).wall_s(other) == bench.wall_s(other)
