"""Converts running totals of an engine's links (to storage and to other engines) into metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .metric_catalog import PATH_OUTCOMES
from .metrics_recorder import MetricsRecorder

LINK_LABELS = {
    "storage read": ("storage", "read"),
    "storage write": ("storage", "write"),
    "compute network": ("compute", "sent"),
}
"""Link name → values of the labels ``link`` and ``direction``."""
RECEIVED = ("compute", "received")


class LinkMetrics:
    """Adds the growth of an engine's link totals to the counters of ``recorder``."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder
        self._counted: dict[tuple[str, ...], float] = {}

    def count_growth(self, totals: Mapping[str, Any] | None) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Add the growth of ``totals`` since the last call to the counters. Returns the present values of the
        gauges: metric name → pairs (labels, value).

        ``totals``: the statistics of ``kv_transfer``, with the keys ``links``, ``received_bytes``,
        ``counts``, ``slots`` and ``slots_used``. For ``None`` (an engine without links) the result is empty.
        """
        if totals is None:
            return {}
        for (link, direction), total in _transferred_totals(totals):
            self._count("sojourn_link_bytes_total", total, link=link, direction=direction)
        for what, total in totals["counts"].items():
            if what in PATH_OUTCOMES:
                self._count("sojourn_path_outcomes_total", total, what=what)
        links = [(_labels(*LINK_LABELS[name]), state) for name, state in totals["links"].items()]
        used = totals["slots_used"]
        return {
            "sojourn_link_queued_seconds": [
                (labels, state["queued_s"]) for labels, state in links if state["queued_s"] is not None
            ],
            "sojourn_link_queued_bytes": [(labels, state["queued_bytes"]) for labels, state in links],
            "sojourn_path_slots": [({"state": "used"}, used), ({"state": "free"}, totals["slots"] - used)],
        }

    def _count(self, metric: str, total: float, **labels: str) -> None:
        name = (metric, *labels.values())
        grown = total - self._counted.get(name, 0)
        self._counted[name] = total
        if grown > 0:
            self._recorder.count(metric, grown, **labels)


def _transferred_totals(totals: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    for name, state in totals["links"].items():
        yield LINK_LABELS[name], state["moved_bytes"]
    yield RECEIVED, totals["received_bytes"]


def _labels(link: str, direction: str) -> dict[str, str]:
    return {"link": link, "direction": direction}
