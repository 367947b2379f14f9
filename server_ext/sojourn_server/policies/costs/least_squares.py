"""Least squares with non-negative coefficients, for a handful of unknowns."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_UNKNOWNS = 8


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the vector x ≥ 0 that minimises Σ (row·x - target)²; all zeros if nothing fits better.

    Solves plain least squares for every subset of the unknowns. The best solution without negative values is
    the constrained optimum. Subsets with linearly dependent columns are skipped, since smaller subsets are
    tried too. Raises ``ValueError`` for more than ``MAX_UNKNOWNS`` columns, or if rows and targets do not
    match.
    """
    width = len(rows[0]) if rows else 0
    if width > MAX_UNKNOWNS or len(rows) != len(targets) or any(len(row) != width for row in rows):
        raise ValueError(
            f"{len(rows)} rows of {width} for {len(targets)} targets; expected one target per row, "
            f"and at most {MAX_UNKNOWNS} columns in each row"
        )
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
