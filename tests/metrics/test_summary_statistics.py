"""Mean and percentiles by example; the percentiles themselves are the standard library's."""

from __future__ import annotations

from sojourn_server.metrics.summary_statistics import summarise


def test_percentiles_are_interpolated_and_no_value_has_none() -> None:
    found = {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "count": 101}
    assert summarise(range(101)) == found
    assert summarise([3.0, 5.0]) == {"mean": 4.0, "p50": 4.0, "p90": 4.8, "p95": 4.9, "p99": 4.98, "count": 2}
    assert summarise([7.0]) == {**dict.fromkeys(found, 7.0), "count": 1}
    assert summarise([]) == {**dict.fromkeys(found), "count": 0}
