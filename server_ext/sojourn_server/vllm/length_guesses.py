"""Between workers' hidden states, what learns from them, and the steward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from ..engine.steward import Steward
from ..launch.command import WORKER_CLASSES
from ..launch.weights import contents
from ..learned.background import Background
from ..policy.remaining import POINTS
from .hidden_rows import HiddenRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.sojourn")

_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""How an output ends whose length is worth learning."""


class LengthGuesses:
    """Of one engine. Raises ``WeightsError`` where ``network_file`` is not of this model."""

    def __init__(
        self, scheduler: Scheduler, steward: Steward, network_file: str | None, rank: int | None = None
    ) -> None:
        self._requests = scheduler.requests
        self._steward = steward
        config = scheduler.vllm_config.model_config
        self._background = Background(
            config.get_hidden_size(),
            model=model_name(config.model),
            points=POINTS,
            file=_of_rank(network_file, rank) if network_file is not None else None,
        )

    def took(self, rows: HiddenRows, planned: SchedulerOutput) -> None:
        """The rows of a step have come that was ``planned`` so, and the scheduler has not yet taken in its
        tokens. The next may be planned already: what a request has computed by now is not what it had then.
        """
        computed = computed_by(planned)
        seen, places = [], []
        for place, request_id in enumerate(rows.request_ids):
            request = self._requests.get(request_id)
            # Of a prompt that is computed in parts the row says nothing before the last of them.
            if request is not None and computed.get(request_id, 0) >= request.num_tokens:
                seen.append((request_id, request.num_output_tokens))
                places.append(place)
        if seen:
            states = rows.states if len(seen) == len(rows.request_ids) else rows.states[places]
            self._background.see(seen, states)

    def ended(self, request: Request) -> None:
        """The request has left the engine."""
        whole = request.status in _WHOLE and request.num_output_tokens > 0
        self._background.ended(request.request_id, request.num_output_tokens if whole else None)

    def tell(self, now: float) -> None:
        """Hand the steward what is new."""
        for request_id, guess in self._background.guesses().items():
            request = self._requests.get(request_id)
            if request is not None:
                most = max(1, request.max_tokens - guess.at_tokens)
                self._steward.guessed(request_id, guess.at_tokens, guess.remaining, now, most_tokens=most)

    def state(self) -> dict[str, float | None]:
        """What was learned so far."""
        return self._background.state()

    def stop(self) -> None:
        """Save what was learned."""
        self._background.stop()


def computed_by(planned: SchedulerOutput) -> dict[str, int]:
    """How many tokens of each of its requests are computed when a step is over."""
    before = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
    cached = planned.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: before[request_id] + tokens
        for request_id, tokens in planned.num_scheduled_tokens.items()
        if request_id in before
    }


def are_read(config: VllmConfig) -> bool:
    """Whether this engine's workers let hidden states out."""
    if config.parallel_config.worker_cls not in WORKER_CLASSES.values():
        logger.warning(
            "sojourn: worker class %s lets no hidden states out; predictions go on without them. "
            "`sojourn serve` starts the engine with %s",
            config.parallel_config.worker_cls,
            " or ".join(WORKER_CLASSES.values()),
        )
        return False
    return True


def _of_rank(network_file: str, rank: int | None) -> Path:
    """Of several data-parallel engines each has its own: the last to save would overwrite the others."""
    return Path(network_file if rank is None else f"{network_file}.rank{rank}")


def model_name(model: str) -> str:
    """A name by which a network is known again: of a folder its own and its weights', wherever it lies."""
    folder = Path(model)
    return f"{folder.resolve().name} {contents(folder)}" if folder.is_dir() else model
