"""Cost of an engine step: a weighted sum of its work. ``profiling/cost_fitting.py`` fits it to an engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

MAX_FLOAT = sys.float_info.max
Cost = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
"""A finite number ≥ 0."""


class StepSample(NamedTuple):
    """One measurement: sums over ``steps`` engine steps, and the seconds that these steps took together.

    In one step, a request that computes n tokens after c cached tokens adds n·c + n·(n+1)/2 attention pairs
    and reads the KV of c + n tokens.
    """

    seconds: Cost
    steps: Cost
    tokens: Cost
    attention_pairs: Cost
    kv_tokens_read: Cost
    requests: Cost
    """Sum over the steps, so a request in two steps counts twice."""
    calls: Cost = 0.0
    """1 if the sample is a time to first token over HTTP, which includes the API server's share; else 0."""


class StepCosts(NamedTuple):
    """Fitted costs: seconds = step_s·steps + token_s·tokens + pair_s·attention_pairs +
    kv_token_s·kv_tokens_read + request_s·requests + call_s·calls."""

    step_s: Cost
    token_s: Cost
    pair_s: Cost
    kv_token_s: Cost
    request_s: Cost
    call_s: Cost = 0.0
    """Seconds that the API server adds to each time to first token, outside of engine steps."""

    def seconds(self, sample: StepSample) -> float:
        """Return the seconds that these costs predict for a sample."""
        return math.fsum(cost * amount for cost, amount in zip(self, sample[1:], strict=True))

    def chunk_s(self, cached: int, new: int) -> float:
        """Return the seconds that computing ``new`` tokens of a request after ``cached`` ones adds to a step,
        without the costs of the step and the request."""
        pairs = new * (cached + (new + 1) / 2)
        return self.pair_s * pairs + self.kv_token_s * (cached + new) + self.token_s * new

    def relative_deviation(self, sample: StepSample) -> float:
        """Return (fitted - measured) / max(fitted, measured) of a sample, -1 to 1."""
        fitted = self.seconds(sample)
        return (fitted - sample.seconds) / max(fitted, sample.seconds)

    def relative_error(self, samples: Sequence[StepSample]) -> float:
        """Return the root mean square of (fitted - measured) / max(fitted, measured), 0 to 1; 0.0 without
        samples."""
        squares = math.fsum(self.relative_deviation(sample) ** 2 for sample in samples)
        return math.sqrt(squares / max(1, len(samples)))
