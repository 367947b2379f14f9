"""Tool calls in simulated outputs, and predictors that know the lengths of outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, pi, sqrt
from statistics import NormalDist

from sojourn_server.policies.forecasting.output_length_prediction import (
    QUANTILE_POINTS,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
)
from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.traces.trace_schema import TraceToolRun


class SimulatedOutputs:
    """Tool calls of simulated outputs, without the tools' durations. Replaces the adapter's
    ``ToolCallReader``, because simulated tokens cannot be decoded to text."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[ParsedToolCall, ...]] = {}
        """``id()`` of a request's list of output tokens → tool calls of the output. The list lives as long as
        the request."""

    def set_calls(self, token_ids: Sequence[int], runs: Sequence[TraceToolRun]) -> None:
        """Set the tool calls of an output."""
        self._calls[id(token_ids)] = tuple(ParsedToolCall(run.name, run.cmd) for run in runs)

    def forget(self, token_ids: Sequence[int]) -> None:
        """Remove the tool calls of an output whose request has left the engine."""
        self._calls.pop(id(token_ids), None)

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """The tool calls of an output."""
        return self._calls.get(id(token_ids), ())


TrueLengthLookup = Callable[[str], int]
"""Returns the total output tokens of a request, by its id."""

MEAN_ABSOLUTE_NORMAL = sqrt(2 / pi)
"""Mean of |x| ÷ standard deviation, for a normally distributed x with mean 0."""

_NORMAL_SCORES = tuple(
    NormalDist().inv_cdf((point + 0.5) / QUANTILE_POINTS) for point in range(QUANTILE_POINTS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePredictor:
    """Predictor that knows exact lengths, to find the upper bound of what predictions can gain."""

    length: TrueLengthLookup
    predicts: bool = True
    reads_hidden_states: bool = False

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        return (float(max(1, self.length(view.request_id) - view.output_tokens)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyPredictor:
    """Predicts the remaining tokens of a running output as the true number times e^x, x normal with mean 0.

    The class models a predictor that reads hidden states. A request without output has no hidden states, so
    ``unseen`` predicts its length. ``error`` is the mean |ln(actual ÷ predicted)|, the usual measure of such
    predictors. A request's x depends on its id, and is drawn again each time the output has doubled in
    length, so errors at neighbouring tokens are correlated. The predicted quantiles have the same spread as
    the errors, as for a calibrated predictor.
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
