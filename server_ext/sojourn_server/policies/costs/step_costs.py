"""Cost of an engine step: a weighted sum of its work, fitted to a live engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

MAX_FLOAT = sys.float_info.max
Cost = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
"""A finite number ≥ 0."""


class StepSample(NamedTuple):
    """One measurement: sums over ``steps`` engine steps, and the seconds that these steps took together.

    In one step, a request that computes n tokens after c cached tokens adds n·c + n·(n+1)/2 attention pairs
    and reads the KV of c + n tokens.
    """

    seconds: Cost
    steps: Cost
    tokens: Cost
    attention_pairs: Cost
    kv_tokens_read: Cost
    requests: Cost
    """Sum over the steps, so a request in two steps counts twice."""
    calls: Cost = 0.0
    """1 if the sample is a time to first token over HTTP, which includes the API server's share; else 0."""


class StepCosts(NamedTuple):
    """Fitted costs: seconds = step_s·steps + token_s·tokens + pair_s·attention_pairs +
    kv_token_s·kv_tokens_read + request_s·requests + call_s·calls."""

    step_s: Cost
    token_s: Cost
    pair_s: Cost
    kv_token_s: Cost
    request_s: Cost
    call_s: Cost = 0.0
    """Seconds that the API server adds to each time to first token, outside of engine steps."""

    def seconds(self, sample: StepSample) -> float:
        """Return the seconds that these costs predict for a sample."""
        return math.fsum(cost * amount for cost, amount in zip(self, sample[1:], strict=True))

    def chunk_s(self, cached: int, new: int) -> float:
        """Return the seconds that computing ``new`` tokens of a request after ``cached`` ones adds to a step,
        without the costs of the step and the request."""
        pairs = new * (cached + (new + 1) / 2)
        return self.pair_s * pairs + self.kv_token_s * (cached + new) + self.token_s * new

    def relative_error(self, samples: Sequence[StepSample]) -> float:
        """Return the root mean square of (fitted - measured) / max(fitted, measured), 0 to 1; 0.0 without
        samples."""
        squares = math.fsum(_relative_deviation(self, sample) ** 2 for sample in samples)
        return math.sqrt(squares / max(1, len(samples)))


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
            max(s.seconds, best.seconds(s)) * math.sqrt(max(1.0, abs(_relative_deviation(best, s)) / _NOISE))
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


def _relative_deviation(costs: StepCosts, sample: StepSample) -> float:
    """Return the relative deviation of a sample, from -1 to 1."""
    fitted = costs.seconds(sample)
    return (fitted - sample.seconds) / max(fitted, sample.seconds)


def _huber_loss(costs: StepCosts, samples: Sequence[StepSample]) -> float:
    """Return the sum of Huber losses of the relative deviations."""
    deviations = (abs(_relative_deviation(costs, sample)) for sample in samples)
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
