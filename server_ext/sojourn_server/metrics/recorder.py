"""The engine's side of the metrics: counts kept in bounded memory until somebody asks for them.

The engine cannot serve a scrape, and with several API servers each of them would
count whatever it polled. So the engine keeps increments and ``drain`` hands each of
them out once, to whoever comes first; Prometheus adds the API servers up.

Nobody may ever ask. A histogram therefore keeps bucket counts and never values,
and the number of label combinations is bounded by the catalogue.

Not thread-safe: one engine core, one thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from .catalog import CATALOG, METRICS_DROPPED, Kind, MetricSpec, OpenLabel
from .tools import ToolNames, printable

GaugeRows = Mapping[str, Iterable[tuple[Mapping[str, str], float]]]
"""Gauge name → its (labels, value) pairs, read off the engine's state at the moment of draining."""


class _Counter:
    __slots__ = ("labels", "total")

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.total: float = 0


class _Histogram:
    __slots__ = ("bounds", "buckets", "count", "labels", "sum")

    def __init__(self, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self.labels = labels
        self.bounds = bounds
        self.reset()

    def reset(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.count = 0


class Recorder:
    """Counts and observes what the catalogue names.

    What it does not name is dropped and counted in ``sojourn_metrics_dropped_total``,
    since a wrong metric must not stop an engine; with ``strict``, as in tests, it
    raises ``AssertionError`` instead.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._tools = ToolNames()
        self._counters: dict[str, dict[tuple[str, ...], _Counter]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        # Call sites repeat themselves: the arguments as passed lead straight to the cell. Only labels
        # that name their own cell get here, so a flood of tool names adds nothing.
        self._counter_at: dict[tuple[Any, ...], _Counter] = {}
        self._histogram_at: dict[tuple[Any, ...], _Histogram] = {}

    def count(self, name: str, n: float = 1, **labels: str) -> None:
        """Add ``n`` ≥ 0 to the counter ``name``."""
        at = (name, *labels.items())
        cell = self._counter_at.get(at)
        if cell is None:
            cell = self._find_counter(name, labels, at)
            if cell is None:
                return
        if not 0 <= n < math.inf:
            self._drop("bad_value", f"{name} incremented by {n}")
            return
        cell.total += n

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation, in the unit its name ends with, to the histogram ``name``."""
        at = (name, *labels.items())
        cell = self._histogram_at.get(at)
        if cell is None:
            cell = self._find_histogram(name, labels, at)
            if cell is None:
                return
        if not 0 <= value < math.inf:
            self._drop("bad_value", f"{name} observed {value}")
            return
        cell.buckets[bisect_left(cell.bounds, value)] += 1
        cell.sum += value
        cell.count += 1

    def drain(self, gauges: GaugeRows | None = None) -> dict[str, Any]:
        """All increments since the last drain, and ``gauges`` as they are; plain JSON data.

        ``{"counters": {name: [[labels, increment], …]},
        "histograms": {name: [[labels, {"buckets": [count per bucket, not cumulated, +Inf last],
        "sum": …, "count": …}], …]}, "gauges": {name: [[labels, value], …]}}``
        """
        kept_gauges = self._checked(gauges or {})
        counters: dict[str, Any] = {}
        for name, counter_cells in self._counters.items():
            rows = []
            for counter in counter_cells.values():
                if counter.total:
                    rows.append([counter.labels, counter.total])
                    counter.total = 0
            if rows:
                counters[name] = rows
        histograms: dict[str, Any] = {}
        for name, histogram_cells in self._histograms.items():
            rows = []
            for cell in histogram_cells.values():
                if cell.count:
                    rows.append(
                        [cell.labels, {"buckets": cell.buckets, "sum": cell.sum, "count": cell.count}]
                    )
                    cell.reset()
            if rows:
                histograms[name] = rows
        return {"counters": counters, "histograms": histograms, "gauges": kept_gauges}

    def _find_counter(self, name: str, labels: dict[str, str], at: tuple[Any, ...]) -> _Counter | None:
        found = self._resolve(name, Kind.COUNTER, labels)
        if found is None:
            return None
        _, values = found
        cells = self._counters.setdefault(name, {})
        key = tuple(values.values())
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = _Counter(values)
        if values == labels:
            self._counter_at[at] = cell
        return cell

    def _find_histogram(self, name: str, labels: dict[str, str], at: tuple[Any, ...]) -> _Histogram | None:
        found = self._resolve(name, Kind.HISTOGRAM, labels)
        if found is None:
            return None
        spec, values = found
        cells = self._histograms.setdefault(name, {})
        key = tuple(values.values())
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = _Histogram(values, spec.buckets)
        if values == labels:
            self._histogram_at[at] = cell
        return cell

    def _resolve(
        self, name: str, kind: Kind, labels: Mapping[str, str]
    ) -> tuple[MetricSpec, dict[str, str]] | None:
        """The metric and the label values it will be kept under, in the catalogue's order."""
        spec = CATALOG.get(name)
        if spec is None or spec.kind is not kind:
            self._drop("unknown_metric", f"{name} is not a {kind.value} of the catalogue")
            return None
        if spec.labels.keys() != labels.keys():
            self._drop("wrong_labels", f"{name} takes {sorted(spec.labels)}, got {sorted(labels)}")
            return None
        values: dict[str, str] = {}
        for label, allowed in spec.labels.items():
            value = labels[label]
            if not isinstance(value, str):
                self._drop("wrong_labels", f"{name}: {label} is {value!r}, expected text")
                return None
            if allowed is OpenLabel.TOOL:
                value = self._tools.label(value)
            elif allowed is OpenLabel.TEXT:
                value = printable(value)
            elif value not in allowed:
                self._drop("wrong_labels", f"{name}: {label} is one of {sorted(allowed)}, got {value!r}")
                return None
            values[label] = value
        return spec, values

    def _checked(self, gauges: GaugeRows) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, rows in gauges.items():
            for labels, value in rows:
                found = self._resolve(name, Kind.GAUGE, labels)
                if found is None:
                    continue
                if not math.isfinite(value):
                    self._drop("bad_value", f"{name} is {value}")
                    continue
                kept.setdefault(name, []).append([found[1], value])
        return kept

    def _drop(self, reason: str, detail: str) -> None:
        assert not self.strict, detail
        self.count(METRICS_DROPPED, reason=reason)
