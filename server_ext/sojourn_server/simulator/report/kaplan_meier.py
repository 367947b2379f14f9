"""Kaplan-Meier estimate of completion times, for runs that end before all programs have finished.

The mean over finished programs is biased towards short ones. The slower a policy, the larger the bias, so the
slowest policy may look best. Kaplan and Meier (1958, "Nonparametric estimation from incomplete observations")
count an unfinished program as at risk for as long as it was observed. The method assumes that the cut-off is
independent of the remaining time. This holds here, since the cut-off is the end of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ...metrics.summary_statistics import PERCENTILES
from .run_row import NO_STATISTICS, SummaryStatistics

_ROUNDING = 1e-12
"""Tolerance for rounding errors in shares, which are products of fractions."""


def finished_share(exact: Sequence[float], cut_off: Sequence[float]) -> list[tuple[float, float]]:
    """Estimated share of programs that finish within a time, as points ``(seconds, share)`` at which the
    share rises, in order. ``exact``: completion times of finished programs, in seconds. ``cut_off``: elapsed
    times of unfinished programs. Without finished programs the result is empty."""
    ordered = sorted([*((seconds, 0) for seconds in exact), *((seconds, 1) for seconds in cut_off)])
    at_risk = len(ordered)
    unfinished = 1.0
    points = []
    for seconds, same in groupby(ordered, key=lambda entry: entry[0]):
        cut = [bound for _, bound in same]
        ended = cut.count(0)
        # A program that is cut off at this moment is still at risk.
        if ended:
            unfinished *= 1.0 - ended / at_risk
            points.append((seconds, 1.0 - unfinished))
        at_risk -= len(cut)
    return points


def estimated_statistics(exact: Sequence[float], cut_off: Sequence[float]) -> SummaryStatistics:
    """Estimated mean and percentiles of the completion times of all programs, in seconds. ``exact``:
    completion times of finished programs. ``cut_off``: elapsed times of unfinished programs. Without programs
    the result is ``NO_STATISTICS``.

    The 95th percentile is the shortest time by which at least 95 % of the programs have finished. If the run
    was too short to observe a percentile, its value is the longest observed time. If the run was too short to
    observe all ends, the remaining programs count in the mean with the longest observed time. Both values are
    lower bounds, and ``at_least`` names them.
    """
    if not exact and not cut_off:
        return NO_STATISTICS
    points = finished_share(exact, cut_off)
    longest_s = max([*exact, *cut_off])
    at_least = []
    mean, before_s, unfinished = 0.0, 0.0, 1.0
    for seconds, share in points:
        mean += unfinished * (seconds - before_s)
        before_s, unfinished = seconds, 1.0 - share
    mean += unfinished * (longest_s - before_s)
    if unfinished > _ROUNDING:
        at_least.append("mean")
    found: dict[str, float] = {}
    for percent in PERCENTILES:
        reached = (seconds for seconds, share in points if share >= percent / 100.0 - _ROUNDING)
        seconds_reached = next(reached, None)
        if seconds_reached is None:
            at_least.append(f"p{percent}")
        found[f"p{percent}"] = longest_s if seconds_reached is None else seconds_reached
    return SummaryStatistics(mean=mean, **found, count=len(exact) + len(cut_off), at_least=tuple(at_least))
