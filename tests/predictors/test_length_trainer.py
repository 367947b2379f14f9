"""The trainer learns lengths from hidden states, forgets ended requests, and survives invalid input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from sojourn_server.policies.forecasting import OutputLengthView, SurvivalPrediction

torch = pytest.importorskip("torch")

from hidden_state_workload import HIDDEN, POINTS, Output, off, outputs, teach  # noqa: E402
from sojourn_server.predictors.length_trainer import (  # noqa: E402
    BATCH_SIZE,
    MIN_EXAMPLES,
    LengthTrainer,
)

HELD_BACK = list(outputs(60, seed=1000))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taught(count: int = 120, *, seed: int = 0) -> LengthTrainer:
    made = LengthTrainer(HIDDEN, seed=seed)
    for output in outputs(count, seed=5):
        teach(made, output)
    return made


@pytest.fixture(scope="module")
def ready() -> LengthTrainer:
    """Shared by tests, which may only change its running outputs."""
    return taught()


def off_without_states(held_back: list[Output]) -> float:
    """Of one that knows only how long outputs are, and what this one has written."""
    lengths = sorted(output.tokens for output in outputs(150, seed=5))
    errors = []
    for output in held_back:
        for written in output.written:
            known = SurvivalPrediction(min_outputs=1).remaining(
                OutputLengthView("r", written, 10**6, lengths), 0.0
            )
            assert known is not None
            errors.append(abs(math.log((output.tokens - written) / known[POINTS // 2])))
    return sum(errors) / len(errors)


def state(seed: int = 0, rows: int = 1, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))


# -- what it learns -----------------------------------------------------------------------------


def test_it_guesses_outputs_that_were_held_back_far_better_than_lengths_alone_do(
    ready: LengthTrainer,
) -> None:
    assert off(ready, HELD_BACK) < 0.6 * off_without_states(HELD_BACK)


def test_it_says_nothing_before_it_has_learned_anything() -> None:
    fresh = LengthTrainer(HIDDEN)
    said = []
    for output in outputs(60, seed=5):
        said.append(bool(fresh.observe_and_predict([("asked", 0)], state(), POINTS)))
        fresh.ended("asked", None)
        teach(fresh, output)
    first = said.index(True)
    assert first > 10
    assert all(said[first:])
    assert fresh.batches * BATCH_SIZE >= MIN_EXAMPLES


def test_outputs_that_were_broken_off_or_are_unknown_teach_nothing() -> None:
    made = LengthTrainer(HIDDEN)
    made.observe_and_predict([("a", 1), ("b", 1)], state(rows=2), POINTS)
    made.ended("a", None)
    made.ended("a", 100)
    made.ended("unknown", 100)
    made.ended("unknown", None)
    assert made.examples == 0
    made.ended("b", 100)
    assert made.examples == 1


# -- what makes no sense --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_are_skipped_and_counted_and_change_no_other_prediction(
    ready: LengthTrainer, value: float
) -> None:
    skipped = ready.skipped
    whole = ready.observe_and_predict([("a", 0), ("b", 3)], state(rows=2), POINTS)
    spoilt = torch.cat([state(rows=2)[:1], torch.full((1, HIDDEN), 0.5), state(rows=2)[1:]])
    spoilt[1, 7] = value
    seen = ready.observe_and_predict([("a", 0), ("bad", 9), ("b", 3)], spoilt, POINTS)
    assert seen.keys() == {"a", "b"}
    for name, guess in whole.items():
        assert seen[name] == pytest.approx(guess, rel=1e-4)
    assert ready.skipped == skipped + 1
    assert "bad" not in ready._running
    assert ready.observe_and_predict([("bad", 9)], spoilt[1:2], POINTS) == {}
    for name in ("a", "b"):
        ready.ended(name, None)


def test_weights_that_are_no_numbers_any_more_begin_anew_and_learn_again() -> None:
    made = taught()
    before = off(made, HELD_BACK)
    with torch.no_grad():
        made.network.first.weight[0, 0] = math.nan
    random_numbers = torch.get_rng_state()
    assert made.observe_and_predict([("a", 0)], state(), POINTS) == {}, "no guess rather than nonsense"
    assert made.observe_and_predict([("a", 0)], state(), POINTS) == {}
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert all(bool(torch.isfinite(p).all()) for p in made.network.parameters())
    while made.train() is not None:  # on the examples that it still has
        pass
    assert off(made, HELD_BACK) < 1.3 * before


# -- chance -----------------------------------------------------------------------------------------


def test_the_same_seed_learns_the_same_and_no_random_number_of_the_engines_is_taken() -> None:
    before = torch.get_rng_state()
    one, same, other = taught(40), taught(40), taught(40, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    guesses = [made.observe_and_predict([("a", 0)], state(), POINTS)["a"] for made in (one, same, other)]
    assert guesses[0] == guesses[1] != guesses[2]
