"""Carries the engine's counts into ``prometheus_client``, where vLLM's ``/metrics`` finds them.

Works with one API server and with several. With several, vLLM scrapes through
``MultiProcessCollector``, which sees only what ordinary metric objects wrote to
``PROMETHEUS_MULTIPROC_DIR``: custom collectors vanish there, and gauges need
``multiprocess_mode="mostrecent"``. So these are ordinary metric objects. Every
increment reaches exactly one API server (``Recorder.drain``), and the scrape adds
the servers up.

The engine is polled once a second and never asked by a scrape: a scrape that had
to wait for an engine step would time out exactly when one wants to see it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sojourn_server.metrics.catalog import CATALOG, ENGINE_LABEL, METRICS_DROPPED, Kind, MetricSpec

from .calls import EngineCalls, EngineError, EngineStock

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 10.0
"""Pause after a failed poll: a dying engine needs no further questions."""

Labels = Mapping[str, str]


class PrometheusBridge:
    """The catalogue as metric objects of one registry, fed with what engines hand out."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics: dict[str, Any] = {spec.name: _metric(spec, registry) for spec in CATALOG.values()}
        self._engines: set[str] = set()
        self._gauges_set: dict[tuple[str, str], set[tuple[str, ...]]] = {}

    def apply(self, drained: Mapping[str, Any], engine: str) -> None:
        """Add one answer to ``drain_metrics`` (the shape ``Recorder.drain`` documents) of one engine.

        Rows which the catalogue does not know are dropped and counted.
        """
        if engine not in self._engines:
            self._engines.add(engine)
            self._start_at_zero(engine)
        for name, rows in drained.get("counters", {}).items():
            for labels, increment in rows:
                child = self._child(name, Kind.COUNTER, labels, engine)
                if child is not None:
                    child.inc(increment)
        for name, rows in drained.get("histograms", {}).items():
            for labels, counts in rows:
                child = self._child(name, Kind.HISTOGRAM, labels, engine)
                if child is None:
                    continue
                bounds = CATALOG[name].buckets
                if len(counts["buckets"]) == len(bounds) + 1:
                    _add_observations(child, bounds, counts["buckets"], counts["sum"])
                else:
                    self._drop("bad_value", engine)
        for name, rows in drained.get("gauges", {}).items():
            self._set_gauge(name, rows, engine)

    def _set_gauge(self, name: str, rows: list[tuple[Labels, float]], engine: str) -> None:
        now_set: set[tuple[str, ...]] = set()
        for labels, value in rows:
            child = self._child(name, Kind.GAUGE, labels, engine)
            if child is not None:
                child.set(value)
                now_set.add(tuple(labels[label] for label in CATALOG[name].labels))
        # A row the engine no longer reports is 0; several API servers cannot remove a series together.
        for values in self._gauges_set.get((name, engine), set()) - now_set:
            self._metrics[name].labels(*values, engine).set(0)
        self._gauges_set[name, engine] = now_set

    def _child(self, name: str, kind: Kind, labels: Labels, engine: str) -> Any:
        spec = CATALOG.get(name)
        if spec is None or spec.kind is not kind:
            return self._drop("unknown_metric", engine)
        if spec.labels.keys() != labels.keys() or any(
            isinstance(allowed, frozenset) and labels[label] not in allowed
            for label, allowed in spec.labels.items()
        ):
            return self._drop("wrong_labels", engine)
        return self._metrics[name].labels(*(labels[label] for label in spec.labels), engine)

    def _drop(self, reason: str, engine: str) -> None:
        self._metrics[METRICS_DROPPED].labels(reason, engine).inc()

    def _start_at_zero(self, engine: str) -> None:
        """Show counters before their first increment, which ``rate()`` would otherwise never see."""
        for spec in CATALOG.values():
            if spec.kind is Kind.COUNTER:
                for values in _combinations(spec):
                    self._metrics[spec.name].labels(*values, engine)


_bridges: weakref.WeakKeyDictionary[CollectorRegistry, PrometheusBridge] = weakref.WeakKeyDictionary()


def bridge_for(registry: CollectorRegistry = REGISTRY) -> PrometheusBridge:
    """The one bridge of a registry, which refuses to hold the same metric twice."""
    bridge = _bridges.get(registry)
    if bridge is None:
        bridge = _bridges[registry] = PrometheusBridge(registry)
    return bridge


async def poll_forever(
    engine_ref: weakref.ref[EngineCalls], bridge: PrometheusBridge, *, interval_s: float = POLL_INTERVAL_S
) -> None:
    """Drain the engine into the bridge every ``interval_s`` until it is gone or turns out to be stock.

    Holds the engine only while it asks. Asks without a time limit: an answer that
    nobody waits for any more would take its increments with it.
    """
    while True:
        engine = engine_ref()
        if engine is None:
            return
        pause_s = interval_s
        try:
            await drain_once(engine, bridge)
        except EngineStock:
            return
        except EngineError as error:
            logger.debug("metrics poll failed: %s", error)
            pause_s = max(interval_s, RETRY_INTERVAL_S)
        except Exception:
            # Whatever it was, metrics that have stopped for good are worse than a line in the log.
            logger.exception("metrics poll failed")
            pause_s = max(interval_s, RETRY_INTERVAL_S)
        del engine
        await asyncio.sleep(pause_s)


async def drain_once(engine: EngineCalls, bridge: PrometheusBridge) -> None:
    """Take every engine's increments and apply them. Raises ``EngineError``."""
    answers = await engine.call("drain_metrics", "{}")
    for engine_id, answer in zip(engine.engine_ids(), answers, strict=True):
        bridge.apply(json.loads(answer), engine_id)


def _metric(spec: MetricSpec, registry: CollectorRegistry) -> Any:
    labels = (*spec.labels, ENGINE_LABEL)
    if spec.kind is Kind.COUNTER:
        return Counter(spec.name, spec.help, labels, registry=registry)
    if spec.kind is Kind.GAUGE:
        return Gauge(spec.name, spec.help, labels, registry=registry, multiprocess_mode="mostrecent")
    return Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)


def _combinations(spec: MetricSpec) -> list[tuple[str, ...]]:
    if spec.shown_at_zero is not None:
        return sorted(spec.shown_at_zero)
    combinations: list[tuple[str, ...]] = [()]
    for values in spec.labels.values():
        if not isinstance(values, frozenset):
            return []
        combinations = [(*left, value) for left in combinations for value in sorted(values)]
    return combinations


def _add_observations(child: Any, bounds: tuple[float, ...], counts: list[int], total: float) -> None:
    """Add observations that were counted elsewhere, ``counts`` per bucket and ``total`` their sum.

    ``prometheus_client`` has no public call for this. Its histogram keeps one value
    object per bucket and one for the sum, in both modes and since before 0.10; where a
    release keeps them differently, each observation is replayed at a value inside its
    bucket, which keeps all counts exact and the sum approximate.
    """
    values = getattr(child, "_buckets", None)
    running_sum = getattr(child, "_sum", None)
    if isinstance(values, list) and len(values) == len(counts) and running_sum is not None:
        for value, count in zip(values, counts, strict=True):
            if count:
                value.inc(count)
        running_sum.inc(total)
        return
    inside = (*bounds, 2 * bounds[-1])
    for at, count in zip(inside, counts, strict=True):
        for _ in range(count):
            child.observe(at)
