"""The recorder: everything handed out once, in bounded memory, and nothing outside the catalogue."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import sojourn_server.kv_transfer
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.kv_offload.shared_store import PutOutcome
from sojourn_server.metrics.metric_catalog import (
    FREQUENT_CALLS,
    GAP_BUCKETS_S,
    MAX_TOOLS,
    OTHER_TOOL,
    PATH_OUTCOMES,
)
from sojourn_server.metrics.metrics_recorder import LINK_LABELS, RECEIVED, MetricsRecorder, count_links


def rows(drained: dict[str, Any], kind: str, name: str) -> dict[tuple[str, ...], Any]:
    """The drained rows of one metric by their label values."""
    return {tuple(labels.values()): value for labels, value in drained[kind].get(name, [])}


def test_increments_are_handed_out_once() -> None:
    recorder = MetricsRecorder(strict=True)
    recorder.count("sojourn_client_silent_total")
    recorder.count("sojourn_lost_tokens_total", 640, cause="evicted")
    recorder.observe("sojourn_tool_gap_seconds", 3.0, tool="bash")
    recorder.count("sojourn_events_total", type="heartbeat", outcome="applied")
    recorder.count("sojourn_events_total", outcome="applied", type="heartbeat")

    first = recorder.drain({"sojourn_leases": [({}, 2)]})
    assert json.loads(json.dumps(first)) == first
    assert rows(first, "gauges", "sojourn_leases") == {(): 2}
    assert first["counters"]["sojourn_events_total"] == [[{"type": "heartbeat", "outcome": "applied"}, 2]]
    assert rows(first, "counters", "sojourn_client_silent_total") == {(): 1}
    assert rows(first, "counters", "sojourn_lost_tokens_total") == {("evicted",): 640}
    assert rows(first, "histograms", "sojourn_tool_gap_seconds")[("bash",)]["count"] == 1
    assert recorder.drain() == {"counters": {}, "histograms": {}, "gauges": {}}

    recorder.count("sojourn_client_silent_total", 2)
    assert rows(recorder.drain(), "counters", "sojourn_client_silent_total") == {(): 2}
    assert rows(first, "histograms", "sojourn_tool_gap_seconds")[("bash",)]["count"] == 1  # not aliased


@given(st.lists(st.floats(min_value=0, max_value=1e5), max_size=50))
def test_buckets_hold_what_is_at_most_their_bound(values: list[float]) -> None:
    recorder = MetricsRecorder(strict=True)
    for value in values:
        recorder.observe("sojourn_tool_gap_seconds", value, tool="bash")
    histogram = rows(recorder.drain(), "histograms", "sojourn_tool_gap_seconds").get(("bash",))
    if histogram is None:
        assert not values
        return
    assert histogram["count"] == sum(histogram["buckets"]) == len(values)
    assert histogram["sum"] == pytest.approx(math.fsum(values))
    for index, bound in enumerate(GAP_BUCKETS_S):
        assert sum(histogram["buckets"][: index + 1]) == sum(value <= bound for value in values)


WRONG: list[tuple[str, str, float, dict[str, Any], str]] = [
    ("count", "sojourn_nonsense_total", 1, {}, "unknown_metric"),
    ("count", "sojourn_policy_seconds", 1, {"hook": "event"}, "unknown_metric"),
    ("observe", "sojourn_client_silent_total", 1, {}, "unknown_metric"),
    ("count", "sojourn_lost_tokens_total", 1, {}, "wrong_labels"),
    ("count", "sojourn_lost_tokens_total", 1, {"cause": "weather"}, "wrong_labels"),
    ("count", "sojourn_lost_tokens_total", 1, {"cause": None}, "wrong_labels"),
    ("count", "sojourn_client_silent_total", 1, {"program_id": "p"}, "wrong_labels"),
    ("count", "sojourn_client_silent_total", -1, {}, "bad_value"),
    ("observe", "sojourn_tool_gap_seconds", math.nan, {"tool": "bash"}, "bad_value"),
    ("observe", "sojourn_tool_gap_seconds", math.inf, {"tool": "bash"}, "bad_value"),
    ("observe", "sojourn_tool_gap_seconds", -0.1, {"tool": "bash"}, "bad_value"),
]


@pytest.mark.parametrize(("method", "name", "value", "labels", "reason"), WRONG)
def test_what_the_catalogue_lacks_is_dropped_and_counted(
    method: str, name: str, value: float, labels: dict[str, Any], reason: str
) -> None:
    recorder = MetricsRecorder()
    getattr(recorder, method)(name, value, **labels)
    drained = recorder.drain()
    assert drained["counters"] == {"sojourn_metrics_dropped_total": [[{"reason": reason}, 1]]}
    assert drained["histograms"] == {}
    with pytest.raises(AssertionError):
        getattr(MetricsRecorder(strict=True), method)(name, value, **labels)


def test_wrong_gauges_are_dropped_and_counted_in_the_same_drain() -> None:
    drained = MetricsRecorder().drain(
        {
            "sojourn_leases": [({}, math.nan)],
            "sojourn_programs": [({"state": "asleep"}, 1), ({"state": "acting"}, 3)],
        }
    )
    assert drained["gauges"] == {"sojourn_programs": [[{"state": "acting"}, 3]]}
    assert rows(drained, "counters", "sojourn_metrics_dropped_total") == {
        ("bad_value",): 1,
        ("wrong_labels",): 1,
    }


def test_a_flood_of_tool_names_makes_at_most_32_series_and_leaves_a_place_for_a_tool_that_recurs() -> None:
    recorder = MetricsRecorder(strict=True)
    rng = random.Random(7)
    for _ in range(100_000):
        recorder.observe("sojourn_tool_gap_seconds", 1.0, tool=f"tool-{rng.getrandbits(60):x}")
    for _ in range(2 * FREQUENT_CALLS):
        recorder.observe("sojourn_tool_gap_seconds", 1.0, tool="bash")
    found = rows(recorder.drain(), "histograms", "sojourn_tool_gap_seconds")
    assert (OTHER_TOOL,) in found
    assert len(found) <= MAX_TOOLS + 1
    assert sum(histogram["count"] for histogram in found.values()) == 100_000 + 2 * FREQUENT_CALLS
    assert found[("bash",)]["count"] == FREQUENT_CALLS + 1
    assert len(recorder._cell_at) <= MAX_TOOLS + 1


@pytest.mark.parametrize("hostile", ["\ud800", "x" * 10_000, "new\nline", '"', ""])
def test_any_text_becomes_a_label_that_can_be_printed(hostile: str) -> None:
    recorder = MetricsRecorder(strict=True)
    recorder.observe("sojourn_tool_gap_seconds", 1.0, tool=hostile)
    [(label,)] = rows(recorder.drain(), "histograms", "sojourn_tool_gap_seconds")
    assert len(label.encode("utf-8")) <= 4 * 64


# -- totals of an engine of a pair, as increments and gauges


def totals(moved: int, received: int = 0, **counts: int) -> dict[str, Any]:
    links = {name: {"queued_bytes": 7, "queued_s": 0.5, "moved_bytes": moved} for name in LINK_LABELS}
    return {"slots": 10, "slots_used": 4, "links": links, "received_bytes": received, "counts": counts}


def test_totals_become_increments_and_gauges_show_the_present_state() -> None:
    recorder = MetricsRecorder(strict=True)
    assert count_links(recorder, None) == {}
    count_links(recorder, totals(100, pushes=9, pushes_complete=2))
    count_links(recorder, totals(150, 30, pushes=9, pushes_complete=3))
    drained = recorder.drain()["counters"]
    moved = [[labels, 150] for labels in LINK_LABELS.values()]
    assert drained["sojourn_link_bytes_total"] == [*moved, [RECEIVED, 30]]
    assert drained["sojourn_path_outcomes_total"] == [[{"what": "pushes_complete"}, 3]]
    drained = recorder.drain(count_links(recorder, totals(150, 30, pushes_complete=3)))
    assert drained["counters"] == {}
    assert drained["gauges"]["sojourn_path_slots"] == [[{"state": "used"}, 4], [{"state": "free"}, 6]]
    assert [LINK_LABELS["storage read"], 0.5] in drained["gauges"]["sojourn_link_queued_seconds"]
    assert [LINK_LABELS["storage read"], 7] in drained["gauges"]["sojourn_link_queued_bytes"]


def test_outcomes_are_the_counters_of_kv_transfer() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(sojourn_server.kv_transfer.__file__).parent.glob("*.py")
    )
    counted = {word for line in re.findall(r"counts\[(.*)\]", text) for word in re.findall(r'"(\w+)"', line)}
    written = {f"write_{outcome}" for outcome in (*(each.value for each in PutOutcome), "failed")}
    assert counted | written >= PATH_OUTCOMES
    assert len(counted) > 20
