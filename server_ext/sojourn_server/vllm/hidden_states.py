"""Hidden states out of vLLM's workers, for presets that read them (Tetris §2.2).

The runner hands one row a sampled request to the model's ``compute_logits``: the last layer's
hidden state, from which the next token is drawn. Every few steps a copy of these rows goes to the
scheduler, with the step's results. Nothing of the step itself is different.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from .hidden_rows import CARRIED_AS, HiddenRows

logger = init_logger("vllm.sojourn")

EVERY_STEPS = 16
"""Steps between two copies."""

WITHOUT_STEPS = 2000
"""After so many without a copy the operator is told, once."""


class Tap:
    """On one model runner. ``take`` returns the newest copy once it is complete."""

    def __init__(self, runner: Any, every_steps: int = EVERY_STEPS) -> None:
        self._every_steps = every_steps
        self._due_in = 1
        self._copied: tuple[HiddenRows, torch.cuda.Event | None] | None = None
        self._failed = False
        self._steps_without = 0
        self._request_ids: Callable[[], list[str]] = lambda: runner.input_batch.req_ids
        if hasattr(runner, "sample"):  # the second model runner's, whose batch is handed from call to call
            self._request_ids = self._batch_of(runner)
        model = runner.get_model()
        self._compute_logits: Callable[..., Any] = model.compute_logits
        model.compute_logits = self._stand_in

    def step(self) -> None:
        """A step begins: only its own rows are looked at, and not those of warm-up runs."""
        self._due_in -= 1
        self._steps_without += 1
        if self._steps_without == WITHOUT_STEPS and not self._failed:
            logger.warning(
                "sojourn: %d steps have let no hidden states out (speculative decoding? sharded sampling?); "
                "predictions go on without them",
                WITHOUT_STEPS,
            )

    def take(self) -> HiddenRows | None:
        """What was copied, each only once; ``None``: nothing, or not yet."""
        if self._copied is None:
            return None
        rows, event = self._copied
        if event is not None and not event.query():
            return None  # of a device: it is asked again after the next step
        self._copied = None
        return rows

    def _batch_of(self, runner: Any) -> Callable[[], list[str]]:
        """Who is in the batch that is being sampled."""
        original = runner.sample
        ids: list[str] = []

        def sample(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            ids[:] = input_batch.req_ids
            return original(hidden_states, input_batch, *args, **kwargs)

        runner.sample = sample
        return lambda: ids

    def _stand_in(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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
        self._steps_without = 0
        if hidden_states.device.type != "cuda":
            self._copied = HiddenRows(request_ids, hidden_states.detach().clone()), None
            return
        host = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, pin_memory=True)
        host.copy_(hidden_states.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied = HiddenRows(request_ids, host), event


def computes_logits() -> bool:
    """Whether this worker does: of a pipeline of several only the last."""
    return bool(get_pp_group().is_last_rank)


class TappingMixin:
    """Mix in before one of vLLM's worker classes."""

    _sojourn_tap: Tap | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        try:
            if computes_logits():
                self._sojourn_tap = Tap(self.model_runner)  # type: ignore[attr-defined]
        except Exception as error:
            logger.error("sojourn: no hidden states from this runner (%s)", error, exc_info=error)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sojourn_tap is not None and scheduler_output.total_num_scheduled_tokens:
            self._sojourn_tap.step()
        return self._with_rows(super().execute_model(scheduler_output, *args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_rows(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _with_rows(self, output: Any) -> Any:
        tap = self._sojourn_tap
        if tap is None or output is None:
            return output
        return _Later(output, tap) if isinstance(output, AsyncModelRunnerOutput) else _laden(output, tap)


class _Later(AsyncModelRunnerOutput):  # type: ignore[misc]
    """Results that are still on their way."""

    def __init__(self, output: AsyncModelRunnerOutput, tap: Tap) -> None:
        self._output = output
        self._tap = tap

    def get_output(self) -> ModelRunnerOutput:
        return _laden(self._output.get_output(), self._tap)


def _laden(output: Any, tap: Tap) -> Any:
    # One without requests may be vLLM's constant for all such.
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        rows = tap.take()
        if rows is not None:
            setattr(output, CARRIED_AS, rows)
    return output
