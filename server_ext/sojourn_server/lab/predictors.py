"""Predictors that only the lab can have: one knows how long each output will be, one errs as it is told.

Policies like any other (``policy.remaining``), but for the truth that they are
handed: what a predictor is worth at best, and what one with a measured error would be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from ..policy.remaining import POINTS, LengthView, Remaining

TrueLength = Callable[[str], int]
"""Tokens of the whole output of a request, by its id."""

_SCORES = tuple(NormalDist().inv_cdf((point + 0.5) / POINTS) for point in range(POINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Knows. The limit of what any prediction is worth."""

    length: TrueLength
    predicts: bool = True

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        return (float(max(1, self.length(view.request_id) - view.output_tokens)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Erring:
    """Knows, but for an error: what is left times e^x, x normal with mean 0 and standard deviation ``error``.

    The error of a request is drawn from its id and drawn anew each time its output has doubled, as the
    errors of a predictor that sees each token are alike for tokens that are near each other. It says
    how sure it is as a calibrated predictor would: its equally likely lengths scatter by ``error``.
    """

    length: TrueLength
    error: float
    seed: int = 0
    predicts: bool = True

    def remaining(self, view: LengthView, now: float) -> Remaining | None:
        left = max(1, self.length(view.request_id) - view.output_tokens)
        drawn = random.Random(f"{self.seed}/{view.request_id}/{view.output_tokens.bit_length()}")
        middle = left * exp(drawn.gauss(0.0, self.error))
        return tuple(
            min(float(view.most_tokens), max(1.0, middle * exp(score * self.error))) for score in _SCORES
        )
