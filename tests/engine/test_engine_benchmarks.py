"""Benchmarks on the CPU engine, in short: they run, and their pages compare what ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_modules import BENCHMARKS, benchmark
from trace_windows import write_windows

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_arms_run_on_the_cpu_engine_and_what_needs_cuda_is_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    traces = write_windows(tmp_path / "traces.jsonl")
    command = [
        sys.executable,
        f"{BENCHMARKS}/gpu/engine.py",
        "--small",
        "--out",
        str(tmp_path),
        "--traces",
        str(traces),
    ]
    command += ["--seeds", "1", "--loads", "1", "--arms", "vLLM;vLLM + 1x;sojourn + 1x"]
    command += ["--logs", str(tmp_path / "logs")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    made = json.loads((tmp_path / "gpu_agents.json").read_text())["agents"]
    rows = {row["arm"]: row for row in made["rows"]}
    assert list(rows) == ["vLLM", "sojourn + 1x"]
    for row in rows.values():
        assert row["programs_finished"] == row["programs"] == 4
        assert row["notes"] == []  # outputs were forced, and cached tokens reported
        assert row["slowdown"]["mean"] > 0
    assert rows["sojourn + 1x"]["tokens_by_source"].get("external_unspecified", 0) > 0
    page = (tmp_path / "gpu_agents.md").read_text()
    assert "| arm | over vLLM | over sojourn + 1x |" in page
    assert "| vLLM + 1x (3 s) | vLLM's own connector to host memory needs CUDA |" in page


def test_a_short_soak_leaks_nothing(tmp_path: Path) -> None:
    """On real engines and gateways, for two rounds: everything comes back."""
    from rich.console import Console

    soak = benchmark("soak")
    length = ["--rounds", "2", "--hours", "0.001", "--load", "8", "--seed", "24"]
    options = soak.read_options([*length, "--logs", str(tmp_path / "logs"), "--out", str(tmp_path)])
    record = soak.run(options, Console(quiet=True))
    verdict = record.verdict()
    assert record.failures == []
    assert verdict["holds"], verdict
    assert record.totals["turns"] > 0
    assert record.totals["agents' processes killed"] > 0
    told = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert told["verdict"] == verdict
    servers = {life["server"] for life in told["lives"]}
    assert servers == {"engine a", "engine b", "gateway a", "gateway b"}
