"""What one engine step costs, fitted to a live engine: a weighted sum of what the step does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .least_squares import non_negative_least_squares


class StepSample(NamedTuple):
    """One measurement: the sums over ``steps`` engine steps, and the seconds they took together.

    A request adds n new tokens to c that are there: n·c + n·(n+1)/2 pairs, c + n tokens of KV read.
    """

    seconds: float
    steps: float
    tokens: float
    attention_pairs: float
    kv_tokens_read: float
    requests: float
    """Summed over the steps: a request in two steps counts twice."""
    calls: float = 0.0
    """1 for a time to first token over HTTP, which holds the server's own share; 0 between tokens."""


class StepCosts(NamedTuple):
    """seconds = step + token·tokens + pair·attention_pairs + kv_token·kv_tokens_read + request·requests."""

    step_s: float
    token_s: float
    pair_s: float
    kv_token_s: float
    request_s: float
    call_s: float = 0.0
    """Added once to every request's time to first token by the API server, outside of any step."""

    def seconds(self, sample: StepSample) -> float:
        """What these costs say a sample should have taken."""
        return math.fsum(cost * amount for cost, amount in zip(self, sample[1:], strict=True))

    def relative_error(self, samples: Sequence[StepSample]) -> float:
        """Root mean square of (fitted - measured) / the larger of both, 0 to 1; 0.0 of no samples."""
        return math.sqrt(math.fsum(_off(self, s) ** 2 for s in samples) / len(samples)) if samples else 0.0


_NOISE = 0.05
"""How far samples of a quiet machine are off, as a part of their seconds."""
_ROUNDS = 16
"""Of the fit, at most."""
_STANDSTILL = 1e-3
"""A round that lowers the error by no more than this part of it is the last."""


def fit_step_costs(samples: Sequence[StepSample]) -> StepCosts:
    """All six ≥ 0, those with the least sum of what each sample is off: (fitted - measured) / the larger.

    So a short step counts as much as a long one, and half the time is as wrong as twice. Up to ``_NOISE``
    squares are summed, beyond it the distances themselves (Huber's loss): what the machine did beside a
    sample or two decides nothing. Raises ``ValueError`` for no samples or one that is not finite and
    positive seconds and steps.
    """
    if not samples:
        raise ValueError("no samples of engine steps to fit costs to")
    for sample in samples:
        if not all(math.isfinite(value) and value >= 0 for value in sample) or not (
            sample.seconds > 0 and sample.steps > 0
        ):
            raise ValueError(f"{sample}; expected seconds and steps > 0, all else ≥ 0")
    # From the largest seconds of all, then from each one's own: where one is absurdly small, only the first
    # leads away from it.
    starts = ([max(sample.seconds for sample in samples)] * len(samples), [s.seconds for s in samples])
    found = [_refined(samples, scales) for scales in starts]
    return min(found, key=lambda costs: _loss(costs, samples))


def _refined(samples: Sequence[StepSample], scales: Sequence[float]) -> StepCosts:
    """Weighted by 1/``scales`` first, then again and again by what the fit before makes of each sample."""
    best = _weighted(samples, scales)
    for _ in range(_ROUNDS):
        scales = [
            max(s.seconds, best.seconds(s)) * math.sqrt(max(1.0, abs(_off(best, s)) / _NOISE))
            for s in samples
        ]
        following = _weighted(samples, scales)
        before, after = _loss(best, samples), _loss(following, samples)
        if after < before:
            best = following
        if not after < before * (1 - _STANDSTILL):
            break
    return best


def _weighted(samples: Sequence[StepSample], scales: Sequence[float]) -> StepCosts:
    rows = [[amount / scale for amount in s[1:]] for s, scale in zip(samples, scales, strict=True)]
    targets = [sample.seconds / scale for sample, scale in zip(samples, scales, strict=True)]
    return StepCosts(*non_negative_least_squares(rows, targets))


def _off(costs: StepCosts, sample: StepSample) -> float:
    """-1 to 1."""
    fitted = costs.seconds(sample)
    return (fitted - sample.seconds) / max(fitted, sample.seconds)


def _loss(costs: StepCosts, samples: Sequence[StepSample]) -> float:
    """Huber's, of everything that is off."""
    offs = (abs(_off(costs, sample)) for sample in samples)
    return math.fsum(off * off if off <= _NOISE else _NOISE * (2 * off - _NOISE) for off in offs)
