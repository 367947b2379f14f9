"""A network's guess counts where it has been closer to the mark, and nowhere else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.forecasting import (
    MIN_OUTPUTS,
    HiddenStatePrediction,
    OutputLengthView,
    SurvivalPrediction,
)

GUESS = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0)
KNOWN = OutputLengthView("r", 5, 10_000, tuple(range(100, 150)))
ASKED = KNOWN._replace(network_prediction=GUESS, prediction_error=0.3, baseline_error=0.5)

views = st.builds(
    OutputLengthView,
    st.just("r"),
    st.integers(0, 3000),
    st.integers(1, 5000),
    st.lists(st.integers(1, 4000), max_size=60).map(lambda lengths: tuple(sorted(lengths))),
    st.none() | st.integers(1, 4000),
    st.none() | st.floats(0, 3),
    st.none(),
    st.none(),
    st.none(),
)
offs = st.none() | st.floats(0, 5)


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


@given(views, offs, offs)
def test_without_a_guess_or_a_record_it_is_survival(
    view: OutputLengthView, prediction_error: float, baseline_error: float
) -> None:
    known = SurvivalPrediction().remaining(view, 0.0)
    asked = view._replace(prediction_error=prediction_error, baseline_error=baseline_error)
    assert HiddenStatePrediction().remaining(asked, 0.0) == known
    assert (
        HiddenStatePrediction().remaining(
            view._replace(network_prediction=GUESS, baseline_error=baseline_error), 0.0
        )
        == known
    )
