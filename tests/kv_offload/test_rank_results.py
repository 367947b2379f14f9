"""The reports of several workers: a job ends with its last answer, and one rank's failure is everybody's."""

from __future__ import annotations

import random

import pytest
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults, RankResults

MOVED, FULL, MISSING, CORRUPT, FAILED = CopyResult


@pytest.mark.parametrize("bad", [FULL, MISSING, CORRUPT, FAILED])
@pytest.mark.parametrize("order", [0, 1])
def test_the_worst_result_of_a_copy_counts(bad: CopyResult, order: int) -> None:
    pair = [MOVED, bad][:: 1 - 2 * order]
    stored = RankResults(2).add([OffloadResults(stored={1: each}) for each in pair]).stored
    assert stored == {1: bad}
    staged = RankResults(2).add([OffloadResults(staged={b"k": each}) for each in pair]).staged
    assert staged == {b"k": bad}


def test_a_search_finds_what_all_ranks_find() -> None:
    reports = [OffloadResults(probed={1: (5, True)}), OffloadResults(probed={1: (3, False)})]
    assert RankResults(2).add(reports).probed == {1: (3, False)}


def test_speeds_are_of_the_engine() -> None:
    """Ranks copy at the same time: their bytes add up, the time is the slowest one's."""
    reports = [
        OffloadResults(seconds={"to_host": 1.0}, moved_bytes={"to_host": 10}, waited_s=0.1),
        OffloadResults(seconds={"to_host": 3.0}, moved_bytes={"to_host": 10}, waited_s=0.2),
    ]
    combined = RankResults(2).add(reports)
    assert (combined.seconds, combined.moved_bytes) == ({"to_host": 3.0}, {"to_host": 20})
    assert combined.waited_s == 0.2


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_answered_once_in_any_order_of_the_ranks(seed: int) -> None:
    draw = random.Random(seed)
    ranks, jobs = 4, range(30)
    results = {job: [draw.choice([MOVED, MOVED, MOVED, FAILED]) for _ in range(ranks)] for job in jobs}
    waiting = [[(job, results[job][rank]) for job in jobs] for rank in range(ranks)]
    for queue in waiting:
        draw.shuffle(queue)
    combined, answered = RankResults(ranks), {}
    while any(waiting):
        step = [
            OffloadResults(stored=dict(queue.pop() for _ in range(draw.randint(0, min(3, len(queue))))))
            for queue in waiting
        ]
        stored = combined.add(step).stored
        assert not stored.keys() & answered.keys()
        answered |= stored
    assert answered == {job: FAILED if FAILED in found else MOVED for job, found in results.items()}
