"""Converts running totals of an engine's links (to storage and to other engines) into metrics."""

from __future__ import annotations

from collections.abc import Mapping
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
    links = [(_labels(*LINK_LABELS[name]), state) for name, state in totals["links"].items()]
    for labels, state in links:
        recorder.count_total("sojourn_link_bytes_total", state["moved_bytes"], **labels)
    recorder.count_total("sojourn_link_bytes_total", totals["received_bytes"], **_labels(*RECEIVED))
    for what, total in totals["counts"].items():
        if what in PATH_OUTCOMES:
            recorder.count_total("sojourn_path_outcomes_total", total, what=what)
    used = totals["slots_used"]
    return {
        "sojourn_link_queued_seconds": [
            (labels, state["queued_s"]) for labels, state in links if state["queued_s"] is not None
        ],
        "sojourn_link_queued_bytes": [(labels, state["queued_bytes"]) for labels, state in links],
        "sojourn_path_slots": [({"state": "used"}, used), ({"state": "free"}, totals["slots"] - used)],
    }


def _labels(link: str, direction: str) -> dict[str, str]:
    return {"link": link, "direction": direction}
