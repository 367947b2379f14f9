"""Probability distributions that can be built from published means, deviations or percentiles. Each draws its
values from the ``random.Random`` that the caller passes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist

_NORMAL = NormalDist()

Distribution = Callable[[random.Random], float]
"""Draws a number ≥ 0."""


def log_normal(mu: float, sigma: float, cap: float = math.inf) -> Distribution:
    """Log-normal, clipped at ``cap``. Before clipping, the logarithm of a value is normally distributed, with
    mean ``mu`` and standard deviation ``sigma``."""
    return lambda rng: min(cap, rng.lognormvariate(mu, sigma))


def log_normal_with(mean: float, sd: float) -> Distribution:
    """Log-normal with this mean and standard deviation."""
    variance = math.log1p((sd / mean) ** 2)
    return log_normal(math.log(mean) - variance / 2, math.sqrt(variance))


def gamma(mean: float, sd: float) -> Distribution:
    """Gamma distribution with this mean and standard deviation. Values are above 0. With a small ``sd`` it is
    close to a normal distribution."""
    shape = (mean / sd) ** 2
    return lambda rng: rng.gammavariate(shape, mean / shape)


def rounded_normal(mean: float, sd: float, least: int = 1) -> Distribution:
    """Normal, rounded to integers; values below ``least`` become ``least``."""
    # Rounding adds a twelfth to the variance (Sheppard's correction).
    return lambda rng: max(least, round(rng.gauss(mean, math.sqrt(sd**2 - 1 / 12))))


def uniform(low: float, high: float) -> Distribution:
    """Uniform between ``low`` and ``high``."""
    return lambda rng: rng.uniform(low, high)


def truncated_exponential(low: float, high: float, rate: float) -> Distribution:
    """Distribution between ``low`` and ``high`` whose density falls exponentially, at ``rate``."""
    inside = -math.expm1(-rate * (high - low))
    return lambda rng: low - math.log1p(-rng.random() * inside) / rate


def through_percentiles(*points: tuple[float, float]) -> Distribution:
    """Distribution through published percentiles. ``points``: at least two (probability, value), ascending.
    Between two percentiles, the logarithm of the value is linear in the normal score (the standard normal
    quantile of the probability).

    Below the first percentile, the line through the first two continues. No value exceeds the last
    percentile, because nothing is published beyond it.
    """

    def draw(rng: random.Random) -> float:
        probability = rng.random()
        above = next((i for i, (p, _) in enumerate(points) if probability < p), None)
        if above is None:
            return points[-1][1]
        (p0, x0), (p1, x1) = points[max(0, above - 1)], points[max(1, above)]
        z0, z1 = _NORMAL.inv_cdf(p0), _NORMAL.inv_cdf(p1)
        z = _NORMAL.inv_cdf(max(probability, 1e-12))
        return x0 * math.pow(x1 / x0, (z - z0) / (z1 - z0))

    return draw


def split(rng: random.Random, total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` random integers ≥ 1. Each is 1 plus a share of the rest, in proportion
    to an exponentially distributed weight. Raises ``ValueError`` if ``total`` < ``parts``."""
    if total < parts:
        raise ValueError(f"{total} cannot be split into {parts} parts of at least 1")
    weights = [rng.expovariate(1.0) for _ in range(parts)]
    scale = (total - parts) / sum(weights)
    sizes, given, exact = [], 0, 0.0
    for weight in weights:
        exact += weight * scale
        sizes.append(1 + round(exact) - given)
        given = round(exact)
    return sizes
