"""How long tools take: medians and 95th percentiles, timeouts as lower bounds, bounds on memory."""

from __future__ import annotations

import math
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.learning.tool_durations import MAX_KEYS, MAX_SAMPLES, DurationEstimate, Durations, estimate


def durations(*samples: tuple[str, str | None, float, str]) -> Durations:
    found = Durations()
    for sample in samples:
        found.add(*sample)
    found.update_estimates()
    return found


def test_five_calls_are_enough_and_four_are_not():
    calls = [("bash", "pytest", seconds, "ok") for seconds in (1.0, 2.0, 3.0, 4.0, 50.0)]
    assert durations(*calls[:4]).estimates.get(("bash", "pytest")) is None
    assert durations(*calls).estimates["bash", "pytest"] == DurationEstimate(3.0, 50.0)


def test_calls_count_for_their_class_and_for_their_tool():
    found = durations(*[("bash", "pytest", 9.0, "ok")] * 5, ("bash", "ls", 0.1, "ok"))
    nine = DurationEstimate(9.0, 9.0)
    assert found.estimates == {("bash", "pytest"): nine, ("bash", None): nine}


def test_failures_count_as_long_as_they_took_and_cancelled_calls_do_not_count():
    statuses = ("ok", "nonzero", "error", "ok", "nonzero")
    found = durations(*[("t", None, float(n), status) for n, status in enumerate(statuses)])
    assert found.estimates["t", None] == DurationEstimate(2.0, 4.0)
    assert not Durations().add("t", None, 1.0, "cancelled")
    assert not Durations().add("t", None, math.nan, "ok")
    assert not Durations().add("t", None, math.inf, "ok")
    assert not Durations().add("t", None, -1.0, "ok")


def test_a_timeout_lasted_at_least_so_long():
    # Three of five were cut off at 30 s: of those it is only known that they take longer.
    cut = durations(*[("t", None, 1.0, "ok")] * 2, *[("t", None, 30.0, "timeout")] * 3)
    assert cut.estimates["t", None] == DurationEstimate(30.0, 30.0)
    # A call cut off early says nothing against the longer ones.
    early = durations(*[("t", None, 10.0, "ok")] * 5, *[("t", None, 0.5, "timeout")] * 3)
    assert early.estimates["t", None] == DurationEstimate(10.0, 10.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_without_timeouts_it_is_the_plain_quantile(seconds):
    found = estimate([(each, False) for each in seconds])
    ordered = sorted(seconds)
    assert found.median_s == ordered[math.ceil(len(ordered) / 2) - 1]
    assert found.p95_s == ordered[math.ceil(len(ordered) * 0.95 - 1e-6) - 1]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), min_size=1, max_size=60))
def test_quantiles_are_ordered_and_among_what_was_seen(samples):
    found = estimate(samples)
    assert found.median_s <= found.p95_s
    assert {found.median_s, found.p95_s} <= {seconds for seconds, _ in samples}


def test_timeouts_do_not_shorten_what_is_expected():
    random = Random(7)
    true = [random.lognormvariate(0, 1) for _ in range(500)]
    found = estimate([(min(each, 2.0), each > 2.0) for each in true])
    assert found.median_s == pytest.approx(median(true), rel=0.02)
    assert found.p95_s <= 2.0  # what lies behind the limit nobody can know


def test_the_newest_five_hundred_count():
    found = durations(*[("t", None, 1.0, "ok")] * MAX_SAMPLES, *[("t", None, 5.0, "ok")] * MAX_SAMPLES)
    assert found.estimates["t", None] == DurationEstimate(5.0, 5.0)


def test_keys_are_bounded_and_the_one_not_used_for_longest_goes():
    found = Durations()
    for number in range(20_000):
        found.add("bash", f"made-up-{number}", 1.0, "ok")
    found.update_estimates()
    assert len(found._samples) <= MAX_KEYS
    assert len(found.estimates) <= MAX_KEYS
    assert found.estimates["bash", None] == DurationEstimate(1.0, 1.0)
