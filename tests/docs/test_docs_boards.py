"""The Grafana boards and alert rules: every metric is shown, and Prometheus understands each expression."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_tools import ROOT
from sojourn_server.metrics.metric_catalog import METRIC_CATALOG
from test_docs import generator

BOARDS = ROOT / "docs" / "boards"
ALERTS = BOARDS / "alerts.yml"
_NAME = re.compile(r"\b(?:sojourn_[a-z_]+|vllm:[a-z_]+)\b")


@pytest.fixture(scope="module")
def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in BOARDS.glob("*.json")}


def _module() -> ModuleType:
    return generator()._script(ROOT / "docs" / "grafana_boards.py")


def _expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def _names(text: str) -> set[str]:
    return {name.removesuffix("_bucket") for name in _NAME.findall(text)}


def test_the_boards_are_those_of_the_generator() -> None:
    for path, content in generator().boards().items():
        assert path.read_text("utf-8") == content, "run: python docs/generate.py"


def test_boards_show_every_metric_and_alerts_only_known_ones(boards: dict[str, dict[str, Any]]) -> None:
    module = _module()
    engine, gateway = {*METRIC_CATALOG}, {*module.gateway_specs()}
    assert _names(" ".join(_expressions(boards["engine"]))) - {*module.VLLM_METRICS} == engine
    assert _names(" ".join(_expressions(boards["gateway"]))) == gateway
    asked = _names(re.sub(r"alert: \S+", "", ALERTS.read_text("utf-8")))
    assert asked <= engine | gateway | {*module.VLLM_METRICS}


def test_vllm_has_the_metrics_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text("utf-8")
    for name in _module().VLLM_METRICS:
        assert f'"{name.removesuffix("_total")}"' in source


@pytest.mark.nightly
def test_the_boards_are_grafanas(boards: dict[str, dict[str, Any]]) -> None:
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not installed"
    )
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder(sort_keys=True)
    for board in boards.values():
        read = json.loads(encoder.encode(models.Dashboard.from_json(board)))
        assert _unknown(board, read, "") == []
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
        assert all(panel["type"] == "row" or panel["description"] for panel in panels)


def _unknown(ours: Any, read: Any, at: str) -> list[str]:
    """Fields of ours that Grafana's model has dropped."""
    if isinstance(ours, dict):
        if not isinstance(read, dict):
            return [at]
        return [
            found
            for key, value in ours.items()
            for found in ([f"{at}.{key}"] if key not in read else _unknown(value, read[key], f"{at}.{key}"))
        ]
    if isinstance(ours, list) and isinstance(read, list):
        return [
            f for i, (a, b) in enumerate(zip(ours, read, strict=True)) for f in _unknown(a, b, f"{at}[{i}]")
        ]
    return [] if ours == read else [at]


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
def test_alert_rules_fire_when_they_should() -> None:
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", "alert_rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
def test_prometheus_reads_every_panel(boards: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    found = [expression for board in boards.values() for expression in _expressions(board)]
    rules = [
        {"record": f"panel{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(found)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
