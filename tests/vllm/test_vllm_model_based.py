"""Random life against the real block pool: after every operation each block is in exactly one place."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from cache_group_specs import MORE_GROUPS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_driver import check_tables
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

BLOCKS = 40
BLOCK_SIZE = 16
PROGRAMS = st.sampled_from([f"P{n}" for n in range(6)])
POLICIES = ("continuum", "fixed-ttl", "program-fcfs", "saga", "saga-paper")


class EngineLife(RuleBasedStateMachine):
    """Programs come, run, use tools, return, end, vanish; the pool must always add up."""

    policy: str = "fixed-ttl"
    groups: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.requests = 0
        self.sequence = 0
        self.contexts: dict[str, list[int]] = {}
        more = MORE_GROUPS[self.groups]() if self.groups is not None else ()
        self.blocks = BLOCKS * (1 + len(more))
        self.engine = SimulatedEngine(
            SimulatedEngineOptions(
                blocks=self.blocks + 1,
                block_size=BLOCK_SIZE,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                max_model_len=512,
                other_groups=more,
                sojourn={"policy": self.policy, "strict": True, "lease_budget_fraction": 1.0},
            ),
            lambda: self.now,
        )

    def _event(self, **fields: Any) -> None:
        self.sequence += 1
        self.engine.tell({"seq": self.sequence, **fields})

    @rule(program=PROGRAMS, new=st.integers(1, 120), output=st.integers(1, 20), shared=st.booleans())
    def turn(self, program: str, new: int, output: int, shared: bool) -> None:
        start = list(range(48)) if shared else []
        context = self.contexts.get(program, start)
        if len(context) + new + output > 500:
            context = start
        prompt = [*context, *(self.requests * 131 + n for n in range(new))]
        self.requests += 1
        self.contexts[program] = prompt
        self.engine.add(f"r{self.requests}", prompt, max_tokens=output, program_id=program)

    @rule(tokens=st.integers(1, 200))
    def stranger(self, tokens: int) -> None:
        self.requests += 1
        self.engine.add(
            f"r{self.requests}", range(self.requests * 7, self.requests * 7 + tokens), max_tokens=3
        )

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.05
            self.engine.step()

    @rule(program=PROGRAMS)
    def tool_start(self, program: str) -> None:
        self._event(type="tool_start", program_id=program, call_id="c", tool="bash")

    @rule(program=PROGRAMS, duration=st.floats(0, 100))
    def tool_stop(self, program: str, duration: float) -> None:
        self._event(type="tool_stop", program_id=program, call_id="c", duration_s=duration)

    @rule(program=PROGRAMS)
    def heartbeat(self, program: str) -> None:
        self._event(type="heartbeat", program_id=program)

    @rule(program=PROGRAMS)
    def program_end(self, program: str) -> None:
        self._event(type="program_end", program_id=program)
        self.contexts.pop(program, None)

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 40.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.engine.ask("stats")

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    @precondition(lambda self: not self.engine.scheduler.requests)
    @rule()
    def reset(self) -> None:
        assert self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        scheduler = self.engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        adapter = scheduler.sojourn
        queue = pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == queue.num_free_blocks
        users: Counter[int] = Counter()
        for request in scheduler.requests.values():
            for group in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks:
                users.update(block.block_id for block in group if not block.is_null)
        for held in adapter._pinned.values():
            users.update(block.block_id for block in held)
        for block in pool.blocks[1:]:
            assert block.ref_cnt == users[block.block_id]
            assert (block.ref_cnt == 0) == (block.block_id in set(free))

    @invariant()
    def leases_and_held_blocks_agree(self) -> None:
        adapter = self.engine.scheduler.sojourn
        leases = {lease.program.id: lease.blocks for lease in adapter.program_scheduler.state.leases.values()}
        held = {program_id: len(blocks) for program_id, blocks in adapter._pinned.items()}
        assert leases == held
        assert adapter.program_scheduler.leases.held_blocks <= self.blocks

    @invariant()
    def tables_agree(self) -> None:
        check_tables(self.engine.scheduler.sojourn.program_scheduler)

    @invariant()
    def orphans_are_not_common(self) -> None:
        queue = self.engine.scheduler.sojourn._queue
        assert not queue.owners.orphans.keys() & queue.owners.common
        for block_id in queue._ended.blocks:
            assert block_id in queue.owners.orphans, "only what one program alone has used"

    @invariant()
    def every_bucket_stands_where_its_program_stands_now(self) -> None:
        adapter = self.engine.scheduler.sojourn
        queue, order, predictor = adapter._queue, adapter._scorer, adapter.program_scheduler.predictor
        if order is None:
            assert not queue._buckets
            return
        buckets = [bucket for each in queue._buckets.values() for bucket in each.values()]
        moved = order._scale_changes != predictor.scale_changes + order._branches.changes
        for bucket in buckets:
            assert bucket.blocks
            if bucket.program_id not in predictor._changed and bucket.used_s == math.inf:
                assert order.standing(bucket.program_id, None) == bucket.standing
            if not moved:
                assert bucket.place[0] == order.score(bucket.standing)
        if buckets:
            assert sorted(map(id, buckets)) == sorted(map(id, queue._order.ordered()))

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.scheduler.has_unfinished_requests():
                break
            planned = self.engine.step().planned
            self.now += 0.05 if planned.total_num_scheduled_tokens else 1.0
        assert not self.engine.scheduler.has_unfinished_requests(), "a request starves"
        for number in range(6):
            self.program_end(f"P{number}")
        self.now += 5000.0
        assert self.engine.ask("stats")["leases"] == 0
        assert self.engine.pool.get_num_free_blocks() == self.blocks
        assert self.engine.scheduler.sojourn.program_scheduler.state.requests.states == {}


@pytest.mark.parametrize(
    ("policy", "groups", "examples"),
    [
        *((policy, None, 40) for policy in POLICIES),
        ("fixed-ttl", "a window", 40),
        ("saga", "a window", 40),
        ("continuum", "a state", 40),
        ("saga", "a window and a state", 40),
        ("mori", "a window and a state", 2),
        *((policy, "a window and a state", 5) for policy in ("tetris", "sojourn", "observe")),
    ],
)
def test_the_pool_always_adds_up(policy, groups, examples):
    attributes = {"policy": policy, "groups": groups}
    machine = type("EngineLife", (EngineLife,), attributes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
