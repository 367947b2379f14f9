"""Steps that vLLM's scheduler has planned, for tests that carry them out as a worker would."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import KVConnectorOutput


@dataclass
class Work:
    """What a step does for one request, as it was planned."""

    request: Any
    block_ids: tuple[list[int], ...]
    """By KV cache group."""
    first: int
    end: int
    """Tokens that are computed when it is over."""
    samples: bool


@dataclass
class Step:
    planned: Any
    work: dict[str, Work]
    loads: list[tuple[Any, tuple[int, int], Any]] = field(default_factory=list)
    """Request, group and place in its context, copy."""

    @property
    def jobs(self) -> Any:
        return self.planned.kv_connector_metadata.jobs


class StepQueue:
    """Plans steps and carries each out. An asynchronous engine plans the next step before that, as with a
    batch queue of two."""

    def __init__(self, engine: Any, failing: float) -> None:
        self.engine = engine
        self.failing = failing
        """Share of the blocks to be loaded that are not."""
        self.draw = random.Random(8)
        self.under_way: deque[Step] = deque()
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        self.under_way.append(self._plan())
        while len(self.under_way) > self.engine.options.asynchronous:
            self._carry_out(self.under_way.popleft())

    def _plan(self) -> Step:
        planned = self.engine.plan()
        scheduler, work = self.engine.scheduler, {}
        for name, tokens in planned.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = request.num_computed_tokens  # this step's are counted already
            block_ids = tuple(map(list, scheduler.kv_cache_manager.get_block_ids(name)))
            work[name] = Work(request, block_ids, end - tokens, end, not request.is_prefill_chunk)
        self.counts["preempted"] += len(planned.preempted_req_ids or ())
        return Step(planned, work)

    def _carry_out(self, step: Step) -> None:
        raise NotImplementedError

    def _answer(self, step: Step, **output: Any) -> None:
        """Report the step's tokens, and what the connector's worker has to say."""
        sampled = {name for name, work in step.work.items() if work.samples}
        self.engine.update_from_output(step.planned, KVConnectorOutput(**output), sampled)
