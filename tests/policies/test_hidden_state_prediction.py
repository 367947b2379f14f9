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
from sojourn_server.policies.preset import load_preset, parse_preset

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


@pytest.mark.parametrize(("most", "bounded"), [(45, (10, 20, 30, 40, 45, 45, 45, 45)), (1, (1,) * 8)])
def test_no_guess_exceeds_what_may_be_written(most: int, bounded: tuple[float, ...]) -> None:
    assert HiddenStatePrediction().remaining(ASKED._replace(most_tokens=most), 0.0) == bounded


def test_every_guess_is_of_the_next_token_at_least() -> None:
    assert HiddenStatePrediction().remaining(ASKED._replace(network_prediction=(0.1, 0.9, 3.0)), 0.0) == (
        1.0,
        1.0,
        3.0,
    )


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


@given(views, st.lists(st.floats(1, 1e6), min_size=1, max_size=8).map(sorted), offs, offs)
def test_whatever_it_answers_is_in_order_and_in_bounds(
    view: OutputLengthView, guess: list[float], prediction_error: float, baseline_error: float
) -> None:
    left = HiddenStatePrediction().remaining(
        view._replace(
            network_prediction=tuple(guess), prediction_error=prediction_error, baseline_error=baseline_error
        ),
        0.0,
    )
    if left is not None:
        assert list(left) == sorted(left)
        assert all(1.0 <= tokens <= view.most_tokens for tokens in left)


def test_its_options_are_those_of_survival() -> None:
    preset = parse_preset(
        'extends = "tetris"\noutput_length = { policy = "hidden-states", hints = false, min_outputs = 3 }',
        source="x",
    )
    assert preset.output_length == HiddenStatePrediction(hints=False, min_outputs=3)


def test_the_preset_differs_from_tetris_in_that_alone() -> None:
    from sojourn_server.policies.preset import POLICY_CLASSES

    learned, base = load_preset("tetris-learned"), load_preset("tetris")
    assert (learned.output_length, base.output_length) == (HiddenStatePrediction(), SurvivalPrediction())
    assert (learned.output_length.reads_hidden_states, base.output_length.reads_hidden_states) == (
        True,
        False,
    )
    for question in POLICY_CLASSES.keys() - {"output_length"}:
        assert getattr(learned, question) == getattr(base, question)
