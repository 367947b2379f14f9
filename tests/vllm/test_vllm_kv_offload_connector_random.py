"""Random life of vLLM's scheduler over our tiers: what is loaded was once computed under its hash."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from cache_group_specs import window_spec
from planned_steps import Step, StepQueue, Work
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
from sojourn_server.vllm.kv_connector import StepReport
from turns import no_load_is_left, planner

BLOCK = 4
"""Tokens: small, so that many a victim's last block has just been completed by plan, and not by a step."""
NOTHING = b"nothing"
SHAPE = {
    "block_size": BLOCK,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 220,
    "own_tiers": True,
}


MOST_LOAD_STEPS = 4

WINDOW = 14
"""Tokens that the layers of a window read."""
Content = tuple[Any, int, int] | None
"""What is in a block or a slot: a whole block of a request, by its group and its place. Its hash may be known
later than it is computed."""


def hash_of(content: Content) -> tuple[int, bytes]:
    if content is None:
        return 0, NOTHING
    request, group, place = content
    return group, request.block_hashes[place] if place < len(request.block_hashes) else NOTHING


def hash_at(request: Any, place: tuple[int, int]) -> tuple[int, bytes]:
    """What ``hash_of`` has to be for this group and place of the request's context."""
    group, at = place
    return group, request.block_hashes[at]


class Device(StepQueue):
    """Contents of device blocks and host slots, and the model that fills them.

    What is stored ahead is copied as late as it may be: a step after it was ordered, or when it is awaited.
    What is loaded arrives in the step that orders it or up to ``MOST_LOAD_STEPS`` later.
    """

    def __init__(self, engine: Any, failing: float = 0.0) -> None:
        super().__init__(engine, failing)
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}
        self.stores: dict[int, Any] = {}
        self.loads: dict[str, tuple[int, list[tuple[Any, tuple[int, int], Any]]]] = {}
        """By request: the steps until it arrives; request, group and place in its context and copy of each
        block."""

    def _plan(self) -> Step:
        step = super()._plan()
        requests = self.engine.scheduler.requests
        ids_of = self.engine.scheduler.kv_cache_manager.get_block_ids
        step.loads = [
            (requests[request_id], place_of(copy.block_id, ids_of(request_id)), copy)
            for request_id, copies in step.jobs.loads.items()
            for copy in copies
            if request_id in requests
        ]
        for name, load in self.engine.scheduler.sojourn._prefetcher._loads.items():
            copies = step.jobs.loads.get(name, ())
            stand_in = SimpleNamespace(request_id=name, block_hashes=load.keys)
            first = len(load.keys) - len(copies)
            step.loads += [(stand_in, (0, first + at), copy) for at, copy in enumerate(copies)]
            self.counts["loaded ahead"] += len(copies)
        under_way = {name for each in self.under_way for name in each.work}
        self.counts["preempted in mid-step"] += len(under_way & set(step.planned.preempted_req_ids or ()))
        return step

    def _carry_out(self, step: Step) -> None:
        jobs = step.jobs
        settled = self._arrive(at_once=True) if jobs.settles else (set(), set())
        for job, copies in jobs.awaited.items():
            self.stores.pop(job, None)
            self._copy_to_host(copies)
        self._copy_to_host(jobs.saves)
        before, self.stores = self.stores, dict(jobs.stores)
        for copies in jobs.stores.values():
            self.slots.update((copy.slot, None) for copy in copies)  # half written
        for request, place, copy in step.loads:
            begun = self.loads.setdefault(request.request_id, (self.draw.randint(0, MOST_LOAD_STEPS), []))
            begun[1].append((request, place, copy))
            self.blocks[copy.block_id] = None  # half written
        for work in step.work.values():
            self._compute(work)
        arrived, not_filled = (old | new for old, new in zip(settled, self._arrive(), strict=True))
        for copies in before.values():
            self._copy_to_host(copies)
            self.counts["stored"] += len(copies)
        results = OffloadResults(stored=dict.fromkeys(before, CopyResult.MOVED))
        self._answer(
            step,
            kv_connector_worker_meta=StepReport(results),
            finished_recving=arrived,
            invalid_block_ids=not_filled,
        )

    def _copy_to_host(self, copies: Any) -> None:
        for copy in copies:
            self.slots[copy.slot] = self.blocks.get(copy.block_id)

    def _arrive(self, *, at_once: bool = False) -> tuple[set[str], set[int]]:
        """What this step reports: requests whose loads have ended, and blocks that were not filled."""
        arrived, not_filled = set(), set()
        for request_id, (steps_left, copies) in list(self.loads.items()):
            if steps_left and not at_once:
                self.loads[request_id] = steps_left - 1, copies
                continue
            del self.loads[request_id]
            arrived.add(request_id)
            owner = self.engine.scheduler.requests.get(request_id)  # None: given up, then aborted
            if not request_id.startswith("\0"):
                self.counts["loaded for nobody"] += owner is None or owner.is_finished()
            for request, place, copy in copies:
                found = hash_of(self.slots[copy.slot])
                assert found == hash_at(request, place), "a wrong token would follow"
                if self.draw.random() < self.failing:
                    not_filled.add(copy.block_id)
                else:
                    self.blocks[copy.block_id] = self.slots[copy.slot]
                self.counts["loaded"] += 1
        self.counts["not filled"] += len(not_filled)
        return arrived, not_filled

    def _compute(self, work: Work) -> None:
        size = self.engine.options.block_size
        first = work.first // size
        for group, block_ids in enumerate(work.block_ids):
            read = max(0, work.first - WINDOW + 1) // size if group else 0
            for place in range(read, first):
                found = hash_of(self.blocks[block_ids[place]])
                assert found == hash_at(work.request, (group, place)), "computed from a wrong block"
            for place in range(first, -(-work.end // size)):
                whole = (place + 1) * size <= work.end
                self.blocks[block_ids[place]] = (work.request, group, place) if whole else None


def place_of(block_id: int, block_ids: tuple[list[int], ...]) -> tuple[int, int]:
    return next((group, ids.index(block_id)) for group, ids in enumerate(block_ids) if block_id in ids)


def load_ahead(engine: Any, program: str, keep_s: float) -> None:
    """Load as much of a program's context into the device as is allowed."""
    adapter = engine.scheduler.sojourn
    keys = adapter.program_scheduler.context(program) or ()
    prefix, loads = adapter._groups.cached_prefix(keys), adapter._prefetcher
    first = prefix.hashes
    count = min(planner(engine).loadable(keys[first:]), loads.budget(program))
    count = adapter._queue.spare_blocks(count, {block.block_id for block in prefix.blocks})
    if count:
        loads.load(program, keys[: first + count], count, adapter._clock() + keep_s)


@pytest.mark.parametrize("failing", [0.0, 0.05])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("policy", ["continuum", "saga", "program-fcfs", "mori", "tetris"])
def test_what_is_loaded_was_computed(
    make_engine: Any, clock: Any, policy: str, asynchronous: bool, failing: float
) -> None:
    device = live(
        make_engine(policy, blocks=60, host_blocks=150, asynchronous=asynchronous, **SHAPE), clock, failing
    )
    assert device.counts["loaded for nobody"]
    assert device.counts["loaded ahead"] > 10


@pytest.mark.parametrize(
    ("policy", "asynchronous", "seed"), [("saga", False, 5), ("mori", True, 5), ("continuum", True, 15)]
)
def test_what_is_loaded_into_windows_was_computed(
    make_engine: Any, clock: Any, policy: str, asynchronous: bool, seed: int
) -> None:
    """Two groups of windows beside full attention: a request continues only from what all of them have."""
    window = window_spec(BLOCK, WINDOW)
    engine = make_engine(
        policy, blocks=90, host_blocks=220, asynchronous=asynchronous, other_groups=(window, window), **SHAPE
    )
    live(engine, clock, failing=0.05, seed=seed)


def live(engine: Any, clock: Any, failing: float, seed: int = 5) -> Device:
    """Let programs come and go until all requests have ended; check that nothing is left behind."""
    blocks = engine.options.blocks
    device, draw, ahead = Device(engine, failing), random.Random(seed), random.Random(seed + 1)
    resets = random.Random(seed + 2)
    contexts: dict[str, list[int]] = {}
    stay: dict[str, Any] = {}

    def abort_one(names: Any) -> None:
        name = draw.choice(sorted(names))
        stay.pop(name, None)
        engine.abort(name)

    for number in range(1, 161):
        program = f"P{draw.randrange(7)}"
        for _ in range(ahead.choice([0, MOST_LOAD_STEPS + 1])):
            load_ahead(engine, program, 1.0)
            device.step()
        context = contexts.get(program, [1, 2, 3, 4, 5, 6, 7, 8])
        if len(context) > 120:
            context = context[: draw.choice([8, 40])]
        context = [*context, *(draw.randrange(9, 30_000) for _ in range(draw.randint(5, 40)))]
        contexts[program] = context
        name, tokens = f"r{number}", draw.randint(4, 60)
        stay[name] = engine.add(name, context, max_tokens=tokens, program_id=program)
        for _ in range(draw.randint(0, 25)):
            clock.now += 0.05
            if ahead.random() < 0.1:
                load_ahead(engine, f"P{ahead.randrange(7)}", ahead.choice([0.1, 1.0]))
            device.step()
            if device.loads and draw.random() < 0.1:
                abort_one(device.loads)
        if draw.random() < 0.05 and engine.scheduler.requests:
            abort_one(engine.scheduler.requests)
        if draw.random() < 0.05:
            engine.tell({"seq": number, "type": "program_end", "program_id": program})
            contexts.pop(program)
        if resets.random() < 0.02:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3000):
        if not engine.scheduler.requests:
            break
        clock.now += 0.05
        device.step()
    for _ in range(MOST_LOAD_STEPS + 2):
        device.step()
    assert not engine.scheduler.requests
    assert all(request.num_output_tokens == request.max_tokens for request in stay.values())
    leased = engine.scheduler.sojourn.program_scheduler.leases.held_blocks
    assert engine.pool.get_num_free_blocks() + leased == blocks - 1
    assert device.counts["loaded"] > 100
    assert device.counts["stored"] > 100
    assert device.counts["preempted"] > 3
    assert device.counts["preempted in mid-step"] or not engine.options.asynchronous
    assert device.counts["not filled"] > 3 or not failing
    assert planner(engine).counts["discarded"] > 3 or not failing
    assert no_load_is_left(engine)
    assert not planner(engine).under_way - len(device.stores)
    assert engine.scheduler.sojourn.failures == 0
    return device
