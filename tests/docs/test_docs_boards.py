"""The Grafana boards and alert rules: every metric is shown, and Prometheus understands each expression."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_tools import ROOT
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sojourn_server.api.prometheus_bridge import PrometheusBridge
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.metrics.metric_catalog import METRIC_CATALOG, MetricKind, OpenLabel
from sojourn_server.metrics.metrics_recorder import MetricsRecorder
from sojourn_server.routing.routing_status import LinkStats, PairEngineStatus
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


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
def test_alert_rules_fire_when_they_should() -> None:
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", "alert_rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


# -- a real Prometheus -----------------------------------------------------------


class _Exposition:
    """A ``/metrics`` page with every metric of an engine, vLLM and a gateway; each scrape counts more."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.bridge = PrometheusBridge(self.registry)
        self.recorder = MetricsRecorder(strict=True)
        self.gateway = GatewayMetrics(["home"])
        self.vllm = {}
        kinds = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge, MetricKind.HISTOGRAM: Histogram}
        for spec in _module().VLLM_METRICS.values():
            made = kinds[spec.kind](spec.name, spec.help, ["engine"], registry=self.registry)
            self.vllm[spec.name] = made.labels("0")

    def page(self) -> bytes:
        gauges: dict[str, Any] = {}
        for spec in METRIC_CATALOG.values():
            labels = {
                label: "bash" if isinstance(values, OpenLabel) else min(values)
                for label, values in spec.labels.items()
            }
            if spec.name == "sojourn_prompt_tokens_total":
                self.recorder.count(spec.name, 5, result="lost")
            if spec.kind is MetricKind.GAUGE:
                gauges[spec.name] = [(labels, 1.0)]
            elif spec.kind is MetricKind.COUNTER:
                self.recorder.count(spec.name, 10, **labels)
            else:
                self.recorder.observe(spec.name, 0.5, **labels)
        self.bridge.apply(json.loads(json.dumps(self.recorder.drain(gauges))), "0")
        for metric in self.vllm.values():
            if isinstance(metric, Gauge):
                metric.set(1)
            elif isinstance(metric, Counter):
                metric.inc(10)
            else:
                metric.observe(0.5)
        self.gateway.sent("home", 0.1)
        self.gateway.count_broken_answer()
        return generate_latest(self.registry) + self.gateway.exposition(
            [PAIR_ENGINE], {"a": 0.5}, up_by_role={"prefill": 1, "decode": 0}
        )


PAIR_ENGINE = PairEngineStatus(
    replica="r1",
    instance="i",
    health="up",
    load=0.5,
    in_flight=1,
    queued=0,
    programs=1,
    capacity_tokens=1000,
    host_tokens=0,
    room_tokens=500,
    role="prefill",
    node="n",
    epoch="e",
    links={"storage": LinkStats(0, 0.0, 0)},
)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus that has scraped the page at least three times."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    exposition = _Exposition()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition.page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "sojourn", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _scraped(url):
            assert process.poll() is None, "prometheus ended"
            assert time.monotonic() < deadline, "prometheus did not scrape the page"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()


def _scraped(url: str) -> bool:
    try:
        (row,) = query(url, "count_over_time(sojourn_leases[1m])")
    except (OSError, ValueError):
        return False
    return float(row["value"][1]) >= 3


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Result rows of an instant query. Raises ``AssertionError`` if Prometheus rejects it."""
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code != 503:
            pytest.fail(f"{expression}: {error.read().decode()}")
        raise
    return rows


def test_prometheus_answers_every_panel(prometheus: str, boards: dict[str, dict[str, Any]]) -> None:
    empty = []
    for name, board in boards.items():
        for expression in _expressions(board):
            asked = expression.replace("$__rate_interval", "1m")
            asked = asked.replace('"$instance"', '".*"').replace('"$engine"', '".*"')
            if not query(prometheus, asked):
                empty.append(f"{name}: {asked}")
    assert empty == []
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
