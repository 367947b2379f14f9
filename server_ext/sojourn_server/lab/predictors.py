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

from ..policy.remaining import POINTS, LengthView, Remaining, RemainingPolicy

TrueLength = Callable[[str], int]
"""Tokens of the whole output of a request, by its id."""

MEAN_OF_NORMAL = sqrt(2 / pi)
"""Mean |x| of a normal x, in deviations."""

_SCORES = tuple(NormalDist().inv_cdf((point + 0.5) / POINTS) for point in range(POINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Knows. The limit of what any prediction is worth."""

    length: TrueLength
    predicts: bool = True
    reads_states: bool = False

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        return (float(max(1, self.length(view.request_id) - view.output_tokens)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Erring:
    """Knows, but for an error, of every output that has begun: what is left times e^x, x normal with mean 0.

    It stands for a network that reads hidden states: of a request that waits there are none, so ``unseen``
    is asked. ``error`` is what such a network's error is measured as, mean |ln(actual ÷ predicted)|. That
    of a request is drawn from its id, and anew each time its output has doubled, as errors at tokens that
    are near each other are alike. It says how sure it is as a calibrated predictor would: its equally
    likely lengths scatter by as much.
    """

    length: TrueLength
    error: float
    unseen: RemainingPolicy
    seed: int = 0
    predicts: bool = True
    reads_states: bool = False

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        if view.output_tokens == 0:
            return self.unseen.remaining(view, now)
        left = max(1, self.length(view.request_id) - view.output_tokens)
        drawn = random.Random(f"{self.seed}/{view.request_id}/{view.output_tokens.bit_length()}")
        deviation = self.error / MEAN_OF_NORMAL
        middle = left * exp(drawn.gauss(0.0, deviation))
        return tuple(
            min(float(view.most_tokens), max(1.0, middle * exp(score * deviation))) for score in _SCORES
        )
