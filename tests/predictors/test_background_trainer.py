"""The trainer thread: the engine never waits for it, its share is bounded, and it fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

torch = pytest.importorskip("torch")

from hidden_state_workload import HIDDEN, POINTS, outputs  # noqa: E402
from sojourn_server.predictors import background_trainer as background_module  # noqa: E402
from sojourn_server.predictors.background_trainer import (  # noqa: E402
    MAX_QUEUED_MESSAGES,
    BackgroundTrainer,
    LengthPrediction,
)
from sojourn_server.predictors.length_network import LengthNetwork, load_weights, save_weights  # noqa: E402
from sojourn_server.predictors.length_trainer import LengthTrainer  # noqa: E402

AT_ONCE_S = 30.0
"""Far more than a call takes, and far less than what it must not wait for."""


def state(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A network that has learned, or says so: with one there are guesses from the first."""
    path = tmp_path / "lengths"
    save_weights(path, LengthNetwork(HIDDEN, seed=3), model="m", examples=999)
    return path


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BackgroundTrainer]]:
    made: list[BackgroundTrainer] = []

    def make(**options: Any) -> BackgroundTrainer:
        made.append(BackgroundTrainer(HIDDEN, **{"model": "m", "points": POINTS, "share": 0.9, **options}))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def taken(background: BackgroundTrainer) -> dict[str, LengthPrediction]:
    """Guesses, as soon as there are any."""
    found: dict[str, LengthPrediction] = {}
    wait_until(lambda: found.update(background.take_predictions()) or found)
    return found


# -- its work -------------------------------------------------------------------------------


def test_it_learns_while_the_engine_leaves_it_notes_and_then_guesses(
    make: Callable[..., BackgroundTrainer],
) -> None:
    threads, random_numbers = torch.get_num_threads(), torch.get_rng_state()
    background = make(share=100.0)
    for output in outputs(60, seed=5):
        for written, one in zip(output.written, output.states, strict=True):
            background.queue_hidden_states([(output.request_id, written)], one.unsqueeze(0))
        background.ended(output.request_id, output.tokens)
        wait_until(lambda: background._messages.empty())
    wait_until(lambda: background._trainer.batches > 4 and not background._trainer.due)
    background.take_predictions()
    background.queue_hidden_states([("a", 17), ("b", 0)], state(2))
    guesses = taken(background)
    assert guesses.keys() == {"a", "b"}
    assert guesses["a"].at_tokens == 17
    assert len(guesses["b"].remaining) == POINTS
    assert background.take_predictions() == {}, "each only once"
    known = background.state()
    assert known.keys() == {"examples", "batches", "loss", "skipped_states", "missed_notes", "seconds"}
    assert known["examples"] == sum(len(output.written) for output in outputs(60, seed=5))
    assert known["missed_notes"] == 0
    assert known["loss"] is not None
    assert known["loss"] < 4
    assert known["seconds"]
    assert torch.get_num_threads() == threads, "which are the engine's"
    assert torch.equal(torch.get_rng_state(), random_numbers)


# -- no waiting ------------------------------------------------------------------------------


def test_the_engine_does_not_wait_for_a_stuck_trainer(
    make: Callable[..., BackgroundTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck(*_: Any) -> dict[str, tuple[float, ...]]:
        entered.set()
        leave.wait(60)
        return {}

    monkeypatch.setattr(LengthTrainer, "observe_and_predict", stuck)
    background = make()
    background.queue_hidden_states([("first", 0)], state())
    assert entered.wait(60)
    begun_s = time.monotonic()
    for number in range(1000):
        background.queue_hidden_states([(f"r{number}", 0)], state())
        background.ended(f"r{number}", 9)
        assert background.take_predictions() == {}
    background.state()
    assert time.monotonic() - begun_s < AT_ONCE_S
    assert background.missed == 2000 - MAX_QUEUED_MESSAGES
    assert background._messages.qsize() == MAX_QUEUED_MESSAGES
    leave.set()


# -- its share ---------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    """Of processor time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_it_takes_no_more_of_the_processor_than_its_share(
    make: Callable[..., BackgroundTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the machine does: what it may take grows with time, what it took is its own alone."""
    batch_s = 0.02

    def train(trainer: LengthTrainer) -> float:
        burn(batch_s)
        return 1.0

    monkeypatch.setattr(LengthTrainer, "train", train)
    monkeypatch.setattr(LengthTrainer, "due", True)
    begun_s = time.monotonic()
    background = make(share=0.03)
    wait_until(lambda: background.spent_s > 2 * batch_s and time.monotonic() - begun_s > 1.5)
    spent_s, passed_s = background.spent_s, time.monotonic() - begun_s
    assert spent_s <= 0.03 * passed_s + 2 * batch_s


# -- what fails ----------------------------------------------------------------------------------


def test_a_failure_inside_ends_guesses_and_nothing_else(
    make: Callable[..., BackgroundTrainer], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []  # vLLM's loggers hand nothing on
    monkeypatch.setattr(background_module.logger, "error", lambda text, *args, **_: said.append(text % args))
    background = make(file=file)
    background.queue_hidden_states([("a", 0)], state())
    assert taken(background)
    background.queue_hidden_states([("a", 0), ("b", 0)], state(3))  # the engine has mixed something up
    wait_until(lambda: not background._thread.is_alive())
    assert background.take_predictions() == {}
    (line,) = said
    assert "predictions continue without it" in line
    for number in range(3 * MAX_QUEUED_MESSAGES):
        background.queue_hidden_states([(f"r{number}", 0)], state())
        background.ended(f"r{number}", 9)
    assert background._messages.empty(), "no thread reads them, and they would hold memory"
    assert background.state()["examples"] == 0
    background.stop()
    assert len(said) == 1


# -- its file ---------------------------------------------------------------------------------------


def test_what_it_learned_is_there_at_the_next_start(
    make: Callable[..., BackgroundTrainer], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "lengths"
    first = make(file=path, share=0.9)
    for output in outputs(60, seed=5):
        first.queue_hidden_states([(output.request_id, 0)] * 3, output.states[:1].expand(3, HIDDEN))
        first.ended(output.request_id, output.tokens)
        wait_until(lambda: first._messages.empty())
    wait_until(lambda: first._trainer.batches > 2)
    assert not path.exists()
    first.stop()
    saved = load_weights(path, model="m", hidden_size=HIDDEN)
    assert saved is not None
    assert torch.equal(saved.first.weight, first._trainer.network.first.weight)
    later = make(file=path)
    later.queue_hidden_states([("a", 0)], state())
    assert taken(later).keys() == {"a"}, "from the first"
