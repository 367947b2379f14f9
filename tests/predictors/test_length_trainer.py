"""The trainer learns lengths from hidden states, forgets ended requests, and survives invalid input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest
from sojourn_server.policies.forecasting.output_length_prediction import OutputLengthView, SurvivalPrediction

torch = pytest.importorskip("torch")

from hidden_state_workload import HIDDEN, LENGTHS, POINTS, Output, off, outputs, teach  # noqa: E402
from sojourn_server.predictors import length_trainer as student_module  # noqa: E402
from sojourn_server.predictors.length_network import bin_of  # noqa: E402
from sojourn_server.predictors.length_trainer import (  # noqa: E402
    BATCH_SIZE,
    MAX_STATES_PER_REQUEST,
    MEAN_EXAMPLE_USES,
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


def taught(count: int = 120, *, seed: int = 0, **load: object) -> LengthTrainer:
    made = LengthTrainer(HIDDEN, seed=seed)
    for output in outputs(count, seed=5, **load):  # type: ignore[arg-type]
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


def test_at_the_first_token_it_distinguishes_an_answer_from_an_essay(ready: LengthTrainer) -> None:
    """There what was written says nothing, and lengths alone can only say something between."""
    for output in HELD_BACK:
        guesses = ready.observe_and_predict([(output.request_id, 0)], output.states[:1], POINTS)[
            output.request_id
        ]
        ready.output_aborted(output.request_id)
        assert len(guesses) == POINTS
        assert list(guesses) == sorted(guesses)
        kind = min(LENGTHS, key=lambda length: abs(math.log(length / output.tokens)))
        assert guesses[POINTS // 2] == pytest.approx(kind, rel=1.0), "not by a hundred times"


def test_it_says_nothing_before_it_has_learned_anything() -> None:
    fresh = LengthTrainer(HIDDEN)
    said = []
    for output in outputs(60, seed=5):
        said.append(bool(fresh.observe_and_predict([("asked", 0)], state(), POINTS)))
        fresh.output_aborted("asked")
        teach(fresh, output)
    first = said.index(True)
    assert first > 10
    assert all(said[first:])
    assert fresh.batches * BATCH_SIZE >= MIN_EXAMPLES


def test_an_example_is_used_so_often_and_no_more(ready: LengthTrainer) -> None:
    assert ready.batches * BATCH_SIZE == pytest.approx(ready.examples * MEAN_EXAMPLE_USES, rel=0.01)
    assert not ready.due
    assert ready.train() is None


def test_what_it_takes_in_is_what_was_left() -> None:
    made = LengthTrainer(HIDDEN)
    made.observe_and_predict([("a", 3), ("b", 0)], state(rows=2), POINTS)
    made.observe_and_predict([("a", 40)], state(1), POINTS)
    made.ended("a", 50)
    assert made.examples == 2
    assert made._written[:2].tolist() == [3, 40]
    assert made._bins[:2].tolist() == bin_of(torch.tensor([47, 10])).tolist()
    assert torch.equal(made._states[:2], torch.cat([state(rows=2)[:1], state(1)]))


def test_a_state_from_beyond_the_end_is_no_example() -> None:
    """A step that was under way when the output ended may have looked at what was thrown away."""
    made = LengthTrainer(HIDDEN)
    made.observe_and_predict([("a", 5), ("b", 7)], state(rows=2), POINTS)
    made.ended("a", 5)
    assert made.examples == 0
    made.ended("b", 8)
    assert made.examples == 1


def test_outputs_that_were_broken_off_or_are_unknown_teach_nothing() -> None:
    made = LengthTrainer(HIDDEN)
    made.observe_and_predict([("a", 1), ("b", 1)], state(rows=2), POINTS)
    made.output_aborted("a")
    made.ended("a", 100)
    made.ended("unknown", 100)
    made.output_aborted("unknown")
    assert made.examples == 0
    made.ended("b", 100)
    assert made.examples == 1


def test_a_load_that_changes_is_learned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_module, "MAX_EXAMPLES_BYTES", 4 * HIDDEN * 600)
    changed = list(outputs(60, seed=1000, flipped=True))
    made = taught(130)
    assert made.kept == 600
    before, wrong = off(made, HELD_BACK), off(made, changed)
    assert wrong > 3 * before
    for output in outputs(130, seed=6, flipped=True):
        teach(made, output)
    assert off(made, changed) < 1.5 * before


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
        ready.output_aborted(name)


@pytest.mark.parametrize("shape", [(1, HIDDEN), (3, HIDDEN), (2, HIDDEN + 1), (2,), (2, HIDDEN, 1)])
def test_states_of_another_shape_are_refused_by_name(ready: LengthTrainer, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"hidden states of shape \(.*\); expected \(2, 48\)"):
        ready.observe_and_predict([("a", 0), ("b", 3)], torch.zeros(shape), POINTS)
    assert not ready._running


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_models_own_precision_is_taken(ready: LengthTrainer, dtype: torch.dtype) -> None:
    exact = ready.observe_and_predict([("a", 0)], state(), POINTS)["a"]
    assert ready.observe_and_predict([("a", 0)], state().to(dtype), POINTS)["a"] == pytest.approx(
        exact, rel=0.1
    )
    ready.output_aborted("a")


def test_what_was_seen_may_be_overwritten_by_its_owner() -> None:
    made = LengthTrainer(HIDDEN)
    states = state()
    made.observe_and_predict([("a", 0)], states, POINTS)
    states.zero_()
    made.ended("a", 9)
    assert torch.equal(made._states[:1], state())


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


def test_a_training_step_with_nan_weights_reports_no_loss() -> None:
    made = taught(40)
    for output in islice(outputs(40, seed=6), 10):
        made.observe_and_predict([(output.request_id, 0)], output.states[:1], POINTS)
        made.ended(output.request_id, output.tokens)
    with torch.no_grad():
        made.network.last.bias[0] = math.nan
    assert made.due
    assert made.train() is None
    assert made.batches == 0
    loss = made.train()
    assert loss is not None
    assert math.isfinite(loss)


# -- what it holds ----------------------------------------------------------------------------------


def test_of_more_outputs_than_it_remembers_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_module, "MAX_REQUESTS", 10)
    made = LengthTrainer(HIDDEN)
    for number in range(25):
        made.observe_and_predict([(f"r{number}", 0)], state(number), POINTS)
    assert list(made._running) == [f"r{number}" for number in range(15, 25)]
    for number in range(25):
        made.ended(f"r{number}", 9)
    assert made.examples == 10
    assert not made._running


def test_of_a_long_output_a_sample_is_kept_of_all_of_it() -> None:
    made = LengthTrainer(HIDDEN)
    kept: list[int] = []
    for number in range(40):
        for written in range(200):
            made.observe_and_predict(
                [(f"r{number}", written)], torch.full((1, HIDDEN), float(written)), POINTS
            )
        output = made._running[f"r{number}"]
        assert len(output.states) == MAX_STATES_PER_REQUEST
        assert [int(each[0]) for each in output.states] == output.written
        kept += output.written
    assert sum(kept) / len(kept) == pytest.approx(99.5, abs=10)
    thirds = [sum(low <= written < low + 67 for written in kept) for low in (0, 67, 134)]
    assert min(thirds) > 0.7 * len(kept) / 3


def test_the_newest_examples_take_the_place_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_module, "MAX_EXAMPLES_BYTES", 4 * HIDDEN * 100)
    made = LengthTrainer(HIDDEN)
    for number in range(130):
        made.observe_and_predict([(f"r{number}", number)], state(number), POINTS)
        made.ended(f"r{number}", 1000)
    assert (made.kept, made.examples) == (100, 130)
    assert sorted(made._written.tolist()) == list(range(30, 130))
    place = made._written.tolist().index(129)
    assert torch.equal(made._states[place], state(129)[0])


@pytest.mark.parametrize("hidden", [48, 8192, 100_000])
def test_examples_take_so_much_memory_and_no_more(hidden: int) -> None:
    made = LengthTrainer(hidden)
    size = made._states.numel() * 4
    assert size <= max(student_module.MAX_EXAMPLES_BYTES, BATCH_SIZE * 4 * hidden)
    assert len(made._states) <= student_module.MAX_EXAMPLES


# -- chance -----------------------------------------------------------------------------------------


def test_the_same_seed_learns_the_same_and_no_random_number_of_the_engines_is_taken() -> None:
    before = torch.get_rng_state()
    one, same, other = taught(40), taught(40), taught(40, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    guesses = [made.observe_and_predict([("a", 0)], state(), POINTS)["a"] for made in (one, same, other)]
    assert guesses[0] == guesses[1] != guesses[2]
