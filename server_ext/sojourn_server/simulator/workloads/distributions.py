"""Probability distributions that can be built from published means, deviations or percentiles. Each draws its
values from the ``random.Random`` that the caller passes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Return the number between ``low`` and ``high`` at which ``is_below`` turns from true to false."""
    for _ in range(100):  # as many halvings as a float can need
        middle = (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


Distribution = Callable[[random.Random], float]
"""Draws a number ≥ 0."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal, clipped at ``cap``. Before clipping, the logarithm of a value is normally distributed, with
    mean ``mu`` and standard deviation ``sigma``."""

    mu: float
    sigma: float
    cap: float = math.inf

    @classmethod
    def with_moments(cls, mean: float, sd: float, cap: float = math.inf) -> LogNormal:
        """Build the distribution from its mean and standard deviation *after* clipping.

        The parameters are found in closed form or, with a cap, by bisection. Raises ``ValueError`` if no
        distribution between 0 and the cap has these moments.
        """
        variance = math.log1p((sd / mean) ** 2)
        plain = cls(math.log(mean) - variance / 2, math.sqrt(variance))
        if cap == math.inf:
            return plain
        if not mean < cap or not sd * sd < mean * (cap - mean):
            raise ValueError(f"nothing between 0 and {cap} has mean {mean} and standard deviation {sd}")
        wanted = mean * mean + sd * sd
        sigma = _bisect(
            lambda sigma: cls.with_mean(mean, sigma, cap).moment(2) < wanted,
            plain.sigma * 0.5,
            plain.sigma * 8 + 1,
        )
        return cls.with_mean(mean, sigma, cap)

    @classmethod
    def with_mean(cls, mean: float, sigma: float, cap: float) -> LogNormal:
        """Build the distribution from ``sigma`` and the mean *after* clipping, by bisection. Raises
        ``ValueError`` for a mean that is not between 0 and the cap."""
        if not 0 < mean < cap < math.inf:
            raise ValueError(f"mean {mean} is not between 0 and {cap}")
        low, high = math.log(mean) - 50.0, math.log(cap) + 50.0
        return cls(_bisect(lambda mu: cls(mu, sigma, cap).moment(1) < mean, low, high), sigma, cap)

    @classmethod
    def through(cls, mean: float, probability: float, value: float, cap: float) -> LogNormal:
        """Build the distribution from one quantile and the mean *after* clipping, by bisection over sigma.

        ``value`` is the quantile of ``probability``. The mean must be below ``value``, and ``value`` between
        median and cap. Raises ``ValueError`` if no distribution is found.
        """
        score = _NORMAL.inv_cdf(probability)

        def of_sigma(sigma: float) -> LogNormal:
            return cls(math.log(value) - score * sigma, sigma, cap)

        low, high = 1e-3, 4.0
        if not (score > 0 and value < cap and of_sigma(high).moment(1) < mean < of_sigma(low).moment(1)):
            raise ValueError(f"no log-normal up to {cap} has mean {mean} and {probability} below {value}")
        return of_sigma(_bisect(lambda sigma: of_sigma(sigma).moment(1) > mean, low, high))

    def moment(self, order: int) -> float:
        """E[X^order] of the clipped value X."""
        whole = math.exp(order * self.mu + (order * self.sigma) ** 2 / 2)
        if self.cap == math.inf:
            return whole
        edge = (math.log(self.cap) - self.mu) / self.sigma
        below = _NORMAL.cdf(edge - order * self.sigma)
        # 1 − Φ(x) loses all precision for large x.
        above: float = self.cap**order * math.erfc(edge / math.sqrt(2)) / 2
        return whole * below + above

    def __call__(self, rng: random.Random) -> float:
        return min(self.cap, rng.lognormvariate(self.mu, self.sigma))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma distribution with this mean and standard deviation. Values are above 0. With a small ``sd`` it is
    close to a normal distribution."""

    mean: float
    sd: float

    def __call__(self, rng: random.Random) -> float:
        shape = (self.mean / self.sd) ** 2
        return rng.gammavariate(shape, self.mean / shape)


@dataclass(frozen=True, slots=True)
class RoundedNormal:
    """Normal, rounded to integers; values below ``least`` become ``least``."""

    mean: float
    sd: float
    least: int = 1

    def __call__(self, rng: random.Random) -> float:
        # Rounding adds a twelfth to the variance (Sheppard's correction).
        return max(self.least, round(rng.gauss(self.mean, math.sqrt(self.sd**2 - 1 / 12))))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between ``low`` and ``high``."""

    low: float
    high: float

    def __call__(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class BoundedPowerLaw:
    """``high`` · U^(1/k), where U is uniform between 0 and 1, and k follows from the mean. Values lie between
    0 and ``high``; if the mean is above ``high`` / 2, most lie near ``high``."""

    mean: float
    high: float

    def __call__(self, rng: random.Random) -> float:
        share = self.mean / self.high
        exponent = (1 - share) / share
        return self.high * math.pow(rng.random(), exponent)


@dataclass(frozen=True, slots=True)
class TruncatedExponential:
    """Distribution between ``low`` and ``high`` whose density falls exponentially, at ``rate``."""

    low: float
    high: float
    rate: float

    @classmethod
    def with_mean(cls, mean: float, low: float, high: float) -> TruncatedExponential:
        """Build the distribution from its mean by bisection. The mean must be above ``low`` and below the
        middle of ``low`` and ``high``; otherwise raises ``ValueError``."""
        if not low < mean < (low + high) / 2:
            raise ValueError(f"mean {mean} is not between {low} and the middle of {low} and {high}")
        span = high - low
        rate = _bisect(
            lambda rate: 1 / rate - span / math.expm1(min(700.0, rate * span)) > mean - low,
            1e-9 / span,
            1e3 / (mean - low),
        )
        return cls(low, high, rate)

    def __call__(self, rng: random.Random) -> float:
        inside = -math.expm1(-self.rate * (self.high - self.low))
        return self.low - math.log1p(-rng.random() * inside) / self.rate


@dataclass(frozen=True, slots=True)
class PercentileDistribution:
    """Distribution through published percentiles. Between two percentiles, the logarithm of the value is
    linear in the normal score (the standard normal quantile of the probability).

    Below the first percentile, the line through the first two continues. No value exceeds the last
    percentile, because nothing is published beyond it.
    """

    points: Sequence[tuple[float, float]]
    """(probability, value), ascending, at least two."""

    def __call__(self, rng: random.Random) -> float:
        return self.quantile(rng.random())

    def quantile(self, probability: float) -> float:
        """Return the value below which a draw lies with this probability."""
        points = self.points
        if probability >= points[-1][0]:
            return points[-1][1]
        above = next(i for i, (p, _) in enumerate(points) if probability < p or i == len(points) - 1)
        (p0, x0), (p1, x1) = points[max(0, above - 1)], points[max(1, above)]
        z0, z1 = _NORMAL.inv_cdf(p0), _NORMAL.inv_cdf(p1)
        z = _NORMAL.inv_cdf(max(probability, 1e-12))
        return x0 * math.pow(x1 / x0, (z - z0) / (z1 - z0))


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
