"""What a request will yet write: against a naive reference, and against outputs that were held back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.forecasting import (
    MIN_OUTPUTS,
    QUANTILE_POINTS,
    HiddenStatePrediction,
    OutputLengthView,
    RemainingTokens,
    RemainingTokensPolicy,
    SurvivalPrediction,
    tail_exponent,
)

ENOUGH = 10**12
SHARES = [(point + 0.5) / QUANTILE_POINTS for point in range(QUANTILE_POINTS)]
"""Of outputs that come so far, how many each point of a prediction should exceed."""


def asked(
    policy: RemainingTokensPolicy, lengths: Sequence[int], so_far: int, most: int = ENOUGH, **facts: Any
) -> RemainingTokens:
    """A prediction that there must be."""
    return policy.remaining(OutputLengthView("r", so_far, most, lengths, **facts), 0.0)  # type: ignore[return-value]


def lognormal(random: Random) -> int:
    return math.ceil(random.lognormvariate(math.log(300), 1.0))


def pareto(alpha: float) -> Callable[[Random], int]:
    return lambda random: math.ceil(100 * random.paretovariate(alpha))


def bimodal(random: Random) -> int:
    """A tool call as often as an essay."""
    return math.ceil(random.choice((20, 2000)) * random.lognormvariate(0, 0.2))


def sample(draw: Callable[[Random], int], random: Random, number: int = 500) -> list[int]:
    return sorted(draw(random) for _ in range(number))


# -- no prediction, and the mean -----------------------------------------------------------------


@pytest.mark.parametrize("policy", [SurvivalPrediction(), SurvivalPrediction(hints=False)])
def test_no_prediction_for_a_type_with_few_samples(policy: RemainingTokensPolicy) -> None:
    few = OutputLengthView("r", 0, 100, [50] * (MIN_OUTPUTS - 1))
    assert policy.remaining(few, 0.0) is None
    assert policy.remaining(few._replace(lengths=()), 0.0) is None
    assert policy.remaining(few._replace(lengths=[50] * MIN_OUTPUTS), 0.0) is not None


# -- conditional quantiles --------------------------------------------------------------------------


def naive(lengths: Sequence[int], so_far: int, most: int) -> list[float]:
    """Sort those that came so far and count: of n, each of n + 1 gaps has the same chance."""
    came = sorted(length for length in lengths if length > so_far)
    left = []
    for point in range(QUANTILE_POINTS):
        place = Fraction(2 * point + 1, 2 * QUANTILE_POINTS) * (len(came) + 1)
        gap, within = divmod(place, 1)
        if gap == len(came):
            exponent = tail_exponent(sorted(lengths))
            end = max([so_far, *lengths]) * float(1 - within) ** (-1 / exponent)
        else:
            begin, end = [so_far, *came][gap : gap + 2]
            end = float(begin + (end - begin) * within)
        left.append(max(1.0, min(end - so_far, most)))
    return left


lengths = st.lists(st.integers(1, 60) | st.integers(1, 10**5), min_size=1, max_size=80).map(sorted)


@given(lengths=lengths, so_far=st.integers(0, 70) | st.integers(0, 10**6), most=st.integers(1, 10**6))
def test_points_are_those_of_one_that_sorts_and_counts(lengths: list[int], so_far: int, most: int) -> None:
    points = asked(SurvivalPrediction(min_outputs=1), lengths, so_far, most)
    assert len(points) == QUANTILE_POINTS
    assert points == pytest.approx(naive(lengths, so_far, most), rel=1e-9)
    assert all(1.0 <= point <= most for point in points)


# -- the tail -----------------------------------------------------------------------------------------


def test_the_exponent_of_a_tail_is_found_again() -> None:
    for alpha in (1.5, 2.0, 3.0, 5.0):
        found = [tail_exponent(sample(pareto(alpha), Random(seed))) for seed in range(30)]
        assert fmean(found) == pytest.approx(alpha, rel=0.1)


# -- hints --------------------------------------------------------------------------------------------

SEEN = sample(bimodal, Random(7))
"""Without hints."""
UNHINTED = SurvivalPrediction(hints=False)


@pytest.mark.parametrize("off", [None, 3.0, 1e300, math.inf, math.nan])
def test_a_hint_that_says_less_than_what_is_known_anyway_is_ignored(off: float | None) -> None:
    assert asked(SurvivalPrediction(), SEEN, 30, hinted_tokens=700, hint_error=off) == asked(
        UNHINTED, SEEN, 30
    )


def test_a_hint_is_all_there_is_where_the_kind_is_hardly_known() -> None:
    for few in ([], [90], [90, 100] * 7):
        assert median(
            asked(SurvivalPrediction(), few, 0, hinted_tokens=700, hint_error=2.0)
        ) == pytest.approx(700, rel=0.3)
    unknown = OutputLengthView("r", 0, ENOUGH, hinted_tokens=700)
    assert SurvivalPrediction().remaining(unknown, 0.0) is None, (
        "but not for an agent type whose hints were wrong"
    )


def test_a_hint_that_was_outgrown_is_refuted_but_not_by_a_token() -> None:
    hint = {"hinted_tokens": 700, "hint_error": 0.08}
    for so_far in (690, 700, 720):
        points = asked(SurvivalPrediction(), SEEN, so_far, **hint)
        assert 1.0 <= points[0] <= points[-1] < 300, "a little longer than it said, like others before it"
    for so_far in (900, 5000, 10**9):
        assert asked(SurvivalPrediction(), SEEN, so_far, **hint) == asked(UNHINTED, SEEN, so_far)


# -- against outputs that were held back ----------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [lognormal, pareto(2.0), pareto(1.2)], ids=["lognormal", "pareto 2", "pareto 1.2"]
)
@pytest.mark.parametrize(("reach", "within"), [(0.0, 0.02), (0.5, 0.02), (0.9, 0.03), (0.99, 0.08)])
def test_an_output_ends_by_each_point_as_often_as_it_should(
    draw: Callable[[Random], int], reach: float, within: float
) -> None:
    """Of outputs that were held back and came as far as ``reach`` of all, so many end by each point of what
    the others let one expect."""
    ended, came = [0] * QUANTILE_POINTS, 0
    for seed in range(60):
        random = Random(seed)
        seen, held_back = sample(draw, random), sample(draw, random)
        so_far = sorted(seen + held_back)[int(reach * 1000)] if reach else 0
        points = asked(UNHINTED, seen, so_far)
        for length in held_back:
            if length > so_far:
                came += 1
                for index, point in enumerate(points):
                    ended[index] += length - so_far <= point
    assert [number / came for number in ended] == pytest.approx(SHARES, abs=within)


@pytest.mark.parametrize("off", [0.1, 0.4])
@pytest.mark.parametrize("so_far", [0, 300, 600, 690, 700])
def test_an_output_that_was_hinted_ends_by_each_point_as_often_as_it_should(off: float, so_far: int) -> None:
    """Also where it has come about as far as it said: only those are left then that are longer."""
    random = Random(3)
    scale = off / math.sqrt(2 / math.pi)
    lengths = [700 * random.lognormvariate(0, scale) for _ in range(20_000)]
    points = asked(SurvivalPrediction(), SEEN, so_far, hinted_tokens=700, hint_error=off)
    came = [length - so_far for length in lengths if length > so_far]
    shares = [sum(left <= point for left in came) / len(came) for point in points]
    assert shares == pytest.approx(SHARES, abs=0.03)


# -- a network's guess -----------------------------------------------------------------------------


GUESS = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0)
KNOWN = OutputLengthView("r", 5, 10_000, tuple(range(100, 150)))
ASKED = KNOWN._replace(network_prediction=GUESS, prediction_error=0.3, baseline_error=0.5)


def test_the_guess_of_a_network_that_was_closer_is_taken() -> None:
    assert HiddenStatePrediction().remaining(ASKED, 0.0) == GUESS


@pytest.mark.parametrize(
    "view",
    [
        ASKED._replace(baseline_error=0.2),
        ASKED._replace(baseline_error=0.3),
        ASKED._replace(prediction_error=math.inf),
        ASKED._replace(prediction_error=None, baseline_error=None),
        ASKED._replace(baseline_error=None),
        ASKED._replace(network_prediction=None),
    ],
    ids=["further off", "as far off", "endlessly off", "no record", "half a record", "no guess"],
)
def test_else_it_is_what_is_known_without(view: OutputLengthView) -> None:
    assert HiddenStatePrediction().remaining(view, 0.0) == SurvivalPrediction().remaining(KNOWN, 0.0)


def test_where_nothing_else_is_known_a_guess_with_a_record_is_taken() -> None:
    few = ASKED._replace(lengths=KNOWN.lengths[: MIN_OUTPUTS - 1])
    assert HiddenStatePrediction().remaining(few, 0.0) == GUESS
    assert HiddenStatePrediction().remaining(few._replace(baseline_error=0.01), 0.0) == GUESS, (
        "there is nothing beside it"
    )
    assert HiddenStatePrediction().remaining(few._replace(prediction_error=None), 0.0) is None
