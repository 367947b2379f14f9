"""Fits the costs of an engine profile to measurements: non-negative least squares.

A cost below zero would make a longer context cheaper than a shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..policies.costs.engine_profile import PrefillCurve
from ..policies.costs.step_costs import StepCosts, StepSample

_NOISE = 0.05
"""Typical relative deviation of samples on a quiet machine."""
_ROUNDS = 16
"""Maximum rounds of the fit."""
_CONVERGENCE_TOLERANCE = 1e-3
"""The fit ends after a round that lowers the error by at most this share."""


def fit_step_costs(samples: Sequence[StepSample]) -> StepCosts:
    """Fit six costs ≥ 0 with small relative deviations (fitted - measured) / max(fitted, measured).

    Relative deviations give short and long steps equal weight. Those up to ``_NOISE`` count squared, larger
    ones linearly (Huber's loss), so that single outliers do not decide. Raises ``ValueError`` without
    samples.

    The result is the best of several weighted fits. The first gives all samples the same scale, the largest
    seconds; each further fit takes its scales from the deviations of the fit before it.
    """
    if not samples:
        raise ValueError("no samples of engine steps to fit costs to")
    best = _weighted_fit(samples, [max(sample.seconds for sample in samples)] * len(samples))
    for _ in range(_ROUNDS):
        scales = [
            max(s.seconds, best.seconds(s)) * math.sqrt(max(1.0, abs(best.relative_deviation(s)) / _NOISE))
            for s in samples
        ]
        following = _weighted_fit(samples, scales)
        before, after = _huber_loss(best, samples), _huber_loss(following, samples)
        if after < before:
            best = following
        if not after < before * (1 - _CONVERGENCE_TOLERANCE):
            break
    return best


def _weighted_fit(samples: Sequence[StepSample], scales: Sequence[float]) -> StepCosts:
    rows = [[amount / scale for amount in s[1:]] for s, scale in zip(samples, scales, strict=True)]
    targets = [sample.seconds / scale for sample, scale in zip(samples, scales, strict=True)]
    return StepCosts(*non_negative_least_squares(rows, targets))


def _huber_loss(costs: StepCosts, samples: Sequence[StepSample]) -> float:
    """Return the sum of Huber losses of the relative deviations."""
    deviations = (abs(costs.relative_deviation(sample)) for sample in samples)
    return math.fsum(d * d if d <= _NOISE else _NOISE * (2 * d - _NOISE) for d in deviations)


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the vector x ≥ 0 that minimises Σ (row·x - target)²; all zeros if nothing fits better.

    Solves plain least squares for every subset of a handful of unknowns. The best solution without negative
    values is the optimum. Subsets with linearly dependent columns are skipped: smaller ones are tried too.
    """
    width = len(rows[0]) if rows else 0
    # Scale columns: sizes far apart (a constant next to tokens squared) would lose all digits.
    scales = [max((abs(row[i]) for row in rows), default=0.0) or 1.0 for i in range(width)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    best = [0.0] * width
    best_error = math.fsum(target * target for target in targets)
    for mask in range(1, 1 << width):
        columns = [i for i in range(width) if mask >> i & 1]
        found = _solve_normal_equations([[row[i] for i in columns] for row in scaled], targets)
        if found is None or min(found) < 0:
            continue
        candidate = [0.0] * width
        for column, value in zip(columns, found, strict=True):
            candidate[column] = value
        if not all(math.isfinite(value / scale) for value, scale in zip(candidate, scales, strict=True)):
            continue  # a column near zero determines no cost
        error = math.fsum(
            (math.fsum(a * x for a, x in zip(row, candidate, strict=True)) - target) ** 2
            for row, target in zip(scaled, targets, strict=True)
        )
        if error < best_error:
            best, best_error = candidate, error
    return [value / scale for value, scale in zip(best, scales, strict=True)]


def _solve_normal_equations(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Return the plain least-squares solution by the normal equations; ``None`` if they are singular."""
    size = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(size)]
        + [math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [x - factor * y for x, y in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def fit_prefill_curve(points: Sequence[tuple[int, float]]) -> PrefillCurve:
    """Fit a curve to ``(tokens, seconds)`` points.

    The curve is a quadratic if the points have three or more different token counts. With two token counts
    it is a line. With one token count it is a line through 0. Raises ``ValueError`` without points.
    """
    lengths = len({tokens for tokens, _ in points})
    if lengths == 0:
        raise ValueError("no prefill points to fit a curve to")
    powers = (0, 1, 2) if lengths >= 3 else (0, 1) if lengths == 2 else (1,)
    rows = [[float(tokens) ** power for power in powers] for tokens, _ in points]
    costs = dict(zip(powers, non_negative_least_squares(rows, [s for _, s in points]), strict=True))
    return PrefillCurve(*(costs.get(power, 0.0) for power in range(3)))
