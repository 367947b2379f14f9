"""Mean and percentiles of measurements, with one definition for all reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile of ascending values, linearly interpolated (numpy's default).

    Raises ``ValueError`` if there are no values, or if ``percent`` is outside 0..100.
    """
    if not ordered:
        raise ValueError("no values to take a percentile of; expected at least one")
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent is {percent}; expected 0 to 100")
    position = (len(ordered) - 1) * percent / 100.0
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # min(): low + (high - low) * w may exceed high by a rounding error.
    return min(high, low + (high - low) * (position - below))


def summarise(values: Iterable[float]) -> dict[str, float | None]:
    """Return ``mean``, ``p50``, ``p90``, ``p95``, ``p99`` and ``count`` of ``values``.

    All except ``count`` are in the unit of ``values``, and ``None`` (JSON null) if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "count": 0}
    return {
        "mean": math.fsum(ordered) / len(ordered),
        **{f"p{p}": percentile(ordered, p) for p in PERCENTILES},
        "count": len(ordered),
    }
