"""Outputs of simulated engines, and predictors that know their lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, pi, sqrt
from statistics import NormalDist

from sojourn_server.policies.forecasting.remaining_tokens import (
    QUANTILE_POINTS,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
)
from sojourn_server.programs.tool_call_parsers import ParsedToolCall
from sojourn_server.traces.trace_schema import TraceToolRun


class SimulatedOutputs:
    """Stands in for the adapter's ``ToolCallReader``: made-up tokens decode to nothing.

    It is asked when an output is complete, and then says what stands in it: which
    tools are called, not how long they will take.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[ParsedToolCall, ...]] = {}
        """By identity of the request's list of output tokens, which lives as long as the request."""

    def say(self, token_ids: Sequence[int], runs: Sequence[TraceToolRun]) -> None:
        """This output, once it is complete, will call these tools."""
        self._calls[id(token_ids)] = tuple(ParsedToolCall(run.name, run.cmd) for run in runs)

    def forget(self, token_ids: Sequence[int]) -> None:
        """Its request has left the engine."""
        self._calls.pop(id(token_ids), None)

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """The tool calls in an output."""
        return self._calls.get(id(token_ids), ())


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
