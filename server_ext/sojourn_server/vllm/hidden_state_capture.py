"""Captures hidden states in vLLM's workers, for presets that read them (Tetris §2.2).

The model runner passes one row per sampled request to the model's ``compute_logits``: the last layer's hidden
state, from which the next token is sampled. Every few steps the worker sends a copy of these rows to the
scheduler, with the step's results. The model's outputs do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .compat import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput, get_pp_group

logger = logging.getLogger("vllm.sojourn")

OUTPUT_ATTRIBUTE = "sojourn_hidden_states"
"""Name of the attribute that carries the rows on vLLM's ``ModelRunnerOutput``. Pickling keeps it."""

CAPTURE_EVERY_STEPS = 16


class HiddenStateRows(NamedTuple):
    """Hidden states of the requests sampled in a step: [requests, hidden size], in host memory."""

    request_ids: tuple[str, ...]
    states: torch.Tensor


class HiddenStateCapture:
    """Copies hidden states out of a model runner every few steps, until an error."""

    def __init__(self, runner: Any, every_steps: int = CAPTURE_EVERY_STEPS) -> None:
        self._every_steps = every_steps
        self._due_in = 1
        self._copied: tuple[HiddenStateRows, torch.cuda.Event | None] | None = None
        self._failed = False
        self._request_ids: Callable[[], list[str]] = lambda: runner.input_batch.req_ids
        if hasattr(runner, "sample"):  # model runner V2 passes its batch as an argument
            self._request_ids = self._batch_of(runner)
        model = runner.get_model()
        self._compute_logits: Callable[..., Any] = model.compute_logits
        model.compute_logits = self._compute_and_capture

    def step(self) -> None:
        """Count one step of real requests. Warm-up runs do not call this, so their rows are not captured."""
        self._due_in -= 1

    def take(self) -> HiddenStateRows | None:
        """Return and remove the newest copy. Return ``None`` if there is none or it is not complete yet."""
        if self._copied is None:
            return None
        rows, event = self._copied
        if event is not None and not event.query():
            return None  # the copy is under way: the next step asks again
        self._copied = None
        return rows

    def _batch_of(self, runner: Any) -> Callable[[], list[str]]:
        """Wrap ``runner.sample``. Return a function that gives the request ids of the batch being sampled."""
        original = runner.sample
        ids: list[str] = []

        def sample(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            ids[:] = input_batch.req_ids
            return original(hidden_states, input_batch, *args, **kwargs)

        runner.sample = sample
        return lambda: ids

    def _compute_and_capture(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._due_in <= 0 and not self._failed:
            self._due_in = self._every_steps
            try:
                self._copy(hidden_states)
            except Exception as error:
                self._failed = True
                logger.error("sojourn: no hidden states from this model (%s)", error, exc_info=error)
        return self._compute_logits(hidden_states, *args, **kwargs)

    def _copy(self, hidden_states: torch.Tensor) -> None:
        request_ids = tuple(self._request_ids())
        if hidden_states.ndim != 2 or len(hidden_states) != len(request_ids):
            return  # speculative decoding has several rows a request
        if hidden_states.device.type != "cuda":
            self._copied = HiddenStateRows(request_ids, hidden_states.detach().clone()), None
            return
        host = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, pin_memory=True)
        host.copy_(hidden_states.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied = HiddenStateRows(request_ids, host), event


class HiddenStateWorkerMixin:
    """Adds hidden state capture to a vLLM worker class, which comes behind it in the list of bases."""

    _sojourn_capture: HiddenStateCapture | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        try:
            if get_pp_group().is_last_rank:  # it computes the logits
                self._sojourn_capture = HiddenStateCapture(self.model_runner)  # type: ignore[attr-defined]
        except Exception as error:
            logger.error("sojourn: no hidden states from this runner (%s)", error, exc_info=error)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sojourn_capture is not None and scheduler_output.total_num_scheduled_tokens:
            self._sojourn_capture.step()
        return self._with_rows(super().execute_model(scheduler_output, *args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_rows(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _with_rows(self, output: Any) -> Any:
        capture = self._sojourn_capture
        if capture is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _AsyncOutputWithRows(output, capture)
        return _attach_rows(output, capture)


class _AsyncOutputWithRows(AsyncModelRunnerOutput):
    """vLLM's asynchronous results of a step. Rows are added when they are complete."""

    def __init__(self, output: AsyncModelRunnerOutput, capture: HiddenStateCapture) -> None:
        self._output = output
        self._capture = capture

    def get_output(self) -> ModelRunnerOutput:
        return _attach_rows(self._output.get_output(), self._capture)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """vLLM 0.33 and later call this if ``get_output`` fails."""
        return self._output.get_kv_connector_output()


def _attach_rows(output: Any, capture: HiddenStateCapture) -> Any:
    # vLLM may share one constant object between all outputs without requests.
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        rows = capture.take()
        if rows is not None:
            setattr(output, OUTPUT_ATTRIBUTE, rows)
    return output
