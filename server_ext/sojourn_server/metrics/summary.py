"""Mean and percentiles of a set of measurements, computed one way everywhere they are reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of values sorted ascending, interpolated linearly between neighbours.

    That is the definition of numpy's default, so tables made elsewhere compare.
    Raises ``ValueError`` where there is no value or ``percent`` is outside 0..100.
    """
    if not ordered:
        raise ValueError("no values to take a percentile of")
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent is {percent}; expected 0 to 100")
    position = (len(ordered) - 1) * percent / 100.0
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # min() because low + (high - low) * w may pass high by a rounding error.
    return min(high, low + (high - low) * (position - below))


def summarise(values: Iterable[float]) -> dict[str, float | None]:
    """``{"mean", "p50", "p90", "p95", "p99", "count"}`` in the unit of ``values``.

    Of no values at all the figures are ``None`` (JSON null) and ``count`` is 0:
    nothing was measured, which is not the same as zero.
    """
    ordered = sorted(values)
    if not ordered:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "count": 0}
    return {
        "mean": math.fsum(ordered) / len(ordered),
        **{f"p{p}": percentile(ordered, p) for p in PERCENTILES},
        "count": len(ordered),
    }
