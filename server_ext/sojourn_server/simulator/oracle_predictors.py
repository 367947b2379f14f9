"""Predictors that only the lab can have: one knows how long each output will be, one errs as it is told.

Policies like any other (``policy.remaining``), but for the truth that they are
handed: what a predictor is worth at best, and what one with a measured error would be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, pi, sqrt
from statistics import NormalDist

from ..policies.forecasting.remaining_tokens import (
    QUANTILE_POINTS,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
)

TrueLengthLookup = Callable[[str], int]
"""Tokens of the whole output of a request, by its id."""

MEAN_ABSOLUTE_NORMAL = sqrt(2 / pi)
"""Mean |x| of a normal x, in deviations."""

_NORMAL_SCORES = tuple(
    NormalDist().inv_cdf((point + 0.5) / QUANTILE_POINTS) for point in range(QUANTILE_POINTS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePredictor:
    """Knows. The limit of what any prediction is worth."""

    length: TrueLengthLookup
    predicts: bool = True
    reads_hidden_states: bool = False

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        return (float(max(1, self.length(view.request_id) - view.output_tokens)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyPredictor:
    """Knows, but for an error, of every output that has begun: what is left times e^x, x normal with mean 0.

    It stands for a network that reads hidden states: of a request that waits there are none, so ``unseen``
    is asked. ``error`` is what such a network's error is measured as, mean |ln(actual ÷ predicted)|. That
    of a request is drawn from its id, and anew each time its output has doubled, as errors at tokens that
    are near each other are alike. It says how sure it is as a calibrated predictor would: its equally
    likely lengths scatter by as much.
    """

    length: TrueLengthLookup
    error: float
    unseen: RemainingTokensPolicy
    seed: int = 0
    predicts: bool = True
    reads_hidden_states: bool = False

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        if view.output_tokens == 0:
            return self.unseen.remaining(view, now)
        left = max(1, self.length(view.request_id) - view.output_tokens)
        drawn = random.Random(f"{self.seed}/{view.request_id}/{view.output_tokens.bit_length()}")
        deviation = self.error / MEAN_ABSOLUTE_NORMAL
        middle = left * exp(drawn.gauss(0.0, deviation))
        return tuple(
            min(float(view.most_tokens), max(1.0, middle * exp(score * deviation)))
            for score in _NORMAL_SCORES
        )
