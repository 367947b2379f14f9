"""benchmarks/pd_cluster.py at a thousandth of its size: all tables, and kept runs are not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from sojourn_server.lab.pd.outcome import PdOutcome
from sojourn_server.lab.pd.run import PdSpec, run
from sojourn_server.traces.schema import TraceProgram, Turn
from sojourn_server.traces.writer import write_trace


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import pd_cluster

    monkeypatch.setattr(pd_cluster, "ONLINE_S", 60_000.0)
    monkeypatch.setattr(pd_cluster, "WARM_UP_S", 1_000.0)
    monkeypatch.setattr(pd_cluster, "RATES", {"ds-660b": (0.1, 0.2), "ds-27b": (0.1, 0.2)})
    return pd_cluster


def test_every_part_has_its_table(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[PdSpec] = []

    def here(
        specs: Sequence[PdSpec], *, processes: int | None, on_done: Callable[[int, PdOutcome], None]
    ) -> list[PdOutcome]:
        outcomes = []
        for number, spec in enumerate(specs):
            ran.append(spec)
            outcomes.append(run(spec))
            on_done(number, outcomes[-1])
        return outcomes

    def fitted(spec: PdSpec) -> list[tuple[float, float]]:
        assert (spec.system, spec.agents, spec.cluster.name) == ("scheduling", 2000, "2P4D")
        return [(0.3, 3000.0)]

    monkeypatch.setattr(script, "run_all", here)
    monkeypatch.setattr(script, "calibrate", fitted)
    turns = (Turn(prompt_tokens=900, output_tokens=20, gap_s=1.0), Turn(prompt_tokens=990, output_tokens=9))
    trace = tmp_path / "mine.jsonl"
    write_trace(trace, [TraceProgram(program_id="p", turns=turns)])
    told = [
        "--share", "0.002", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "kept"),
        "--traces", str(trace),
    ]  # fmt: skip
    script.main(told)
    page = (tmp_path / "out" / "pd_cluster.md").read_text()
    for title in (
        "Ablation",
        "P/D ratios",
        "Online",
        "To 1,152 devices",
        "Traffic classes",
        "Recorded agents",
    ):
        assert f"## {title}" in page
    assert "0.3000 of its FLOP peak" in page
    assert (tmp_path / "out" / "pd_cluster.svg").exists()
    found: dict[str, Any] = json.loads((tmp_path / "out" / "pd_cluster.json").read_text())
    assert {each["system"] for each in found["ablation"]} == set(script.SYSTEMS)
    assert {each["cluster"] for each in found["scale"]} == {"2P4D", "48P96D", "44P88D"}

    count = len(ran)
    page_before = tmp_path / "out" / "pd_cluster.md"
    page_before.write_text(page.replace(script.FIRST_WORDS, "Words of mine."))
    script.main(told)
    assert len(ran) == count  # all were kept
    assert "Words of mine." in page_before.read_text()


def test_capacity_is_the_highest_rate_within_the_service_levels(script: ModuleType, tmp_path: Path) -> None:
    bench = script.Bench(script.arguments(["--out", str(tmp_path)]))
    asked: list[tuple[str, float]] = []
    serves = {"basic": 0.15, "scheduling": 0.45, "split": 0.9, "oracle": 0.01}
    good = run(PdSpec(workload="synthetic:dualpath-32k", agents=2, rate_per_s=1.0, until_s=60.0))
    assert good.seen is not None

    def at_once(part: str, specs: Sequence[PdSpec]) -> list[PdOutcome]:
        outcomes = []
        for spec in specs:
            assert spec.rate_per_s is not None
            asked.append((spec.system, spec.rate_per_s))
            ttft = 1.0 if spec.rate_per_s <= serves[spec.system] else 5.0
            seen = msgspec.structs.replace(good.seen, ttft_mean=ttft, tpot_mean=0.01)
            outcomes.append(msgspec.structs.replace(good, seen=seen))
        return outcomes

    bench.run = at_once
    rates = (0.1, 0.2, 0.3, 0.4, 0.5)
    assert script.capacity(bench, "ds-27b", rates) == {
        "basic": 0.1, "scheduling": 0.4, "split": 0.5, "oracle": 0.0,
    }  # fmt: skip
    assert len(asked) == len(set(asked))
