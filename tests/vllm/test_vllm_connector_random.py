"""Random life of vLLM's scheduler over our tiers: what is loaded was once computed under its hash."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

BLOCK = 4
"""Tokens: small, so that many a victim's last block has just been completed by plan, and not by a step."""
NOTHING = b"nothing"


class Device:
    """Contents of device blocks and host slots: the hash of what is in them, if all of it is.

    What is stored ahead is copied as late as it may be: a step after it was ordered, or when it is awaited.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.stores: dict[int, Any] = {}
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        from sojourn_server.tiers.jobs import Fate, TierResults
        from sojourn_server.vllm.connector import StepReport
        from vllm.v1.outputs import KVConnectorOutput

        planned = self.engine.plan()
        jobs = planned.kv_connector_metadata.jobs
        for job, copies in jobs.awaited.items():
            self.stores.pop(job, None)
            self._copy_to_host(copies)
        self._copy_to_host(jobs.saves)
        before, self.stores = self.stores, dict(jobs.stores)
        for copies in jobs.stores.values():
            self.slots.update((copy.slot, b"half written") for copy in copies)
        for request_id, copies in jobs.loads.items():
            hashes = self.engine.scheduler.requests[request_id].block_hashes
            ids = self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            for copy in copies:
                place = ids.index(copy.block_id)
                assert self.slots[copy.slot] == hashes[place], "a wrong token would follow"
                self.blocks[copy.block_id] = self.slots[copy.slot]
                self.counts["loaded"] += 1
        self._compute(planned)
        self.counts["preempted"] += len(planned.preempted_req_ids or ())
        for copies in before.values():
            self._copy_to_host(copies)
            self.counts["stored"] += len(copies)
        results = TierResults(stored=dict.fromkeys(before, Fate.MOVED))
        self.engine.take_in(planned, KVConnectorOutput(kv_connector_worker_meta=StepReport(results)))

    def _copy_to_host(self, copies: Any) -> None:
        for copy in copies:
            self.slots[copy.slot] = self.blocks.get(copy.block_id, NOTHING)

    def _compute(self, planned: Any) -> None:
        manager = self.engine.scheduler.kv_cache_manager
        for request_id, tokens in planned.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            ids = manager.get_block_ids(request_id)[0]
            end = request.num_computed_tokens  # this step's are counted already
            first = (end - tokens) // BLOCK
            for place in range(first):
                assert self.blocks[ids[place]] == request.block_hashes[place], "found under a wrong hash"
            for place in range(first, -(-end // BLOCK)):
                whole = (place + 1) * BLOCK <= end
                self.blocks[ids[place]] = request.block_hashes[place] if whole else NOTHING


@pytest.mark.parametrize("policy", ["continuum", "saga", "program-fcfs"])
def test_what_is_loaded_was_computed(make_engine: Any, clock: Any, policy: str) -> None:
    engine = make_engine(
        policy,
        blocks=60,
        block_size=BLOCK,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        max_model_len=220,
        host_blocks=150,
        own_tiers=True,
    )
    device, draw = Device(engine), random.Random(5)
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
    planner = engine.scheduler.connector.planner
    assert not any(entry.pins for entry in planner.host)
    assert not engine.scheduler.connector.loaded_tokens
    assert engine.scheduler.sojourn.failures == 0
