"""Mean and percentiles of measurements, with one definition for all reports."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, quantiles

PERCENTILES = (50, 90, 95, 99)


def summarise(values: Iterable[float]) -> dict[str, float | None]:
    """Return ``mean``, ``p50``, ``p90``, ``p95``, ``p99`` and ``count`` of ``values``. Percentiles are
    linearly interpolated (numpy's default).

    All except ``count`` are in the unit of ``values``, and ``None`` (JSON null) if there are no values.
    """
    found = [*values]
    if not found:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "count": 0}
    cuts = quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return {"mean": fmean(found), **{f"p{p}": cuts[p - 1] for p in PERCENTILES}, "count": len(found)}
