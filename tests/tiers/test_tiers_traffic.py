"""What movers report, summed up."""

from __future__ import annotations

from sojourn_server.metrics import catalog
from sojourn_server.tiers.jobs import TierResults
from sojourn_server.tiers.traffic import LANES, Traffic


def test_before_the_first_copy_nothing_is_said_of_overlap() -> None:
    totals = Traffic().totals()
    assert totals["overlapped"] is None
    assert totals["moved_bytes"] == dict.fromkeys(LANES, 0)


def test_overlap_is_the_share_of_copying_that_nobody_waited_for() -> None:
    traffic = Traffic()
    traffic.add(TierResults(seconds={"to_host": 3.0}, moved_bytes={"to_host": 300}, waited_s=1.0))
    traffic.add(TierResults(seconds={"to_device": 1.0, "to_disk": 50.0}, moved_bytes={"to_host": 1}))
    totals = traffic.totals()
    assert totals["overlapped"] == 0.75, "the disk is not waited for and not counted"
    assert totals["moved_bytes"] == {"to_host": 301, "to_device": 0, "to_disk": 0, "from_disk": 0}
    assert totals["seconds"]["to_disk"] == 50.0
    assert totals["waited_s"] == 1.0


def test_more_waiting_than_copying_is_no_overlap() -> None:
    traffic = Traffic()
    traffic.add(TierResults(seconds={"to_device": 1.0}, waited_s=2.0))
    assert traffic.totals()["overlapped"] == 0.0


def test_the_metrics_know_all_lanes() -> None:
    assert set(LANES) == catalog.LANES
