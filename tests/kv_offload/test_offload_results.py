"""The reports of several workers: a job ends with its last answer, and one rank's failure is everybody's."""

from __future__ import annotations

import random

import pytest
from sojourn_server.kv_offload.offload_jobs import (
    SPEED_MAX_AGE_S,
    SPEED_SAMPLES,
    TRANSFER_DIRECTIONS,
    CopyResult,
    OffloadResults,
    WorkerReports,
)
from sojourn_server.metrics import metric_catalog

MOVED = CopyResult.MOVED


def test_a_search_finds_what_all_ranks_find() -> None:
    reports = [OffloadResults(probed={1: (5, True)}), OffloadResults(probed={1: (3, False)})]
    assert WorkerReports(2).add(reports, 0.0).probed == {1: (3, False)}


def test_speeds_are_of_the_engine() -> None:
    """Ranks copy at the same time: their bytes add up, the time is the slowest one's."""
    reports = [
        OffloadResults(seconds={"to_host": 1.0}, moved_bytes={"to_host": 10}, waited_s=0.1),
        OffloadResults(seconds={"to_host": 3.0}, moved_bytes={"to_host": 10}, waited_s=0.2),
    ]
    combined = WorkerReports(2).add(reports, 0.0)
    assert (combined.seconds, combined.moved_bytes) == ({"to_host": 3.0}, {"to_host": 20})
    assert combined.waited_s == 0.2


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_answered_once_in_any_order_of_the_ranks(seed: int) -> None:
    draw = random.Random(seed)
    ranks, jobs = 4, range(30)
    results = {job: [draw.choice([MOVED] * 9 + [*CopyResult]) for _ in range(ranks)] for job in jobs}
    waiting = [[(job, results[job][rank]) for job in jobs] for rank in range(ranks)]
    for queue in waiting:
        draw.shuffle(queue)
    combined, answered = WorkerReports(ranks), {}
    while any(waiting):
        step = [
            OffloadResults(stored=dict(queue.pop() for _ in range(draw.randint(0, min(3, len(queue))))))
            for queue in waiting
        ]
        stored = combined.add(step, 0.0).stored
        assert not stored.keys() & answered.keys()
        answered |= stored
    order = [*CopyResult].index
    assert answered == {job: max(found, key=order) for job, found in results.items()}


# -- totals and speeds


def test_overlap_is_the_share_of_copying_that_nobody_waited_for() -> None:
    traffic = WorkerReports(1)
    traffic.add([OffloadResults(seconds={"to_host": 3.0}, moved_bytes={"to_host": 300}, waited_s=1.0)], 0.0)
    traffic.add(
        [OffloadResults(seconds={"to_device": 1.0, "to_disk": 50.0}, moved_bytes={"to_host": 1})], 0.0
    )
    totals = traffic.totals()
    assert totals["overlapped"] == 0.75, "the disk is not waited for and not counted"
    assert totals["moved_bytes"] == {"to_host": 301, "to_device": 0, "to_disk": 0, "from_disk": 0}
    assert totals["seconds"]["to_disk"] == 50.0
    assert totals["waited_s"] == 1.0


def test_the_metrics_know_all_lanes() -> None:
    assert set(TRANSFER_DIRECTIONS) == metric_catalog.LANES


def moved(seconds: float, size: int) -> OffloadResults:
    return OffloadResults(seconds={"to_host": seconds}, moved_bytes={"to_host": size})


def test_a_link_that_has_slowed_is_told_soon_however_long_it_was_fast() -> None:
    traffic = WorkerReports(1)
    for _ in range(10_000):
        traffic.add([moved(0.1, 1000)], 0.0)
    for _ in range(SPEED_SAMPLES):
        traffic.add([moved(1.0, 1000)], 0.0)
        traffic.add([OffloadResults(seconds={"to_device": 1.0}, moved_bytes={"to_device": 9})], 0.0)
    assert traffic.seconds_a_byte("to_host", 0.0) == 1.0 / 1000
    assert traffic.totals()["moved_bytes"]["to_host"] == 1000 * (10_000 + SPEED_SAMPLES), "all"
    for _ in range(SPEED_SAMPLES):
        traffic.add([moved(0.1, 1000)], 0.0)
    assert round(traffic.seconds_a_byte("to_host", 0.0) or 0.0, 9) == 0.1 / 1000, "and fast again"


def test_what_was_measured_long_ago_is_not_believed_for_ever() -> None:
    traffic = WorkerReports(1)
    traffic.add([moved(10.0, 1000)], 100.0)
    traffic.add([moved(1.0, 1000)], 101.0)
    assert traffic.seconds_a_byte("to_host", 100.0 + SPEED_MAX_AGE_S) == 11.0 / 2000
    assert traffic.seconds_a_byte("to_host", 100.5 + SPEED_MAX_AGE_S) == 1.0 / 1000
    assert traffic.seconds_a_byte("to_host", 102.0 + SPEED_MAX_AGE_S) is None
