"""Copies the engine's metrics into ``prometheus_client``, where vLLM's ``/metrics`` finds them.

With several API servers vLLM scrapes through ``MultiProcessCollector``. That collector ignores custom
collectors. It sees only values that ordinary metric objects wrote to ``PROMETHEUS_MULTIPROC_DIR``, so the
bridge uses such objects. Gauges need ``multiprocess_mode="mostrecent"``. Each increment goes to only one API
server (``MetricsRecorder.drain``), and a scrape adds up the servers' values.

The bridge polls the engine once a second. A scrape never calls the engine, because the call could time out
while a busy engine computes a step.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sojourn_server.metrics.metric_catalog import ENGINE_LABEL, METRIC_CATALOG, MetricKind, MetricSpec

from .engine_rpc import EngineError, EngineRpc, StockEngineError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 10.0
"""Seconds between a failed poll and the next one."""

Labels = Mapping[str, str]


class PrometheusBridge:
    """The metrics of ``METRIC_CATALOG`` in one Prometheus registry, updated from the engines' answers."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics: dict[str, Any] = {
            spec.name: _create_metric(spec, registry) for spec in METRIC_CATALOG.values()
        }
        self._gauges_set: dict[str, set[tuple[str, ...]]] = {}
        """Engine → (name, label values) of its gauges in its last answer."""

    def apply(self, drained: Mapping[str, Any], engine: str) -> None:
        """Add the values of ``drained`` to the metrics. ``drained`` is what ``MetricsRecorder.drain``
        returned in one engine. ``engine``: value of the label ``engine``."""
        if engine not in self._gauges_set:
            self._start_at_zero(engine)
        for name, rows in drained.get("counters", {}).items():
            for labels, increment in rows:
                self._child(name, labels, engine).inc(increment)
        for name, rows in drained.get("histograms", {}).items():
            for labels, counts in rows:
                _add_observations(self._child(name, labels, engine), counts["buckets"], counts["sum"])
        now_set = set()
        for name, rows in drained.get("gauges", {}).items():
            for labels, value in rows:
                self._child(name, labels, engine).set(value)
                now_set.add((name, *(labels[label] for label in METRIC_CATALOG[name].labels)))
        # A row that the engine no longer reports becomes 0. Several API servers cannot remove a series.
        for name, *values in self._gauges_set.get(engine, set()) - now_set:
            self._metrics[name].labels(*values, engine).set(0)
        self._gauges_set[engine] = now_set

    def _child(self, name: str, labels: Labels, engine: str) -> Any:
        """Return a metric with its label values. The engine's recorder has checked them."""
        return self._metrics[name].labels(*(labels[label] for label in METRIC_CATALOG[name].labels), engine)

    def _start_at_zero(self, engine: str) -> None:
        """Export each counter as 0 before its first increment, because ``rate()`` would miss that increment.
        ``rate()`` still misses the increments in the engine's first answer, because no scrape saw the 0."""
        for spec in METRIC_CATALOG.values():
            if spec.kind is MetricKind.COUNTER:
                # None, if a label can have any value.
                known = [sorted(one) for one in spec.labels.values() if isinstance(one, frozenset)]
                for values in itertools.product(*known) if len(known) == len(spec.labels) else ():
                    self._metrics[spec.name].labels(*values, engine)


@functools.cache
def bridge_for() -> PrometheusBridge:
    """Return the bridge of the process, which the first call makes. A registry can have only one, because it
    rejects a second metric of the same name."""
    return PrometheusBridge()


async def poll_forever(
    engine_ref: weakref.ref[EngineRpc], bridge: PrometheusBridge, *, interval_s: float = POLL_INTERVAL_S
) -> None:
    """Copy the engine's new metric values into the bridge every ``interval_s`` seconds.

    The loop ends when the engine is gone or turns out to run without sojourn. It holds a reference to the
    engine only during a call. Calls have no timeout, because a timeout would lose the increments of a late
    answer.
    """
    while True:
        engine = engine_ref()
        if engine is None:
            return
        pause_s = interval_s
        try:
            await drain_once(engine, bridge)
        except StockEngineError:
            return
        except Exception as error:  # metrics must not stop for good because of one unexpected error
            level = logging.DEBUG if isinstance(error, EngineError) else logging.ERROR
            logger.log(level, "metrics poll failed", exc_info=error)
            pause_s = max(interval_s, RETRY_INTERVAL_S)
        del engine
        await asyncio.sleep(pause_s)


async def drain_once(engine: EngineRpc, bridge: PrometheusBridge) -> None:
    """Drain every engine once and apply the increments. Raises ``EngineError``."""
    answers = await engine.call("drain_metrics", "{}")
    for engine_id, answer in zip(engine.engine_ids(), answers, strict=True):
        bridge.apply(json.loads(answer), engine_id)


def _create_metric(spec: MetricSpec, registry: CollectorRegistry) -> Any:
    labels = (*spec.labels, ENGINE_LABEL)
    if spec.kind is MetricKind.COUNTER:
        return Counter(spec.name, spec.help, labels, registry=registry)
    if spec.kind is MetricKind.GAUGE:
        return Gauge(spec.name, spec.help, labels, registry=registry, multiprocess_mode="mostrecent")
    return Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)


def _add_observations(child: Any, counts: list[int], total: float) -> None:
    """Add many observations to a histogram at once. ``counts`` has their number in each bucket, ``total`` is
    the sum of the observed values.

    ``prometheus_client`` has no public call for this. Since at least release 0.10, its histogram has one
    value object per bucket and one for the sum. This function increases them.
    """
    for value, count in zip(child._buckets, counts, strict=True):
        if count:
            value.inc(count)
    child._sum.inc(total)
