"""Policies that know what no real server can know. They show how much could be gained by better predictions.

``OraclePlacement`` knows the remaining work of each program. ``OraclePredictor`` knows the lengths of
outputs, and ``NoisyPredictor`` knows them with a random error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, pi, sqrt
from statistics import NormalDist

from sojourn_server.policies.forecasting.output_length_prediction import (
    QUANTILE_POINTS,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
)
from sojourn_server.policies.placement.placement_policy import WaitingKey
from sojourn_server.policies.placement.placement_views import ProgramActivity, ProgramTierView
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement

from .simulated_clients import ActiveProgram
from .workloads.program_plans import ProgramPlan

MIN_LEFT_S = 0.25
"""Minimum for a program's remaining seconds of service, so that its worth (``OraclePlacement``) is finite."""


class ProgramWork:
    """Seconds of service that active programs have left, computed from their plans. Service is the time of
    their requests on an engine, without waiting and tools."""

    def __init__(
        self, active: Mapping[str, ActiveProgram], turn_service_s: Callable[[ProgramPlan], Sequence[float]]
    ) -> None:
        """``turn_service_s`` returns, for each turn of a program, the seconds that the turn takes alone on an
        engine."""
        self._active = active
        self._turn_service_s = turn_service_s
        self._left_s: dict[str, list[float]] = {}
        """Program → for each turn, the seconds of service of this and all later turns."""
        self._total_s = 0.0

    @property
    def mean_s(self) -> float:
        """Mean total service of a program, in seconds, over the programs passed to ``left_s`` so far. 1
        before the first call of ``left_s``."""
        return self._total_s / len(self._left_s) if self._left_s else 1.0

    def left_s(self, program_id: str) -> float | None:
        """Seconds of service of the program's current turn and all later turns; ``None`` if the program is
        over."""
        active = self._active.get(program_id)
        if active is None:
            return None
        left_s = self._left_s.get(program_id)
        if left_s is None:
            left_s = list(accumulate(reversed(self._turn_service_s(active.plan))))[::-1]
            self._left_s[program_id] = left_s
            self._total_s += left_s[0]
        return max(MIN_LEFT_S, left_s[active.turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePlacement(ResidencyPricePlacement):
    """The placement policy of the preset ``sojourn``, with exact remaining work instead of predictions."""

    work: ProgramWork

    def worth(self, program: ProgramTierView) -> float:
        """Mean total service of a program (``ProgramWork.mean_s``) ÷ the service that ``program`` has left; 1
        if ``program`` is over."""
        left_s = self.work.left_s(program.program_id)
        return 1.0 if left_s is None else self.work.mean_s / left_s

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        """Sort key: ready programs (new or returning) come before programs that are not ready. Both groups
        are in ascending order of device blocks × service left."""
        left_s = self.work.left_s(program.program_id) or 0.0
        behind = program.activity is not ProgramActivity.READY
        order = self.device_blocks(program) * left_s
        return (int(behind), order, program.waiting_since_s, program.program_id)


TrueLengthLookup = Callable[[str], int]
"""Returns the total output tokens of a request, by its id."""

MEAN_ABSOLUTE_NORMAL = sqrt(2 / pi)
"""Mean of |x| ÷ standard deviation, for a normally distributed x with mean 0."""

_NORMAL_SCORES = tuple(
    NormalDist().inv_cdf((point + 0.5) / QUANTILE_POINTS) for point in range(QUANTILE_POINTS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePredictor:
    """Predicts the exact number of remaining output tokens. No other predictor can gain more."""

    length: TrueLengthLookup
    predicts: bool = True
    reads_hidden_states: bool = False

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        return (float(max(1, self.length(view.request_id) - view.output_tokens)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyPredictor:
    """Predicts the remaining tokens of a running output with a random error: the true number times e^x, for a
    normally distributed x with mean 0.

    The class models a predictor that reads hidden states. A request without output has no hidden states, so
    ``unseen`` predicts its length. ``error`` is the mean of |ln(actual ÷ predicted)|, the usual measure of
    such predictors. x is drawn with the request's id as seed, and drawn again each time the output has
    doubled in length. So errors at neighbouring tokens are correlated. The predicted quantiles have the same
    spread as the errors, as for a calibrated predictor.
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
