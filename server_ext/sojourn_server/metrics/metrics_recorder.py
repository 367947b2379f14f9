"""Collects an engine's metrics as increments until an API server drains them.

``drain`` returns each increment once, and Prometheus sums over the API servers. (The engine core cannot serve
a scrape itself. If the core returned totals, each of several API servers would report them, and the sum would
be too high.)

Memory stays bounded even if ``drain`` is never called, because a histogram keeps bucket counts instead of
values, and the catalogue bounds the number of label combinations.

Not thread-safe: only the engine core's thread may use it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .metric_catalog import (
    FIRST_TOOLS,
    FREQUENT_CALLS,
    MAX_TEXT_CHARS,
    MAX_TOOLS,
    METRIC_CATALOG,
    METRICS_DROPPED,
    OTHER_TOOL,
    PATH_OUTCOMES,
    MetricKind,
    OpenLabel,
)

_MOST_COUNTED = 512
"""Maximum number of tools beyond the first whose calls are counted; then counting begins anew."""
GaugeRows = Mapping[str, Iterable[tuple[Mapping[str, str], float]]]
"""Gauge name → its (labels, value) pairs, read from the engine's state when draining."""


class _Dropped(Exception):
    """A measurement does not fit the catalogue. Arguments: value of the label ``reason``, details."""


class _Cell:
    """One series: what a counter or histogram has grown by since the last drain, or a gauge's value. Only
    histograms use ``buckets``."""

    __slots__ = ("bounds", "buckets", "labels", "sum")

    def __init__(self, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self.labels, self.bounds = labels, bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum: float = 0


class MetricsRecorder:
    """Collects measurements of the catalogue's metrics.

    A measurement that does not fit the catalogue is dropped and counted in ``sojourn_metrics_dropped_total``,
    because a wrong metric must not stop an engine. If ``strict`` is true, as in tests, such a measurement
    raises ``AssertionError``.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._tools: set[str] = set()
        """Tools that became label values. They stay, so that a time series keeps its meaning."""
        self._calls: Counter[str] = Counter()
        """Other tools → number of measurements."""
        self._cells: dict[tuple[str, ...], _Cell] = {}
        """(Name, label values) → cell. A drain empties it."""
        # Cache: arguments of a call → its cell. It holds only calls whose labels are stored unchanged, so
        # tool names that are counted as "other" do not fill it.
        self._cell_at: dict[tuple[Any, ...], _Cell] = {}
        self._totals: dict[tuple[str, ...], float] = {}
        """(Counter, label values) → the total of the last ``count_total``."""

    def count(self, name: str, n: float = 1, **labels: str) -> None:
        """Add ``n`` ≥ 0 to the counter ``name``."""
        cell = self._cell(name, MetricKind.COUNTER, labels, n)
        if cell is not None:
            cell.sum += n

    def count_total(self, name: str, total: float, **labels: str) -> None:
        """Add to the counter ``name`` what ``total``, which someone else counts, has grown since the last
        call."""
        at = (name, *labels.values())
        grown = total - self._totals.get(at, 0)
        self._totals[at] = total
        if grown > 0:
            self.count(name, grown, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to the histogram ``name``, in the unit that the name ends with."""
        cell = self._cell(name, MetricKind.HISTOGRAM, labels, value)
        if cell is not None:
            cell.buckets[bisect_left(cell.bounds, value)] += 1
            cell.sum += value

    def drain(self, gauges: GaugeRows | None = None) -> dict[str, Any]:
        """Return and clear all increments since the last drain, with the current ``gauges``, as JSON data.

        ``{"counters": {name: [[labels, increment], …]},
        "histograms": {name: [[labels, {"buckets": [count per bucket, not cumulative, +Inf last],
        "sum": …, "count": …}], …]}, "gauges": {name: [[labels, value], …]}}``
        """
        for name, rows in (gauges or {}).items():
            for labels, value in rows:
                if (cell := self._cell(name, MetricKind.GAUGE, labels, value)) is not None:
                    cell.sum = value
        drained: dict[str, Any] = {f"{kind.value}s": {} for kind in MetricKind}
        for (name, *_), cell in self._cells.items():
            spec = METRIC_CATALOG[name]
            grown: Any = cell.sum
            if spec.buckets:
                grown = {"buckets": cell.buckets, "sum": cell.sum, "count": sum(cell.buckets)}
            drained[f"{spec.kind.value}s"].setdefault(name, []).append([cell.labels, grown])
        self._cells, self._cell_at = {}, {}
        return drained

    def _cell(self, name: str, kind: MetricKind, labels: Mapping[str, str], value: float) -> _Cell | None:
        """Return the cell for these labels; ``None`` for a dropped measurement."""
        at = (name, kind, *labels.items())
        try:
            # A gauge may be negative.
            if not (0 <= value < math.inf or (kind is MetricKind.GAUGE and math.isfinite(value))):
                raise _Dropped("bad_value", f"{name} is or grew by {value}")
            return self._cell_at.get(at) or self._find_cell(at, name, kind, labels)
        except _Dropped as dropped:
            reason, detail = dropped.args
            assert not self.strict, detail
            self.count(METRICS_DROPPED, reason=reason)
            return None

    def _find_cell(
        self, at: tuple[Any, ...], name: str, kind: MetricKind, labels: Mapping[str, str]
    ) -> _Cell:
        """Return the cell of the stored label values, which are in the catalogue's order. Raises
        ``_Dropped``."""
        spec = METRIC_CATALOG.get(name)
        if spec is None or spec.kind is not kind:
            raise _Dropped("unknown_metric", f"{name} is not a {kind.value} of the catalogue")
        if spec.labels.keys() != labels.keys():
            raise _Dropped("wrong_labels", f"{name} takes {sorted(spec.labels)}, got {sorted(labels)}")
        values: dict[str, str] = {}
        for label, allowed in spec.labels.items():
            value = labels[label]
            if not isinstance(value, str):
                raise _Dropped("wrong_labels", f"{name}: {label} is {value!r}, expected text")
            if allowed is OpenLabel.TOOL:
                value = self._tool_label(value)
            elif allowed is OpenLabel.TEXT:
                value = printable_label(value)
            elif value not in allowed:
                raise _Dropped("wrong_labels", f"{name}: {label} is {value!r}, not of {sorted(allowed)}")
            values[label] = value
        cell = self._cells.setdefault((name, *values.values()), _Cell(values, spec.buckets))
        if values == labels:
            self._cell_at[at] = cell
        return cell

    def _tool_label(self, tool: str) -> str:
        """Return the name of ``tool`` if it is a label value; else ``other``. A name beyond the first must
        recur, so that names which occur once do not take all places."""
        name = printable_label(tool)
        if len(self._tools) < MAX_TOOLS and name not in self._tools and name != OTHER_TOOL:
            if len(self._calls) >= _MOST_COUNTED:
                self._calls.clear()
            self._calls[name] += 1
            if len(self._tools) < FIRST_TOOLS or self._calls[name] >= FREQUENT_CALLS:
                self._tools.add(name)
        return name if name in self._tools else OTHER_TOOL


def printable_label(text: str) -> str:
    """Return ``text`` as a label value: valid UTF-8, and at most ``MAX_TEXT_CHARS`` characters."""
    # A lone surrogate would make the whole exposition unencodable.
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")


# --- links of an engine, to storage and to other engines -------------------------------------------

LINK_LABELS = {
    "storage read": {"link": "storage", "direction": "read"},
    "storage write": {"link": "storage", "direction": "write"},
    "compute network": {"link": "compute", "direction": "sent"},
}
"""Link name → its labels."""
RECEIVED = {"link": "compute", "direction": "received"}


def count_links(
    recorder: MetricsRecorder, totals: Mapping[str, Any] | None
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Add the growth of an engine's link ``totals`` to the counters of ``recorder``. Returns the present
    values of the gauges: metric name → pairs (labels, value).

    ``totals``: the statistics of ``kv_transfer``, with the keys ``links``, ``received_bytes``, ``counts``,
    ``slots`` and ``slots_used``. For ``None`` (an engine without links) the result is empty.
    """
    if totals is None:
        return {}
    links = [(LINK_LABELS[name], state) for name, state in totals["links"].items()]
    for labels, state in [*links, (RECEIVED, {"moved_bytes": totals["received_bytes"]})]:
        recorder.count_total("sojourn_link_bytes_total", state["moved_bytes"], **labels)
    for what in PATH_OUTCOMES & totals["counts"].keys():
        recorder.count_total("sojourn_path_outcomes_total", totals["counts"][what], what=what)
    used = totals["slots_used"]
    return {
        "sojourn_link_queued_seconds": [
            (labels, state["queued_s"]) for labels, state in links if state["queued_s"] is not None
        ],
        "sojourn_link_queued_bytes": [(labels, state["queued_bytes"]) for labels, state in links],
        "sojourn_path_slots": [({"state": "used"}, used), ({"state": "free"}, totals["slots"] - used)],
    }
