"""Random life of vLLM's scheduler over our tiers: what is loaded was once computed under its hash."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pytest

BLOCK = 4
"""Tokens: small, so that many a victim's last block has just been completed by plan, and not by a step."""
NOTHING = b"nothing"


Content = tuple[Any, int] | None
"""What is in a block or a slot: a whole block of a request, by its place. Its hash may be known later than it
is computed."""


def hash_of(content: Content) -> bytes:
    if content is None:
        return NOTHING
    request, place = content
    return request.block_hashes[place] if place < len(request.block_hashes) else NOTHING


@dataclass
class Work:
    """What a step does for one request, as it was planned."""

    request: Any
    block_ids: list[int]
    first: int
    end: int
    """Tokens that are computed when it is over."""
    samples: bool


@dataclass
class Step:
    planned: Any
    work: dict[str, Work]
    loads: list[tuple[Any, int, Any]]
    """Request, place in its context, copy."""


class Device:
    """Contents of device blocks and host slots, and the model that fills them.

    What is stored ahead is copied as late as it may be: a step after it was ordered, or when it is awaited.
    An asynchronous engine plans the next step before this one is carried out.
    """

    def __init__(self, engine: Any, failing: float = 0.0) -> None:
        self.engine = engine
        self.failing = failing
        """Share of the blocks to be loaded that are not."""
        self.draw = random.Random(8)
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}
        self.stores: dict[int, Any] = {}
        self.under_way: deque[Step] = deque()
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        self.under_way.append(self._plan())
        while len(self.under_way) > self.engine.options.asynchronous:
            self._carry_out(self.under_way.popleft())

    def _plan(self) -> Step:
        planned = self.engine.plan()
        requests = self.engine.scheduler.requests
        ids_of = self.engine.scheduler.kv_cache_manager.get_block_ids
        work = {}
        for request_id, tokens in planned.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens  # this step's are counted already
            block_ids = list(ids_of(request_id)[0])
            work[request_id] = Work(request, block_ids, end - tokens, end, not request.is_prefill_chunk)
        loads = [
            (requests[request_id], ids_of(request_id)[0].index(copy.block_id), copy)
            for request_id, copies in planned.kv_connector_metadata.jobs.loads.items()
            for copy in copies
        ]
        self.counts["preempted"] += len(planned.preempted_req_ids or ())
        under_way = {name for step in self.under_way for name in step.work}
        self.counts["preempted in mid-step"] += len(under_way & set(planned.preempted_req_ids or ()))
        return Step(planned, work, loads)

    def _carry_out(self, step: Step) -> None:
        from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
        from sojourn_server.vllm.kv_connector import StepReport
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        jobs = step.planned.kv_connector_metadata.jobs
        for job, copies in jobs.awaited.items():
            self.stores.pop(job, None)
            self._copy_to_host(copies)
        self._copy_to_host(jobs.saves)
        before, self.stores = self.stores, dict(jobs.stores)
        for copies in jobs.stores.values():
            self.slots.update((copy.slot, None) for copy in copies)  # half written
        not_filled: set[int] = set()
        for request, place, copy in step.loads:
            assert hash_of(self.slots[copy.slot]) == request.block_hashes[place], "a wrong token would follow"
            if self.draw.random() < self.failing:
                not_filled.add(copy.block_id)
            self.blocks[copy.block_id] = None if copy.block_id in not_filled else self.slots[copy.slot]
            self.counts["loaded"] += 1
        for work in step.work.values():
            self._compute(work, not_filled)
        for copies in before.values():
            self._copy_to_host(copies)
            self.counts["stored"] += len(copies)
        results = OffloadResults(stored=dict.fromkeys(before, CopyResult.MOVED))
        self.engine.scheduler.update_from_output(
            step.planned,
            ModelRunnerOutput(
                req_ids=list(step.work),
                req_id_to_index={name: index for index, name in enumerate(step.work)},
                sampled_token_ids=[
                    [self.engine.tokens(work.request)] if work.samples else [] for work in step.work.values()
                ],
                kv_connector_output=KVConnectorOutput(
                    kv_connector_worker_meta=StepReport(results), invalid_block_ids=not_filled
                ),
            ),
        )

    def _copy_to_host(self, copies: Any) -> None:
        for copy in copies:
            self.slots[copy.slot] = self.blocks.get(copy.block_id)

    def _compute(self, work: Work, not_filled: set[int]) -> None:
        first = work.first // BLOCK
        on_nothing = not not_filled.isdisjoint(work.block_ids[:first])
        self.counts["computed on what was not filled"] += on_nothing
        for place in range(first) if not on_nothing else ():
            found = hash_of(self.blocks[work.block_ids[place]])
            assert found == work.request.block_hashes[place], "found under a wrong hash"
        for place in range(first, -(-work.end // BLOCK)):
            whole = (place + 1) * BLOCK <= work.end and not on_nothing
            self.blocks[work.block_ids[place]] = (work.request, place) if whole else None


# Loads that fail while the next step is planned already give wrong tokens: such an engine is refused.
@pytest.mark.parametrize(("asynchronous", "failing"), [(False, 0.0), (False, 0.05), (True, 0.0)])
@pytest.mark.parametrize("policy", ["continuum", "saga", "program-fcfs", "mori", "tetris"])
def test_what_is_loaded_was_computed(
    make_engine: Any, clock: Any, policy: str, asynchronous: bool, failing: float
) -> None:
    engine = make_engine(
        policy,
        blocks=60,
        block_size=BLOCK,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        max_model_len=220,
        host_blocks=150,
        own_tiers=True,
        asynchronous=asynchronous,
    )
    device, draw = Device(engine, failing), random.Random(5)
    contexts: dict[str, list[int]] = {}
    for number in range(1, 261):
        program = f"P{draw.randrange(7)}"
        context = contexts.get(program, [1, 2, 3, 4, 5, 6, 7, 8])
        if len(context) > 120:
            context = context[: draw.choice([8, 40])]
        context = [*context, *(draw.randrange(9, 30_000) for _ in range(draw.randint(5, 40)))]
        contexts[program] = context
        engine.add(f"r{number}", context, max_tokens=draw.randint(4, 60), program_id=program)
        for _ in range(draw.randint(0, 25)):
            clock.now += 0.05
            device.step()
        if draw.random() < 0.05 and engine.scheduler.requests:
            engine.abort(draw.choice(sorted(engine.scheduler.requests)))
        if draw.random() < 0.05:
            engine.tell({"seq": number, "type": "program_end", "program_id": program})
            contexts.pop(program)
    for _ in range(3000):
        if not engine.scheduler.has_unfinished_requests():
            break
        clock.now += 0.05
        device.step()
    assert not engine.scheduler.has_unfinished_requests()
    device.step()
    assert device.counts["loaded"] > 100
    assert device.counts["stored"] > 100
    assert device.counts["preempted"] > 5
    assert device.counts["preempted in mid-step"] or not asynchronous
    assert device.counts["computed on what was not filled"] > 3 or not failing
    planner = engine.scheduler.connector.planner
    assert not any(entry.pins for entry in planner.host)
    assert not engine.scheduler.connector.loaded_tokens
    assert engine.scheduler.sojourn.failures == 0
