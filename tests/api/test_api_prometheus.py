"""From the engine's counts to the exposition, with one API server and with two."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from api_test_engines import ScriptedEngine
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from sojourn_server.api import prometheus_bridge
from sojourn_server.api.engine_rpc import EngineError
from sojourn_server.api.prometheus_bridge import PrometheusBridge, drain_once, poll_forever
from sojourn_server.metrics.metric_catalog import ENGINE_LABEL, METRIC_CATALOG, MetricKind
from sojourn_server.metrics.metrics_recorder import MetricsRecorder
from waiting import wait_until_async

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Gauges = dict[str, list[tuple[dict[str, str], float]]]


class CountingEngine(ScriptedEngine):
    """An engine that does nothing but keep a recorder."""

    def __init__(self) -> None:
        super().__init__({})
        self.recorder = MetricsRecorder(strict=True)
        self.gauges: Gauges = {}
        self.errors: list[Exception] = []

    def _answer(self, answers: Any, op: str, asked: Any) -> Any:
        assert op == "drain_metrics"
        if self.errors:
            raise self.errors.pop(0)
        return self.recorder.drain(self.gauges)


def families_of(text: str) -> dict[str, Metric]:
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def scrape(page: CollectorRegistry | str) -> Series:
    text = page if isinstance(page, str) else generate_latest(page).decode()
    samples = [sample for family in families_of(text).values() for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted({ENGINE_LABEL: "0", **labels}.items()))]


def fill(recorder: MetricsRecorder) -> Gauges:
    """Count one of everything the catalogue has. Return the gauges."""
    gauges: Gauges = {}
    for spec in METRIC_CATALOG.values():
        labels = {
            name: sorted(allowed)[0] if isinstance(allowed, frozenset) else "text"
            for name, allowed in spec.labels.items()
        }
        if spec.kind is MetricKind.COUNTER:
            recorder.count(spec.name, 3, **labels)
        elif spec.kind is MetricKind.HISTOGRAM:
            recorder.observe(spec.name, 0.5, **labels)
        else:
            gauges[spec.name] = [(labels, 1)]
    return gauges


async def test_what_the_engine_has_counted_is_on_the_page() -> None:
    engine, registry = CountingEngine(), CollectorRegistry()
    bridge = PrometheusBridge(registry)
    engine.recorder.count("sojourn_prompt_tokens_total", 640, result="device")
    for gap_s in (0.01, 0.06, 3.0, 5000.0):
        engine.recorder.observe("sojourn_tool_gap_seconds", gap_s, tool="bash")
    engine.gauges = {"sojourn_programs": [({"state": "acting"}, 3), ({"state": "ended"}, 1)]}
    await drain_once(engine, bridge)
    engine.recorder.count("sojourn_prompt_tokens_total", 60, result="device")
    engine.gauges = {"sojourn_programs": [({"state": "ended"}, 4)]}
    await drain_once(engine, bridge)
    await drain_once(engine, bridge)

    series = scrape(registry)
    assert value(series, "sojourn_prompt_tokens_total", result="device") == 700
    assert value(series, "sojourn_prompt_tokens_total", result="lost") == 0
    assert value(series, "sojourn_programs", state="ended") == 4
    assert value(series, "sojourn_programs", state="acting") == 0, "a row that is gone"
    engine.gauges = {}
    await drain_once(engine, bridge)
    assert value(scrape(registry), "sojourn_programs", state="ended") == 0, "no row is left"
    bucket = "sojourn_tool_gap_seconds_bucket"
    assert value(series, bucket, tool="bash", le="0.05") == 1
    assert value(series, bucket, tool="bash", le="0.1") == 2
    assert value(series, bucket, tool="bash", le="3.2") == 3
    assert value(series, bucket, tool="bash", le="+Inf") == 4
    assert value(series, "sojourn_tool_gap_seconds_count", tool="bash") == 4
    assert value(series, "sojourn_tool_gap_seconds_sum", tool="bash") == pytest.approx(5003.07)


async def test_the_exposition_says_exactly_what_the_catalogue_lists() -> None:
    engine, registry = CountingEngine(), CollectorRegistry()
    engine.gauges = fill(engine.recorder)
    await drain_once(engine, PrometheusBridge(registry))
    families = families_of(generate_latest(registry).decode())
    assert set(families) == {name.removesuffix("_total") for name in METRIC_CATALOG}
    for name, spec in METRIC_CATALOG.items():
        family = families[name.removesuffix("_total")]
        assert family.type == spec.kind.value
        assert family.documentation == spec.help
        assert family.samples
        for sample in family.samples:
            labels = {key: text for key, text in sample.labels.items() if key != "le"}
            assert labels.pop(ENGINE_LABEL) == "0"
            assert labels.keys() == spec.labels.keys()
            for key, text in labels.items():
                allowed = spec.labels[key]
                assert not isinstance(allowed, frozenset) or text in allowed


# --- polling ----------------------------------------------------------------


async def test_polling_goes_on_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_bridge, "RETRY_INTERVAL_S", 0.001)
    engine, registry = CountingEngine(), CollectorRegistry()
    engine.errors = [EngineError("step failed"), RuntimeError("surprise")]
    engine.recorder.count("sojourn_client_silent_total", 4)
    bridge = PrometheusBridge(registry)
    poller = asyncio.create_task(poll_forever(weakref.ref(engine), bridge, interval_s=0.001))
    await wait_until_async(lambda: len(engine.calls) >= 4)
    poller.cancel()
    assert value(scrape(registry), "sojourn_client_silent_total") == 4


async def test_polling_ends_with_the_engine() -> None:
    engine = CountingEngine()
    bridge = PrometheusBridge(CollectorRegistry())
    poller = asyncio.create_task(poll_forever(weakref.ref(engine), bridge, interval_s=0.001))
    await wait_until_async(engine.calls.__len__)
    del engine
    await asyncio.wait_for(poller, 60)


# --- several API servers: prometheus_client's multiprocess mode --------------

SERVER = """
import json, sys
from prometheus_client import CollectorRegistry
from sojourn_server.api.prometheus_bridge import PrometheusBridge
bridge = PrometheusBridge(CollectorRegistry())
for line in sys.stdin:
    bridge.apply(json.loads(line), "0")
"""
SCRAPER = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
sys.stdout.write(generate_latest(registry).decode())
"""


def test_two_server_processes_add_up_in_multiprocess_mode(tmp_path: Path) -> None:
    recorder = MetricsRecorder(strict=True)

    def serve(leases: Iterable[float]) -> None:
        drains = []
        for n in leases:
            fill(recorder)
            recorder.observe("sojourn_tool_gap_seconds", 3.0, tool="bash")
            drains.append(json.dumps(recorder.drain({"sojourn_leases": [({}, n)]})))
        run(SERVER, tmp_path, "\n".join(drains))

    serve([5, 9])
    serve([4])
    text = run(SCRAPER, tmp_path, "")
    series = scrape(text)
    assert value(series, "sojourn_client_silent_total") == 9
    assert value(series, "sojourn_tool_gap_seconds_bucket", tool="bash", le="3.2") == 3
    assert value(series, "sojourn_leases") == 4  # the most recent, not the sum and not one per process
    kept = [name for name, spec in METRIC_CATALOG.items() if spec.kind is not MetricKind.GAUGE]
    assert {name.removesuffix("_total") for name in kept} <= families_of(text).keys()


def run(code: str, directory: Path, stdin: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        env={"PROMETHEUS_MULTIPROC_DIR": str(directory), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
