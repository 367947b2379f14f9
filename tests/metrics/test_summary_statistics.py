"""Percentiles against the standard library's definition, and empty samples."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.metrics.summary_statistics import summarise


@given(st.lists(st.floats(min_value=-1e9, max_value=1e9, allow_nan=False), max_size=60))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    summary = summarise(values)
    assert summary["count"] == len(values)
    if len(values) < 2:
        expected = values[0] if values else None
        assert {one for name, one in summary.items() if name != "count"} == {expected}
        return
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [summary[f"p{percent}"] for percent in (50, 90, 95, 99)] == [
        cuts[percent - 1] for percent in (50, 90, 95, 99)
    ]
    assert summary["mean"] == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
