"""Totals of an engine of a pair, as increments and gauges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sojourn_server.kv_transfer
from sojourn_server.kv_offload.shared_store import PutOutcome
from sojourn_server.metrics.metric_catalog import PATH_OUTCOMES
from sojourn_server.metrics.metrics_recorder import LINK_LABELS, RECEIVED, MetricsRecorder, count_links


def totals(moved: int, received: int = 0, **counts: int) -> dict[str, Any]:
    links = {name: {"queued_bytes": 7, "queued_s": 0.5, "moved_bytes": moved} for name in LINK_LABELS}
    return {"slots": 10, "slots_used": 4, "links": links, "received_bytes": received, "counts": counts}


def test_totals_become_increments() -> None:
    recorder = MetricsRecorder(strict=True)
    assert count_links(recorder, None) == {}
    count_links(recorder, totals(100, pushes=9, pushes_complete=2))
    count_links(recorder, totals(150, 30, pushes=9, pushes_complete=3))
    drained = recorder.drain()["counters"]
    moved = {(row["link"], row["direction"]): n for row, n in drained["sojourn_link_bytes_total"]}
    assert moved == {**dict.fromkeys(LINK_LABELS.values(), 150), RECEIVED: 30}
    assert drained["sojourn_path_outcomes_total"] == [[{"what": "pushes_complete"}, 3]]
    count_links(recorder, totals(150, 30, pushes_complete=3))
    assert recorder.drain()["counters"] == {}


def test_gauges_show_the_present_state() -> None:
    recorder = MetricsRecorder(strict=True)
    gauges = recorder.drain(count_links(recorder, totals(0)))["gauges"]
    assert gauges["sojourn_path_slots"] == [[{"state": "used"}, 4], [{"state": "free"}, 6]]
    read = {"link": "storage", "direction": "read"}
    assert [read, 0.5] in gauges["sojourn_link_queued_seconds"]
    assert [read, 7] in gauges["sojourn_link_queued_bytes"]


def test_outcomes_are_the_counters_of_kv_transfer() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(sojourn_server.kv_transfer.__file__).parent.glob("*.py")
    )
    counted = {word for line in re.findall(r"counts\[(.*)\]", text) for word in re.findall(r'"(\w+)"', line)}
    written = {f"write_{outcome}" for outcome in (*(each.value for each in PutOutcome), "failed")}
    assert counted | written >= PATH_OUTCOMES
    assert len(counted) > 20
