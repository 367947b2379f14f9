"""Hidden states out of a worker and into the scheduler: which, whose, and that nothing else changes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sojourn_server.launch.serve_command import WORKER_CLS
from sojourn_server.predictors.background_trainer import LengthPrediction
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN, STOP_TOKEN
from sojourn_server.vllm import hidden_state_capture, length_predictor
from sojourn_server.vllm import scheduler_adapter as adapter_module
from sojourn_server.vllm.hidden_state_capture import (
    CAPTURE_EVERY_STEPS,
    OUTPUT_ATTRIBUTE,
    HiddenStateCapture,
    HiddenStateRows,
    HiddenStateWorkerMixin,
)
from turns import last_turn
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

HIDDEN, VOCABULARY = 8, 20


def states_of(request_ids: list[str], step: int = 0) -> torch.Tensor:
    """A row each, which tells whose it is and when."""
    rows = [[float(sum(map(ord, name))), float(step)] + [1.0] * (HIDDEN - 2) for name in request_ids]
    return torch.tensor(rows)


# -- in the worker ----------------------------------------------------------------------------


class FirstRunner:
    """vLLM's first model runner, as far as it is looked at: the batch is the runner's."""

    def __init__(self) -> None:
        weight = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.model = SimpleNamespace(compute_logits=lambda states: states @ weight)
        self.input_batch = SimpleNamespace(req_ids=[])

    def get_model(self) -> Any:
        return self.model

    def logits(self, states: torch.Tensor, request_ids: list[str]) -> torch.Tensor:
        self.input_batch.req_ids = request_ids
        return self.model.compute_logits(states)


class SecondRunner(FirstRunner):
    """The second: the batch is handed from call to call."""

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> torch.Tensor:
        return self.model.compute_logits(hidden_states)

    def logits(self, states: torch.Tensor, request_ids: list[str]) -> torch.Tensor:
        return self.sample(states, SimpleNamespace(req_ids=request_ids), None)


RUNNERS = pytest.mark.parametrize("runner_class", [FirstRunner, SecondRunner])


class Worker:
    """One of vLLM's, as far as it is looked at."""

    later = False

    def __init__(self, runner_class: type = FirstRunner) -> None:
        self.runner_class = runner_class
        self.logits: list[torch.Tensor] = []
        self._ids: list[str] = []
        self.load_model()

    def load_model(self) -> None:
        self.model_runner = self.runner_class()

    def execute_model(self, scheduler_output: Any) -> Any:
        self._ids = scheduler_output.ids
        if not self._ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        states = states_of(self._ids, scheduler_output.step).repeat_interleave(scheduler_output.rows, dim=0)
        self.logits.append(self.model_runner.logits(states, self._ids))
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = ModelRunnerOutput(self._ids, {name: n for n, name in enumerate(self._ids)}, [[1]])
        return OnItsWay(output) if self.later else output


class OnItsWay(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output

    def get_kv_connector_output(self) -> str:  # abstract since vLLM 0.33
        return "salvaged"


class Capturing(HiddenStateWorkerMixin, Worker):
    pass


def step(worker: Any, ids: list[str], number: int = 0, rows: int = 1) -> Any:
    planned = SimpleNamespace(ids=ids, step=number, rows=rows, total_num_scheduled_tokens=len(ids))
    output = worker.execute_model(planned)
    output = worker.sample_tokens(None) if output is None else output
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


def carried(output: Any) -> HiddenStateRows | None:
    return getattr(output, OUTPUT_ATTRIBUTE, None)


@pytest.fixture(autouse=True)
def last_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker of these is in any."""
    monkeypatch.setattr(hidden_state_capture, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))


@RUNNERS
@pytest.mark.parametrize("later", [False, True])
def test_every_few_steps_the_rows_travel_with_the_results_and_no_logit_is_another(
    runner_class: type, later: bool
) -> None:
    ours, plain = Capturing(runner_class), Worker(runner_class)
    ours.later = later
    found = {}
    for number in range(1, 3 * CAPTURE_EVERY_STEPS + 1):
        ids = [f"r{number % 5}", "b", "a"][: 1 + number % 3]
        output = step(ours, ids, number)
        step(plain, ids, number)
        assert torch.equal(ours.logits[-1], plain.logits[-1])
        assert output.req_ids == ids
        if carried(output) is not None:
            found[number] = carried(output)
    assert list(found) == [1, 1 + CAPTURE_EVERY_STEPS, 1 + 2 * CAPTURE_EVERY_STEPS]
    for number, rows in found.items():
        ids = [f"r{number % 5}", "b", "a"][: 1 + number % 3]
        assert rows.request_ids == tuple(ids)
        assert torch.equal(rows.states, states_of(ids, number))


@RUNNERS
def test_warm_up_and_steps_without_work_are_not_looked_at(runner_class: type) -> None:
    worker = Capturing(runner_class)
    worker.model_runner.logits(states_of(["warm"]), ["warm"])
    assert worker._sojourn_capture.take() is None
    for _ in range(3 * CAPTURE_EVERY_STEPS):
        step(worker, [])
    rows = carried(step(worker, ["a"]))
    assert rows is not None, "the first that has anything to do"
    assert rows.request_ids == ("a",)
    for _ in range(3 * CAPTURE_EVERY_STEPS):
        step(worker, [])
        worker.model_runner.logits(states_of(["warm"]), ["warm"])
    assert carried(step(worker, ["a"])) is None, "such steps do not count"


@pytest.mark.parametrize(
    ("runner_class", "rows", "is_last"),
    [(FirstRunner, 3, True), (SecondRunner, 3, True), (FirstRunner, 1, False)],
    ids=["several rows", "several rows, second runner", "not the last pipeline stage"],
)
def test_several_rows_a_request_and_earlier_pipeline_stages_are_left_alone(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch, runner_class: type, rows: int, is_last: bool
) -> None:
    """Several rows as speculative decoding has them, and as the prompt's logprobs do, that are asked for
    after."""
    monkeypatch.setattr(hidden_state_capture, "get_pp_group", lambda: SimpleNamespace(is_last_rank=is_last))
    worker = Capturing(runner_class)
    for number in range(2 * CAPTURE_EVERY_STEPS):
        assert carried(step(worker, ["a", "b"], number, rows)) is None
    assert warnings == []


@RUNNERS
def test_a_failure_inside_is_said_once_and_the_step_goes_on(runner_class: type, warnings: list[str]) -> None:
    worker = Capturing(runner_class)
    tap = worker._sojourn_capture

    def broken() -> list[str]:
        raise RuntimeError("no batch here")

    tap._request_ids = broken
    for number in range(3 * CAPTURE_EVERY_STEPS):
        output = step(worker, ["a"], number)
        assert output.req_ids == ["a"]
        assert carried(output) is None
    assert len(worker.logits) == 3 * CAPTURE_EVERY_STEPS
    (line,) = warnings
    assert line == "sojourn: no hidden states from this model (no batch here)"


def test_what_a_device_has_not_copied_yet_is_handed_out_after_a_later_step() -> None:
    is_copied = False
    tap = HiddenStateCapture(FirstRunner())
    rows = HiddenStateRows(("a",), states_of(["a"]))
    tap._copied = rows, SimpleNamespace(query=lambda: is_copied)  # type: ignore[assignment]
    assert tap.take() is None
    is_copied = True
    assert tap.take() is rows
    assert tap.take() is None


def test_both_runners_of_this_vllm_have_what_is_asked_of_them() -> None:
    """A release that renames any of it must not pass for one that was tested."""
    # Imported here, so that such a release fails this test alone.
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    assert not hasattr(First, "sample")
    assert "self.model.compute_logits(sample_hidden_states)" in inspect.getsource(First.execute_model)
    assert "self.input_batch" in inspect.getsource(First.execute_model)
    assert list(inspect.signature(Second.sample).parameters)[:3] == ["self", "hidden_states", "input_batch"]
    assert "self.model.compute_logits(sample_hidden_states)" in inspect.getsource(Second.sample)


# -- in the scheduler ---------------------------------------------------------------------------


class Listener:
    """Where the student's thread would be."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[tuple[str, int]], torch.Tensor]] = []
        self.over: list[tuple[str, int | None]] = []
        self.new: dict[str, LengthPrediction] = {}

    def queue_hidden_states(self, requests: list[tuple[str, int]], states: torch.Tensor) -> None:
        self.seen.append((list(requests), states))

    def ended(self, request_id: str, tokens: int | None) -> None:
        self.over.append((request_id, tokens))

    def take_predictions(self) -> dict[str, LengthPrediction]:
        taken, self.new = self.new, {}
        return taken

    def state(self) -> dict[str, float | None]:
        return {"examples": 3.0}

    def stop(self) -> None:
        self.over.append(("stopped", None))


def with_rows(engine: Any, states: Any = states_of) -> None:
    """Each step's results carry a row of every request in it, as a worker's do."""
    original = engine.scheduler.update_from_output

    def update(planned: Any, output: ModelRunnerOutput, *args: Any, **kwargs: Any) -> Any:
        setattr(output, OUTPUT_ATTRIBUTE, HiddenStateRows(tuple(output.req_ids), states(output.req_ids)))
        return original(planned, output, *args, **kwargs)

    engine.scheduler.update_from_output = update


@pytest.fixture
def listening(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``listening(**options) -> (engine, listener)``."""
    monkeypatch.setattr(adapter_module, "captures_hidden_states", lambda config: True)

    def make(**options: Any) -> tuple[Any, Listener]:
        listener = Listener()
        monkeypatch.setattr(length_predictor, "BackgroundTrainer", lambda *args, **kwargs: listener)
        engine = make_engine("tetris-learned", **options)
        with_rows(engine)
        return engine, listener

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_is_computed_in_parts_says_nothing_before_the_last(
    listening: Any, asynchronous: bool
) -> None:
    engine, listener = listening(max_num_batched_tokens=64, max_num_seqs=8, asynchronous=asynchronous)
    engine.add("short", range(20), max_tokens=9, program_id="A")
    engine.add("long", range(1000, 1150), max_tokens=4, program_id="B")
    engine.run()
    by_request: dict[str, list[int]] = {}
    for requests, states in listener.seen:
        for (name, written), row in zip(requests, states, strict=True):
            by_request.setdefault(name, []).append(written)
            assert torch.equal(row, states_of([name])[0]), "its own row"
    assert by_request == {"short": list(range(9)), "long": list(range(4))}
    assert listener.seen[0][0] == [("short", 0)], "beside the first part of the other's prompt"


def test_how_an_output_ended_says_whether_it_teaches(listening: Any) -> None:
    engine, listener = listening()
    engine.tokens = lambda request: STOP_TOKEN if request.request_id == "stops" else DUMMY_TOKEN
    engine.add("stops", range(20), max_tokens=9, program_id="A")
    engine.add("cut", range(20), max_tokens=3, program_id="B")
    engine.add("aborted", range(20), max_tokens=30, program_id="C")
    engine.add("stranger", range(20), max_tokens=2)
    guess = engine.add("guess", range(20), max_tokens=30, program_id="E")
    guess.sampling_params.stop = ["x"]
    reader = engine.scheduler.sojourn.reader
    # Without a tokenizer, a stop string and a disconnection look alike.
    reader.tokenizer, reader._finds_no_stop = None, False
    for _ in range(5):
        engine.step()
    engine.abort("aborted")
    engine.abort("guess")
    assert last_turn(engine, "E")["outcome"] == "stopped"
    engine.add("never ran", range(20), max_tokens=30, program_id="D")
    engine.abort("never ran")
    engine.run()
    assert sorted(listener.over) == [
        ("aborted", None), ("cut", 3), ("guess", None), ("never ran", None), ("stops", 1), ("stranger", 2),
    ]  # fmt: skip


def test_predictions_reach_the_program_scheduler_and_shutdown_stops_the_network(listening: Any) -> None:
    engine, listener = listening()
    engine.add("r", range(20), max_tokens=9, program_id="A")
    engine.step()
    listener.new = {"r": LengthPrediction(1, (5.0,) * 8), "gone": LengthPrediction(7, (5.0,) * 8)}
    engine.step()
    request_state = engine.scheduler.sojourn.program_scheduler.state.requests.states["r"]
    assert (request_state.network_prediction, request_state.network_predicted_at_tokens) == ((5.0,) * 8, 1)
    assert engine.ask("stats")["output_lengths"]["network"] == {"examples": 3.0}
    engine.scheduler.shutdown()
    assert listener.over == [("stopped", None)]


# -- which workers ------------------------------------------------------------------------------


def test_a_worker_that_lets_nothing_out_is_named_and_predictions_go_on(
    make_engine: Any, warnings: list[str]
) -> None:
    engine = make_engine("tetris-learned")
    (line,) = warnings
    with_rows(engine)  # they are for an engine that reads them
    found = engine.scheduler.vllm_config.parallel_config.worker_cls
    assert found != WORKER_CLS
    assert (
        f"worker class {found} does not capture hidden states; output lengths are predicted without them"
        in line
    )
    assert WORKER_CLS in line
    engine.add("r", range(20), max_tokens=30, program_id="A")
    engine.run()
    stats = engine.ask("stats")["output_lengths"]
    assert stats == {"outputs": 1, "network_off": None, "without_off": None, "network": None}
