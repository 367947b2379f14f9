"""The fast path of ``allocate_slots`` gives what vLLM's own allocation gives, and changes as little."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from cache_group_specs import window_spec
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.vllm.allocation_fallback import allocate_slots_with_fast_path


class ComparedAllocation:
    """Allocates the short way, and compares with vLLM's own way whenever the short way did not ask it."""

    def __init__(self, engine: Any) -> None:
        self._manager = manager = engine.scheduler.kv_cache_manager
        self._vllm = manager.allocate_slots
        self._asked = False
        self.shortened = 0
        self.refused = 0
        self._short = allocate_slots_with_fast_path(manager, self._ask_vllm)
        manager.allocate_slots = self

    def _ask_vllm(self, *args: Any, **kwargs: Any) -> Any:
        self._asked = True
        return self._vllm(*args, **kwargs)

    def __call__(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._asked = False
        before = self._tables()
        found = self._short(request, *args, **kwargs)
        if not self._asked:
            assert self._tables() == before
            assert self._vllm(request, *args, **kwargs) is found
            assert self._tables() == before
            self.shortened += 1
        self.refused += found is None
        return found

    def _tables(self) -> Any:
        pool, group = self._manager.block_pool, self._manager.coordinator.single_type_managers[0]
        blocks = {name: [block.block_id for block in held] for name, held in group.req_to_blocks.items()}
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        cached = [(block.block_hash, block.ref_cnt) for block in pool.blocks]
        return blocks, dict(group.num_cached_block), free, cached


def completed_prompts(engine: Any, step: Any) -> set[str]:
    """Requests that get a token from a step that has just been planned."""
    requests = engine.scheduler.requests
    return {
        name
        for name in step.num_scheduled_tokens
        if requests[name].num_computed_tokens >= requests[name].num_tokens
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_short_way_is_vllms_own(block_size: int, asynchronous: bool) -> None:
    engine = SimulatedEngine(
        SimulatedEngineOptions(
            blocks=1 + 320 // block_size,
            block_size=block_size,
            max_num_seqs=12,
            max_num_batched_tokens=48,
            max_model_len=256,
            asynchronous=asynchronous,
        ),
        lambda: 0.0,
    )
    compared = ComparedAllocation(engine)
    rng = random.Random(block_size)
    planned = []
    for number in range(24):
        # Some prompts have a common beginning, and some are longer than a step.
        prompt = [*range(rng.choice((0, 40))), *(rng.randrange(9000) for _ in range(rng.randint(1, 60)))]
        engine.add(f"r{number}", prompt, max_tokens=rng.randint(1, 70))
    while engine.scheduler.has_unfinished_requests():
        step = engine.plan()
        planned.append((step, completed_prompts(engine, step)))
        if len(planned) > asynchronous:  # one step is planned ahead
            earlier, sampled = planned.pop(0)
            engine.update_from_output(earlier, sampled=sampled)
    assert compared.refused, "no request was ever preempted or kept waiting for blocks"
    assert bool(compared.shortened) == (block_size > 1)


def test_models_with_windows_keep_vllms_own_way() -> None:
    engine = SimulatedEngine(SimulatedEngineOptions(other_groups=(window_spec(),)), lambda: 0.0)
    manager = engine.scheduler.kv_cache_manager
    assert allocate_slots_with_fast_path(manager, print) is print
