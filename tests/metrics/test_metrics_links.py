"""Totals that an engine of a pair tells, as increments and gauges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sojourn_server.paths
from sojourn_server.metrics.catalog import LINK_LANES, PATH_OUTCOMES
from sojourn_server.metrics.links import LINK_LABELS, RECEIVED, LinkMeter
from sojourn_server.metrics.recorder import Recorder
from sojourn_server.tiers.disk_store import Outcome


def told(moved: int, received: int = 0, **counts: int) -> dict[str, Any]:
    links = {name: {"queued_bytes": 7, "queued_s": 0.5, "moved_bytes": moved} for name in LINK_LABELS}
    return {"slots": 10, "slots_used": 4, "links": links, "received_bytes": received, "counts": counts}


def test_totals_become_increments() -> None:
    recorder = Recorder(strict=True)
    meter = LinkMeter(recorder)
    assert meter.take(None) == {}
    meter.take(told(100, pushes=9, pushes_complete=2))
    meter.take(told(150, 30, pushes=9, pushes_complete=3))
    drained = recorder.drain()["counters"]
    moved = {(row["link"], row["direction"]): n for row, n in drained["sojourn_link_bytes_total"]}
    assert moved == {lane: 30 if lane == RECEIVED else 150 for lane in LINK_LANES}
    assert drained["sojourn_path_outcomes_total"] == [[{"what": "pushes_complete"}, 3]]
    meter.take(told(150, 30, pushes_complete=3))
    assert recorder.drain()["counters"] == {}


def test_what_is_so_at_this_moment() -> None:
    recorder = Recorder(strict=True)
    gauges = recorder.drain(LinkMeter(recorder).take(told(0)))["gauges"]
    assert gauges["sojourn_path_slots"] == [[{"state": "used"}, 4], [{"state": "free"}, 6]]
    read = {"link": "storage", "direction": "read"}
    assert [read, 0.5] in gauges["sojourn_link_queued_seconds"]
    assert [read, 7] in gauges["sojourn_link_queued_bytes"]


def test_outcomes_are_words_that_the_paths_count() -> None:
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(sojourn_server.paths.__file__).parent.glob("*.py")
    )
    counted = {word for line in re.findall(r"counts\[(.*)\]", text) for word in re.findall(r'"(\w+)"', line)}
    written = {f"write_{outcome}" for outcome in (*(each.value for each in Outcome), "failed")}
    assert counted | written >= PATH_OUTCOMES
    assert len(counted) > 20
