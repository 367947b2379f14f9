"""Tetris where the world is not as it says: outputs, hints, habits, the link, and clients that leave.

vLLM's own scheduler over our tiers in virtual time. Steps and copies take as long as a test says, and what is
loaded is compared with what was computed. Every engine is strict: an error of ours ends the test.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from planned_steps import Step
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
from sojourn_server.policies.preemption_policies import MOST_PREEMPTIONS
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN, STOP_TOKEN
from sojourn_server.vllm.kv_connector import StepReport
from test_vllm_kv_offload_connector_random import BLOCK, Device, hash_at, hash_of

SHAPE = {
    "blocks": 513,
    "block_size": BLOCK,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 1600,
}
"""Room for 2,048 tokens."""
HOST = {"host_blocks": 800, "own_tiers": True}
MOST_TIMES_CROWDED = 2 * (MOST_PREEMPTIONS + 1)
"""Where everybody is let in, all who run have soon been preempted so often, and the least often goes."""
WISHES = 200
"""In a random life: enough that hundreds of blocks are loaded, whatever is drawn."""
LONGEST_AWAY = 1500
"""Steps. The longest answers take 1,200, and whoever needs what one of them holds waits that long: lives
drawn from other seeds come to 1,250, with a gate and without. More than one in a row would be starving."""

STEP_S = 0.01
TOKEN_S = 0.0005
"""To compute one: a context of 400 tokens takes 0.2 s."""
COPY_S = 0.0002
"""A block's copy, a tenth of what its tokens take: as long as that many steps would be slower is no stall."""


class Timed(Device):
    """Of which each step and each copy takes its time, and which reports it, as the mover does.

    A store begins when those before it are over. One that is awaited is carried out at once; what is saved or
    awaited stops the engine, and what is loaded comes beside computing. Files are read and written at once.
    """

    def __init__(self, engine: Any, clock: Any, copy_s: float = COPY_S) -> None:
        super().__init__(engine)
        self.clock = clock
        self.copy_s = copy_s
        self.ends: dict[int, float] = {}
        self.steps = 0
        self.arriving: list[tuple[float, str, list[Any]]] = []
        """When the blocks of a request will be there, and what it loads."""
        self.filled: set[str] = set()
        """Whose blocks have arrived and have not been reported."""
        self.loading: set[str] = set()
        """Who waits for blocks, after the step that was planned last."""
        self.disk: dict[bytes, Any] = {}
        self.times: Counter[str] = Counter()
        """How often each request was preempted."""
        self.worked: dict[str, int] = {}
        """Of each request, the last step in which something was done for it."""
        self.idle: Counter[str] = Counter()
        """Of each, the most steps in a row in which nothing was, since the first."""

    def step(self) -> None:
        self.steps += 1
        super().step()

    def _plan(self) -> Step:
        step = super()._plan()
        self.loading = {request.request_id for request, _, _ in step.loads}
        self.loading.update(request_id for _, request_id, _ in self.arriving)
        self.times.update(step.planned.preempted_req_ids or ())
        for name in step.work:
            self.idle[name] = max(self.idle[name], self.steps - self.worked.get(name, self.steps))
            self.worked[name] = self.steps
        return step

    def _carry_out(self, step: Step) -> None:
        clock, jobs = self.clock, step.jobs
        results, began = OffloadResults(), clock.now
        if jobs.settles:
            clock.now = max([clock.now, *(loaded_s for loaded_s, _, _ in self.arriving)])
            self._fill_arrived()
        awaited = [job for job in jobs.awaited if job in self.stores]
        for job in awaited:
            clock.now += min(self.copy_s * len(self.stores[job]), max(0.0, self.ends[job] - clock.now))
            self._over(job, results)
        if jobs.saves:
            clock.now += self._moved("to_host", len(jobs.saves), results)
            self._copy_to_host(jobs.saves)
        results.waited_s = clock.now - began
        for job, copies in jobs.stores.items():
            self.stores[job] = copies
            free_s = max([clock.now, *self.ends.values()])
            self.ends[job] = free_s + self.copy_s * len(copies)
            self.slots.update((copy.slot, None) for copy in copies)  # half written
        for request_id in jobs.loads:
            loads = [load for load in step.loads if load[0].request_id == request_id]
            free_s = max([clock.now, *(loaded_s for loaded_s, _, _ in self.arriving)])
            arrives_s = free_s + self._moved("to_device", len(loads), results)
            self.arriving.append((arrives_s, request_id, loads))
        for work in step.work.values():
            self._compute(work)
        clock.now += STEP_S + TOKEN_S * step.planned.total_num_scheduled_tokens
        for job in list(self.stores):
            if self.ends[job] <= clock.now:
                self._over(job, results)
        results.stored |= dict.fromkeys(awaited, CopyResult.MOVED)
        for file in jobs.spills:
            assert hash_of(self.slots[file.slot])[1] == file.key
            self.disk[file.key] = self.slots[file.slot]
            results.spilled[file.key] = CopyResult.MOVED
        for file in jobs.stages:
            self.slots[file.slot] = self.disk[file.key]
            results.staged[file.key] = CopyResult.MOVED
        self._fill_arrived()
        arrived, self.filled = self.filled, set()
        self._answer(step, kv_connector_worker_meta=StepReport(results), finished_recving=arrived)

    def _over(self, job: int, results: Any) -> None:
        copies = self.stores.pop(job)
        del self.ends[job]
        self._moved("to_host", len(copies), results)
        self._copy_to_host(copies)
        self.counts["stored"] += len(copies)
        results.stored[job] = CopyResult.MOVED

    def _moved(self, lane: str, blocks: int, results: Any) -> float:
        took_s = self.copy_s * blocks
        results.seconds[lane] = results.seconds.get(lane, 0.0) + took_s
        size = blocks * self.engine.scheduler.connector.settings.block_bytes
        results.moved_bytes[lane] = results.moved_bytes.get(lane, 0) + size
        return took_s

    def copying(self, request_id: str) -> list[int]:
        """Stores under way of blocks in which is what this request has computed."""
        request = self.engine.scheduler.requests[request_id]

        def is_its(block_id: int) -> bool:
            content = self.blocks.get(block_id)
            return content is not None and content[0] is request

        return [job for job, copies in self.stores.items() if any(is_its(copy.block_id) for copy in copies)]

    def _fill_arrived(self) -> None:
        arrived = [load for load in self.arriving if load[0] <= self.clock.now]
        self.arriving = self.arriving[len(arrived) :]
        for _, _, loads in arrived:
            for request, place, copy in loads:
                content = self.slots[copy.slot]
                assert content is not None, "half written"
                assert hash_of(content) == hash_at(request, place), "a wrong token would follow"
                self.blocks[copy.block_id] = content
            self.counts["loaded"] += len(loads)
        self.filled.update(request_id for _, request_id, _ in arrived)


def nothing_is_left(on: Timed) -> None:
    """All blocks are back, and no preempted context is kept."""
    on.step()
    scheduler = on.engine.scheduler
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == SHAPE["blocks"] - 1
    connector = scheduler.connector
    assert not any(entry.pins for entry in connector.planner.host)
    assert not any(entry.rank == RetentionRank.WANTED for entry in connector.planner.host)
    assert scheduler.sojourn.failures == 0
    assert not connector.off


@pytest.fixture
def crowded(make_engine: Any, clock: Any, tmp_path: Path) -> Any:
    """``crowded(toml, copy_s, **options)``: an engine that keeps nobody out, so that many are preempted."""

    def make(toml: str = 'recovery = "offload"', copy_s: float = 20 * COPY_S, **options: Any) -> Timed:
        path = tmp_path / "everybody.toml"
        path.write_text(f'extends = "tetris"\nadmission = "everyone"\n{toml}\n')
        settings = {"policy_file": str(path)}
        return Timed(make_engine("tetris", settings, **SHAPE, **HOST | options), clock, copy_s)

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["tetris", "everybody enters"])
def test_no_request_starves_under_random_load(
    make_engine: Any, crowded: Any, clock: Any, policy: str, asynchronous: bool
) -> None:
    """At random: kinds, lengths, hints, several requests of one program, strangers, aborts, ends, a link that
    is fast and slow."""
    if policy == "tetris":
        on = Timed(make_engine("tetris", **SHAPE, **HOST, asynchronous=asynchronous), clock)
    else:
        on = crowded(asynchronous=asynchronous)
    engine, draw = on.engine, random.Random(11)
    wanted: dict[str, int] = {}
    requests: dict[str, Any] = {}
    aborted: Counter[str] = Counter()
    ended = 0
    engine.tokens = lambda request: (
        STOP_TOKEN if request.num_output_tokens + 1 >= wanted[request.request_id] else DUMMY_TOKEN
    )

    def arrive(number: int) -> None:
        name = f"r{number}"
        kind, mean = draw.choice((("chat", 30), ("chat", 60), ("solver", 350), (None, 100)))
        wanted[name] = max(1, min(1200, round(draw.lognormvariate(math.log(mean), 0.9))))
        context: dict[str, Any] = {"sojourn": {"agent_type": kind}} if kind else {}
        if draw.random() < 0.3:
            context["expected_output_length"] = max(1, round(wanted[name] * draw.choice((1, 1, 0.01, 100))))
        program = f"P{draw.randrange(number // 4 + 1, number // 4 + 4)}" if draw.random() < 0.85 else None
        prompt = [draw.randrange(9, 30_000) for _ in range(draw.randint(1, 120))]
        requests[name] = engine.add(
            name, prompt, max_tokens=draw.choice((1300, 10**6)), program_id=program, context=context
        )

    number = 0
    while number < WISHES or requests:
        if number < WISHES and len(requests) < 20 and draw.random() < 0.3:
            number += 1
            arrive(number)
        alive = [name for name, request in requests.items() if not request.is_finished()]
        loading = [name for name in alive if name in on.loading]
        copied = [name for name in alive if on.copying(name)] if on.stores else []
        for state, names, share in (
            ("loading", loading, 0.1),
            ("copied", copied, 0.02),
            ("any", alive, 0.01),
        ):
            if names and draw.random() < share:
                aborted[state] += 1
                engine.abort(draw.choice(names))
                break
        if draw.random() < 0.005:
            engine.tell({"seq": on.steps, "type": "program_end", "program_id": f"P{number // 4}"})
        if draw.random() < 0.01:
            on.copy_s = draw.choice((1, 5, 20)) * COPY_S
        on.step()
        for name in [name for name in requests if name not in engine.scheduler.requests]:
            output = requests.pop(name)
            ended += output.num_output_tokens == wanted[name]
        assert on.steps < 20_000, f"nothing ends any more: {sorted(requests)}"
    assert on.steps > 1500
    assert ended + aborted.total() == WISHES
    assert aborted.total() > 10
    assert (aborted["loading"] >= 3 and aborted["copied"]) or policy == "tetris", aborted
    assert on.times.total() > 50
    assert min(on.counts["loaded"], on.counts["stored"]) > 250
    assert max(on.times.values()) <= MOST_TIMES_CROWDED
    assert max(on.idle.values()) < LONGEST_AWAY, "steps without progress for a request"
    nothing_is_left(on)
