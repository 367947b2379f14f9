"""The completion estimate: exact without cut-offs, unbiased with them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.simulator.report.run_metrics import estimated_statistics

seconds = st.floats(0.001, 1e4, allow_nan=False)
PERCENTS = (50, 90, 95, 99)


@given(st.lists(seconds, min_size=1, max_size=30))
def test_without_cut_offs_it_is_mean_and_nearest_rank(times: list[float]) -> None:
    found = estimated_statistics(times, [])
    assert found.mean == pytest.approx(math.fsum(times) / len(times))
    for percent in PERCENTS:
        rank = math.ceil(percent * len(times) / 100)
        assert getattr(found, f"p{percent}") == sorted(times)[rank - 1]
    assert found.at_least == ()


def test_a_textbook_example_by_hand() -> None:
    # At risk: 6 at 3, 4 at 5 (one cut off at 4), 2 at 9 (one cut off at 5, the moment another ended).
    # So 17 % have finished by 3, 38 % by 5 and 69 % by 9.
    found = estimated_statistics([3, 5, 9], [4, 5, 12])
    assert (found.p50, found.p90, found.count) == (9, 12, 6)
    assert found.at_least == ("mean", "p90", "p95", "p99")


def test_what_is_never_seen_is_nothing() -> None:
    assert estimated_statistics([], []).mean is None
    only_cut = estimated_statistics([], [5.0, 7.0])
    assert (only_cut.p50, only_cut.mean) == (7.0, 7.0)
    assert set(only_cut.at_least) == {"mean", "p50", "p90", "p95", "p99"}


def test_it_finds_the_median_that_the_finished_ones_alone_understate() -> None:
    generator = random.Random(7)
    truth = [generator.expovariate(1 / 100) for _ in range(4000)]
    seen_for = [generator.uniform(0, 250) for _ in truth]
    exact = [true for true, seen in zip(truth, seen_for, strict=True) if true <= seen]
    cut_off = [seen for true, seen in zip(truth, seen_for, strict=True) if true > seen]
    median = 100 * math.log(2)
    assert sorted(exact)[len(exact) // 2] < 0.75 * median
    assert estimated_statistics(exact, cut_off).p50 == pytest.approx(median, rel=0.05)
