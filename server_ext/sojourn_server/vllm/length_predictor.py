"""Passes hidden states to a background trainer, and its predictions of output lengths to the
``ProgramScheduler``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.events_and_actions import EventHandler, OutputLengthPredicted
from ..launch.serve_command import WORKER_CLS
from ..launch.weights_fingerprint import weights_digest
from ..policies.forecasting import QUANTILE_POINTS
from ..predictors.background_trainer import BackgroundTrainer
from .hidden_state_capture import HiddenStateRows
from .plugin_settings import rank_file

if TYPE_CHECKING:
    from .compat import Request, Scheduler, SchedulerOutput, VllmConfig

logger = logging.getLogger("vllm.sojourn")


class LengthPredictor:
    """Predicts the output lengths of one engine's requests from hidden states. ``network_file``: file from
    which the network is loaded and to which it is saved, if any. Raises ``WeightsError`` if it is unusable or
    belongs to another model."""

    def __init__(
        self, scheduler: Scheduler, handle: EventHandler, network_file: str | None, rank: int | None = None
    ) -> None:
        self._requests = scheduler.requests
        self._handle = handle
        config = scheduler.vllm_config.model_config
        self.trainer = BackgroundTrainer(
            config.get_hidden_size(),
            model=model_name(config.model),
            points=QUANTILE_POINTS,
            file=Path(rank_file(network_file, rank)) if network_file is not None else None,
        )

    def observe(self, rows: HiddenStateRows, planned: SchedulerOutput) -> None:
        """Pass a step's hidden states to the trainer, before the scheduler handles the step's tokens. Numbers
        of computed tokens are read from vLLM's plan of the step, because a request's own may include the next
        step."""
        cached = planned.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in planned.scheduled_new_reqs)
        seen, places = [], []
        for place, request_id in enumerate(rows.request_ids):
            request = self._requests.get(request_id)
            ended = computed.get(request_id, 0) + planned.num_scheduled_tokens.get(request_id, 0)
            # With chunked prefill only the row of the last chunk is useful.
            if request is not None and ended >= request.num_tokens:
                seen.append((request_id, request.num_output_tokens))
                places.append(place)
        if seen:
            states = rows.states if len(seen) == len(rows.request_ids) else rows.states[places]
            self.trainer.queue_hidden_states(seen, states)

    def request_ended(self, request: Request, *, complete: bool) -> None:
        """Forget a request that has ended. If its output is ``complete``, learn the output's length."""
        learned = complete and request.num_output_tokens > 0
        self.trainer.ended(request.request_id, request.num_output_tokens if learned else None)

    def report(self, now: float) -> None:
        for request_id, guess in self.trainer.take_predictions().items():
            request = self._requests.get(request_id)
            if request is not None:
                most = max(1, request.max_tokens - guess.at_tokens)
                self._handle(OutputLengthPredicted(request_id, guess.at_tokens, guess.remaining, most), now)


def captures_hidden_states(config: VllmConfig) -> bool:
    """Return whether the engine's worker class captures hidden states. If not, log a warning."""
    worker_cls: str = config.parallel_config.worker_cls
    if worker_cls != WORKER_CLS:
        logger.warning(
            "sojourn: worker class %s does not capture hidden states; output lengths are predicted without "
            "them. `sojourn serve` starts the engine with %s", worker_cls, WORKER_CLS,
        )  # fmt: skip
    return worker_cls == WORKER_CLS


def model_name(model: str) -> str:
    """Return the model's name in a network file; of a local folder its basename and a digest of the
    weights."""
    folder = Path(model)
    return f"{folder.resolve().name} {weights_digest(folder)}" if folder.is_dir() else model
