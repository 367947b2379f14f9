"""benchmarks/soak.py on real engines and gateways, for two rounds: everything comes back."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_short_soak_leaks_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rich.console import Console

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    soak: Any = import_module("soak")
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
