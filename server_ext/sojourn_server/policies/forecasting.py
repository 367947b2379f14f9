"""Forecasts: how far will a context grow; how many tokens will a request still generate (``output_length`` in
presets; Tetris §2.2); and when do blocks run out (``forecast``; Tetris §2.3)?

Time is counted in engine steps. A decoding request writes one token per step. Let a request have c context
tokens, and end after r further tokens. At step s < r it needs KV for c + s tokens. From step r on it needs
none. If several values of r are equally likely, the expected demand is the mean over them. A request without
a prediction counts with its present demand at every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, NamedTuple

from msgspec import Meta

from .policy_views import GrowthStatistics, ProgramGrowthView, RunningRequestView

MIN_TURNS_SEEN, MIN_PROGRAMS_SEEN = 16, 8
"""The mean growth per turn replaces the prior once this many turns were observed; the mean number of turns,
once this many programs have finished."""
PRIOR_TURNS = 11.0
"""Prior number of turns of a program: Continuum's SWE-bench workload has 10.9 (Table 3)."""
PRIOR_GROWTH = 0.3
"""Prior growth per turn as a share of the first prompt. With ``PRIOR_TURNS``, a context grows to about four
times its first prompt. In public agent traces, the medians of this factor are 2 to 6."""


def growth_reserve(reserve: float, calm_s: float, relax_s: float) -> float:
    """Return the share of expected growth to reserve, ``calm_s`` seconds after the last loss of KV (``inf``
    if never lost).

    Expected growth says how large contexts become, not that they are large at the same time. So nothing is
    reserved before the first loss. After each loss, the share falls linearly to 0 within ``relax_s`` seconds;
    ``inf``: it is always ``reserve``.
    """
    if math.isinf(relax_s):
        return reserve
    return reserve * max(0.0, 1.0 - max(0.0, calm_s) / relax_s)


def expected_growth_tokens(
    program: ProgramGrowthView,
    seen: GrowthStatistics,
    max_context_tokens: int,
    *,
    turns_ahead: float | None = None,
) -> float:
    """Return the tokens by which the program's context is expected to grow, at most up to
    ``max_context_tokens``.

    ``turns_ahead``: number of turns to look ahead. ``None``: until the program ends, at least one turn. Then
    a context that was longer before is expected to reach its former length again, since the program may run
    a shorter branch now, such as a sub-agent.
    """
    room = max(0, max_context_tokens - program.context_tokens)
    turns = seen.mean_turns if seen.observed_programs >= MIN_PROGRAMS_SEEN else PRIOR_TURNS
    prior = PRIOR_GROWTH * program.first_prompt_tokens
    per_turn = seen.mean_growth_tokens if seen.observed_turns >= MIN_TURNS_SEEN else prior
    if turns_ahead is not None:
        return min(turns_ahead * per_turn, room)
    back = max(0, program.peak_tokens - program.context_tokens)
    return min(max(back, max(1.0, turns - program.turns) * per_turn), room)


STEP_POINTS = (0, *(round(16 * 2 ** (quarter / 4)) for quarter in range(45)))
"""Steps from now at which demand is evaluated, up to 32,768.

A request that ends between two points counts only up to the earlier one. With short contexts, long outputs
and exact predictions the peak demand is 6 % too low; with the powers of two only, it would be 15 %.
"""


def needed_blocks(running: Iterable[RunningRequestView], block_size: float) -> list[float]:
    """Return the expected demand in blocks at each of ``STEP_POINTS``, in O(requests × remaining lengths).

    ``block_size``: tokens of context per block. Half a block is added per request, because on average half of
    its last block is unused.
    """
    # For each step point: the expected number of requests that end between this point and the next, and the
    # present tokens of these requests.
    ending_requests = [0.0] * len(STEP_POINTS)
    tokens = [0.0] * len(STEP_POINTS)
    for view in running:
        context = view.context_tokens + block_size / 2
        if not view.remaining:
            tokens[-1] += context  # not counted in ``ending_requests``, since the demand does not grow
            continue
        weight = 1.0 / len(view.remaining)
        for left in view.remaining:
            # A request is alive at a point if the request ends later.
            last = bisect_left(STEP_POINTS, left) - 1
            if last >= 0:
                ending_requests[last] += weight
                tokens[last] += weight * context
    needed = [0.0] * len(STEP_POINTS)
    alive = held = 0.0
    for index in range(len(STEP_POINTS) - 1, -1, -1):
        alive += ending_requests[index]
        held += tokens[index]
        needed[index] = (held + alive * STEP_POINTS[index]) / block_size
    return needed


def peak_demand_blocks(needed: Iterable[float], within: float) -> float:
    """Return the highest demand at any of ``STEP_POINTS`` up to ``within`` ≥ 0 steps from now."""
    return max(blocks for point, blocks in zip(STEP_POINTS, needed, strict=True) if point <= within)


class KvDemandView(NamedTuple):
    """Expected demand of the running requests."""

    needed_blocks: Sequence[float]
    """Demand at each of ``STEP_POINTS``."""
    available_blocks: int
    """Free blocks plus all blocks of the running requests. A shared block counts once for each request that
    uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortageForecastPolicy:
    """Predicts whether running requests soon run out of blocks. If so, the engine copies a likely victim's KV
    to host memory in advance, but preempts nothing. The base predicts nothing: a shortage is handled when it
    occurs."""

    is_used = False
    """Whether the policy is asked. If not, no KV is copied in advance."""

    def expects_shortage(self, demand: KvDemandView, now: float) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDemandForecast(ShortageForecastPolicy):
    """Predicts that expected demand exceeds the available blocks within ``steps`` steps."""

    steps: Annotated[int, Meta(ge=1)] = 128
    is_used = True

    def expects_shortage(self, demand: KvDemandView, now: float) -> bool:
        return peak_demand_blocks(demand.needed_blocks, self.steps) > demand.available_blocks


QUANTILE_POINTS = 8
"""Number of equally likely lengths in a prediction."""
MIN_OUTPUTS = 16
"""Minimum number of earlier output lengths (``OutputLengthView.lengths``) for a prediction."""
TAIL_SHARE, MIN_TAIL = 0.1, 4
"""The tail of the length distribution is estimated from this share of the outputs, the longest ones, and from
at least so many."""
MIN_ERROR = 0.001
"""Lower bound of a hint's assumed error, however exact earlier hints were."""

RemainingTokens = tuple[float, ...]
"""Equally likely numbers of tokens still to generate, ascending; at least one value, each ≥ 1."""


class OutputLengthView(NamedTuple):
    """A running request, as input of a policy that predicts how many tokens it will still generate."""

    request_id: str
    output_tokens: int
    """Output tokens so far."""
    most_tokens: int
    """Maximum number of further tokens: a limit, not an estimate."""
    lengths: Sequence[int] = ()
    """Lengths in tokens of finished outputs, ascending: those of the first of three groups that has enough.
    The groups: the same agent type after the same tool, the same agent type, all outputs."""
    hinted_tokens: int | None = None
    """Total output length in tokens that the client announced; ``None``: no hint."""
    hint_error: float | None = None
    """Mean |ln(actual ÷ hinted)| for the request's agent type; ``None``, here and below: too few samples."""
    network_prediction: RemainingTokens | None = None
    """Remaining tokens predicted by a network from hidden states: each value of its last prediction minus the
    tokens generated since then. Values that would be 0 or less are left out. ``None``: no prediction."""
    prediction_error: float | None = None
    """Error of the network's predictions of remaining tokens: mean |ln(actual ÷ predicted)|."""
    baseline_error: float | None = None
    """Error of predictions without the network, for the same outputs at the same positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingTokensPolicy:
    """Predicts how many tokens a request will still generate; ``None``, as the base answers: unknown."""

    predicts = False
    """Whether the policy is used. If not, it is never asked, and output lengths are not recorded."""
    reads_hidden_states = False
    """Whether the policy reads predictions made from the model's hidden states
    (``OutputLengthView.network_prediction``). If so, the engine must expose its hidden states."""

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        return None


_QUANTILE_SHARES = tuple((point + 0.5) / QUANTILE_POINTS for point in range(QUANTILE_POINTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalPrediction(RemainingTokensPolicy):
    """Predicts an output's length from the earlier outputs that were longer: P(length | length > so far).

    Let n of ``OutputLengthView.lengths`` exceed the output's length so far. The output is equally likely to
    end in each of the n + 1 intervals before, between and after these n lengths. Beyond the longest length, a
    power law applies, so the longer an output already is, the more tokens are expected. Hill's estimate gives
    the exponent from the longest outputs. There is no prediction before ``min_outputs`` finished outputs.

    With ``hints``, a client's hint replaces the prediction while hints for the agent type are more accurate
    than always predicting the median length. With too few finished outputs for a median, a hint also counts.
    """

    min_outputs: Annotated[int, Meta(ge=1)] = MIN_OUTPUTS
    hints: bool = True
    predicts = True

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        lengths, so_far = view.lengths, view.output_tokens
        known = len(lengths) >= self.min_outputs
        if self.hints and view.hinted_tokens is not None:
            by_hint = _remaining_from_hint(view, _median_log_error(lengths) if known else math.inf)
            if by_hint is not None:
                return by_hint
        if not known:
            return None
        ended = bisect_right(lengths, so_far)
        longer = len(lengths) - ended
        longest = max(so_far, lengths[-1])
        exponent = 0.0  # computed on demand, since it is rarely needed and slow
        left: list[float] = []
        for share in _QUANTILE_SHARES:
            # The length that this share of the longer outputs does not exceed.
            place = share * (longer + 1)
            gap = int(place)
            if gap == longer:
                exponent = exponent or tail_exponent(lengths)
                length = longest * (1 - (place - gap)) ** (-1 / exponent)
            else:
                begin, end = lengths[ended + gap - 1] if gap else so_far, lengths[ended + gap]
                length = begin + (end - begin) * (place - gap)
            left.append(clamp_remaining(length - so_far, view))
        return tuple(left)


def tail_exponent(lengths: Sequence[int]) -> float:
    """Return α of P(length > x) ~ x^-α, by Hill's estimate from the longest of ``lengths``, ascending.

    α is limited to 1 to 8: a heavier tail has no mean, a lighter one is no power law."""
    count = min(len(lengths) - 1, max(MIN_TAIL, round(len(lengths) * TAIL_SHARE)))
    if count < 2:
        return 1.0
    edge = lengths[-count - 1]
    # The mean of ln(length / edge) with one logarithm instead of fifty: integer products are exact.
    spread = math.log(math.prod(lengths[-count:])) / count - math.log(edge)
    return min(8.0, max(1.0, 1 / spread)) if spread > 0 else 8.0


def _remaining_from_hint(view: OutputLengthView, error_without_hint: float) -> RemainingTokens | None:
    """Return the remaining tokens by the client's hint, with the spread of earlier hints' errors.

    ``None``: there is no hint, too few earlier hints were checked, the error of earlier hints is not below
    ``error_without_hint``, or the output is already much longer than hinted.
    """
    hinted, error, so_far = view.hinted_tokens, view.hint_error, view.output_tokens
    if hinted is None or hinted < 1 or error is None or not error < error_without_hint:
        return None
    # Mean |x| of a normal distribution is 0.8 of its deviation.
    by_hint = NormalDist(math.log(hinted), max(error / 0.8, MIN_ERROR))
    ended = by_hint.cdf(math.log(so_far)) if so_far > 0 else 0.0
    left = 1.0 - ended
    if left < 0.5 / QUANTILE_POINTS:
        return None  # longer than the longest output that the hint makes plausible
    longest = math.log(max(1, so_far + view.most_tokens))
    return tuple(
        clamp_remaining(math.exp(min(longest, by_hint.inv_cdf(ended + left * share))) - so_far, view)
        for share in _QUANTILE_SHARES
    )


def _median_log_error(lengths: Sequence[int]) -> float:
    """Return the error of always predicting the median: mean |ln(length ÷ median)|, over about 100 of the
    lengths."""
    stride = max(1, len(lengths) // 100)
    some = lengths[stride // 2 :: stride]
    middle = lengths[len(lengths) // 2]
    return math.fsum(abs(math.log(length / middle)) for length in some) / len(some)


def clamp_remaining(tokens: float, view: OutputLengthView) -> float:
    """Limit a prediction to at least one token, and at most the tokens that the request may still
    generate."""
    return max(1.0, min(tokens, float(view.most_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStatePrediction(SurvivalPrediction):
    """Uses a neural network's predictions while they are more accurate than ``SurvivalPrediction``.

    If ``SurvivalPrediction`` has none, the network's is used as soon as the network's error is known. So a
    network that has learned nothing, gets bad input or is out of date does no harm.
    """

    reads_hidden_states = True

    def remaining(self, view: OutputLengthView, now: float) -> RemainingTokens | None:
        known = SurvivalPrediction.remaining(self, view, now)
        error, baseline = view.prediction_error, view.baseline_error
        if not view.network_prediction or error is None:
            return known
        if known is not None and (baseline is None or error >= baseline):
            return known
        return tuple(clamp_remaining(tokens, view) for tokens in view.network_prediction)
