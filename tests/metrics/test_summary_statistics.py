"""Percentiles against the standard library's definition, and empty samples."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.metrics.summary_statistics import percentile, summarise

FINITE = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


@given(st.lists(FINITE, min_size=2, max_size=60))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    summary = summarise(values)
    for percent in (50, 90, 95, 99):
        assert summary[f"p{percent}"] == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-6)
    assert summary["mean"] == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert summary["count"] == len(values)


@given(st.lists(FINITE, min_size=1, max_size=30), st.floats(min_value=0, max_value=100))
def test_a_percentile_never_leaves_the_range_of_the_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(sorted(values), percent) <= max(values)
