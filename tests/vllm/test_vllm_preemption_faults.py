"""Tetris where the world is not as it says: outputs, hints, habits, the link, and clients that leave.

vLLM's own scheduler over our tiers in virtual time. Steps and copies take as long as a test says, and what is
loaded is compared with what was computed. Every engine is strict: an error of ours ends the test.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from sojourn_server.core.events_and_actions import RequestChosen, VictimNeeded
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.policies.preemption_policies import MOST_PREEMPTIONS
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN, STOP_TOKEN
from test_vllm_kv_offload_connector_random import BLOCK, Device, Step, hash_at, hash_of

SHAPE = {
    "blocks": 513,
    "block_size": BLOCK,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 1600,
}
"""Room for 2,048 tokens."""
HOST = {"host_blocks": 800, "own_tiers": True}
MOST_TIMES = MOST_PREEMPTIONS + 1
"""Thrice, and once more where all who run have been preempted so often."""
MOST_TIMES_CROWDED = 2 * MOST_TIMES
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
    awaited stops the engine, and what is loaded comes beside computing.
    """

    def __init__(self, engine: Any, clock: Any, copy_s: float = COPY_S) -> None:
        super().__init__(engine)
        planner = engine.scheduler.connector.planner
        cancel_load = planner.cancel_load

        def cancelled(request_id: str) -> None:
            self.times[request_id] += 1
            self.counts["given up"] += 1
            cancel_load(request_id)

        planner.cancel_load = cancelled
        self.clock = clock
        self.copy_s = copy_s
        self.ends: dict[int, float] = {}
        self.over_now: Callable[[int], bool] = lambda job: False
        """Stores that end with this step, whenever they would."""
        self.steps = 0
        self.waited_s = 0.0
        self.arriving: list[tuple[float, str, list[Any]]] = []
        """When the blocks of a request will be there, and what it loads."""
        self.filled: set[str] = set()
        """Whose blocks have arrived and have not been reported."""
        self.loading: set[str] = set()
        """Who waits for blocks, after the step that was planned last."""
        self.back: deque[set[str]] = deque([set()], maxlen=3)
        """Whose blocks have arrived in the newest steps."""
        self.left: dict[str, list[int]] = {}
        """Who was preempted in it, and which stores of what they had were under way."""
        self.times: Counter[str] = Counter()
        self.worked: dict[str, int] = {}
        """Of each request, the last step in which something was done for it."""
        self.idle: Counter[str] = Counter()
        """Of each, the most steps in a row in which nothing was, since the first."""

    def step(self) -> None:
        self.steps += 1
        super().step()

    def _plan(self) -> Step:
        stores = {name: self.copying(name) for name in self.engine.scheduler.requests} if self.stores else {}
        step = super()._plan()
        self.left = {name: stores.get(name, []) for name in step.planned.preempted_req_ids or ()}
        self.loading = {request.request_id for request, _, _ in step.loads}
        self.loading.update(request_id for _, request_id, _ in self.arriving)
        self.times.update(step.planned.preempted_req_ids or ())
        for name in step.work:
            self.idle[name] = max(self.idle[name], self.steps - self.worked.get(name, self.steps))
            self.worked[name] = self.steps
        return step

    def _carry_out(self, step: Step) -> None:
        from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults

        clock, jobs = self.clock, step.planned.kv_connector_metadata.jobs
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
        self.waited_s += results.waited_s
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
            if self.ends[job] <= clock.now or self.over_now(job):
                self._over(job, results)
        results.stored |= dict.fromkeys(awaited, CopyResult.MOVED)
        self._answer(step, results)

    def _over(self, job: int, results: Any) -> None:
        from sojourn_server.kv_offload.offload_jobs import CopyResult

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

    def _take_arrived(self) -> set[str]:
        self._fill_arrived()
        self.back.append(self.filled)
        self.filled = set()
        return self.back[-1]

    def _answer(self, step: Step, results: Any) -> None:
        from sojourn_server.vllm.kv_connector import StepReport
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.engine.scheduler.update_from_output(
            step.planned,
            ModelRunnerOutput(
                req_ids=list(step.work),
                req_id_to_index={name: index for index, name in enumerate(step.work)},
                sampled_token_ids=[
                    [self.engine.tokens(work.request)] if work.samples else [] for work in step.work.values()
                ],
                kv_connector_output=KVConnectorOutput(
                    kv_connector_worker_meta=StepReport(results), finished_recving=self._take_arrived()
                ),
            ),
        )


class Wish(NamedTuple):
    """A program of one request."""

    kind: str
    tokens: int
    """That it writes, unless the engine ends it."""


class Run(NamedTuple):
    """What became of them."""

    times: Counter[str]
    written: dict[str, int]


def serve(on: Timed, wishes: Sequence[Wish], *, each_step: Callable[[], None] = lambda: None) -> Run:
    """16 of them, the next as one ends, until all have ended or were aborted in ``each_step``."""
    engine, written = on.engine, {}
    steps, times = on.steps, on.times.copy()
    requests: dict[str, Any] = {}
    by_name = {f"r{number}": wish for number, wish in enumerate(wishes)}
    engine.tokens = lambda request: (
        STOP_TOKEN if request.num_output_tokens + 1 >= by_name[request.request_id].tokens else DUMMY_TOKEN
    )
    waiting = list(by_name)[::-1]
    while waiting or requests:
        while waiting and len(requests) < 16:
            name = waiting.pop()
            context = {"sojourn": {"agent_type": by_name[name].kind}}
            requests[name] = engine.add(
                name, some_tokens(name, 20), max_tokens=1500, program_id=name, context=context
            )
        on.step()
        each_step()
        for name in [name for name in requests if name not in engine.scheduler.requests]:
            written[name] = requests.pop(name).num_output_tokens
        assert on.steps - steps < 40_000, f"nothing ends any more: {sorted(requests)}"
    return Run(on.times - times, written)


@pytest.fixture
def tetris(make_engine: Any, clock: Any) -> Timed:
    return Timed(make_engine("tetris", **SHAPE, **HOST), clock)


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


def some_tokens(name: str, count: int) -> list[int]:
    """Others for each name."""
    draw = random.Random(name)
    return [draw.randrange(9, 30_000) for _ in range(count)]


def mixed(count: int) -> list[Wish]:
    """A third think long."""
    draw = random.Random(0)
    wishes = []
    for _ in range(count):
        kind, mean = draw.choice((("chat", 40), ("chat", 40), ("solver", 400)))
        tokens = max(2, min(1200, round(draw.lognormvariate(math.log(mean) - 0.32, 0.8))))
        wishes.append(Wish(kind, tokens))
    return wishes


# -- the link, and who leaves in mid-copy -----------------------------------------------------------


EVERYBODY = """
extends = "tetris"
admission = "everyone"
recovery = "offload"
"""
"""Nobody is kept out, so that many are preempted, and all that is lost is copied."""


@pytest.fixture
def crowded(make_engine: Any, clock: Any, tmp_path: Any) -> Callable[..., Timed]:
    """``crowded(asynchronous, copy_s)``: an engine that preempts and copies a lot."""
    target = tmp_path / "everybody.toml"
    target.write_text(EVERYBODY)

    def make(asynchronous: bool, copy_s: float = 20 * COPY_S) -> Timed:
        settings = {"policy_file": str(target)}
        return Timed(
            make_engine("tetris", settings, **SHAPE, **HOST, asynchronous=asynchronous), clock, copy_s
        )

    return make


def everybody_ended(run: Run, wishes: Sequence[Wish]) -> None:
    """Having written all they wanted to, though many were preempted."""
    assert run.written == {f"r{number}": wish.tokens for number, wish in enumerate(wishes)}
    assert run.times.total() > 50


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_during_a_copy_loses_no_block(crowded: Any, asynchronous: bool) -> None:
    on, draw = crowded(asynchronous, 80 * COPY_S), random.Random(2)
    scheduler = on.engine.scheduler
    aborted: Counter[str] = Counter()

    def abort_some() -> None:
        for name, request in list(scheduler.requests.items()):
            state = "loading" if name in on.loading else request.status.name
            share = {"RUNNING": 1.0, "loading": 0.2}.get(state, 0.1)
            if request.is_finished():  # it still holds what is being loaded for it
                continue
            if (name in on.loading or on.copying(name)) and draw.random() < share:
                aborted[state] += 1
                on.engine.abort(name)

    wishes = mixed(320)
    run = serve(on, wishes, each_step=abort_some)
    assert min(aborted[state] for state in ("PREEMPTED", "loading")) >= 3
    assert aborted["RUNNING"] >= 1, "while a copy ahead is made"
    short_of = sum(run.written[f"r{n}"] < wish.tokens for n, wish in enumerate(wishes))
    assert short_of == aborted.total()
    nothing_is_left(on)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_as_the_copy_ahead_ends(crowded: Any, asynchronous: bool) -> None:
    on = crowded(asynchronous)
    ended: Counter[str] = Counter()

    def ends_now(job: int) -> bool:
        if any(job in jobs for jobs in on.left.values()):
            ended["now"] += 1
            return True
        return False

    on.over_now = ends_now
    wishes = mixed(300)
    run = serve(on, wishes)
    assert ended["now"] >= 3
    everybody_ended(run, wishes)
    assert on.counts["given up"] >= 3
    assert max(run.times.values()) <= MOST_TIMES_CROWDED
    nothing_is_left(on)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_as_the_reload_ends(
    crowded: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, draw = crowded(asynchronous), random.Random(4)
    program_scheduler = on.engine.scheduler.sojourn.program_scheduler
    handle, chosen = program_scheduler.handle, Counter()

    def just_loaded(event: Any, now: float) -> Any:
        if isinstance(event, VictimNeeded):
            back = [view.request_id for view in event.running if view.request_id in set().union(*on.back)]
            if back and draw.random() < 0.7:
                chosen[back[0]] += 1
                return [RequestChosen(back[0])]
        return handle(event, now)

    monkeypatch.setattr(program_scheduler, "handle", just_loaded)
    wishes = mixed(120)
    run = serve(on, wishes)
    assert chosen.total() >= 5
    everybody_ended(run, wishes)
    nothing_is_left(on)


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
        on = crowded(asynchronous)
    engine, draw = on.engine, random.Random(11)
    wanted: dict[str, int] = {}
    requests: dict[str, Any] = {}
    arrived: dict[str, int] = {}
    longest, aborted, ended = 0, 0, 0
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
        arrived[name] = on.steps

    number = 0
    while number < WISHES or requests:
        if number < WISHES and len(requests) < 20 and draw.random() < 0.3:
            number += 1
            arrive(number)
        if draw.random() < 0.01 and requests:
            aborted += 1
            engine.abort(draw.choice(sorted(requests)))
        if draw.random() < 0.005:
            engine.tell({"seq": on.steps, "type": "program_end", "program_id": f"P{number // 4}"})
        if draw.random() < 0.01:
            on.copy_s = draw.choice((1, 5, 20)) * COPY_S
        on.step()
        for name in [name for name in requests if name not in engine.scheduler.requests]:
            output = requests.pop(name)
            ended += output.num_output_tokens == wanted[name]
            longest = max(longest, on.steps - arrived[name])
        assert on.steps < 20_000, f"nothing ends any more: {sorted(requests)}"
    assert on.steps > 1500
    assert ended + aborted == WISHES
    assert aborted > 10
    assert on.times.total() > 50
    assert min(on.counts["loaded"], on.counts["stored"]) > 250
    assert max(on.times.values()) <= MOST_TIMES_CROWDED
    assert max(on.idle.values()) < LONGEST_AWAY, "steps without progress for a request"
    nothing_is_left(on)


def away(on: Timed, *request_ids: str) -> None:
    """Preempts these, as the engine would."""
    scheduler = on.engine.scheduler
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, on.clock.now)


def kept(on: Timed, request: Any) -> int:
    """Return a request's computed blocks that host memory keeps."""
    host = on.engine.scheduler.connector.planner.host
    entries = [entry for entry in map(host.get, request.block_hashes) if entry is not None]
    return sum(entry.rank == RetentionRank.WANTED for entry in entries)


@pytest.fixture
def endless(crowded: Any) -> Callable[..., Any]:
    """``endless(name, tokens, program)``: a request on ``endless.on``, where outputs do not end."""
    on = crowded(False, COPY_S)
    on.engine.tokens = lambda request: DUMMY_TOKEN

    def add(name: str, tokens: int, program: str, max_tokens: int = 300) -> Any:
        prompt = some_tokens(name, tokens)
        return on.engine.add(name, prompt, max_tokens=max_tokens, program_id=program)

    add.on = on  # type: ignore[attr-defined]
    return add


@pytest.mark.parametrize("aborted", [False, True])
def test_each_of_two_requests_of_a_program_that_are_away_is_kept_until_it_is_back(
    endless: Any, aborted: bool
) -> None:
    on = endless.on
    first, second = endless("a", 100, "P"), endless("b", 100, "P")
    for _ in range(20):
        on.step()
    scheduler = on.engine.scheduler
    below = scheduler.sojourn._offload
    for name in "ab":
        below.copy_ahead(
            [block for block in scheduler.kv_cache_manager.get_blocks(name).blocks[0] if block.block_hash]
        )
    away(on, "a", "b")
    assert kept(on, first) >= 25
    assert kept(on, second) >= 25
    if aborted:
        on.engine.abort("a")
        on.engine.abort("b")
    else:
        below.release_preempted("a", "P", first.block_hashes)
        assert kept(on, first) == 0
        assert kept(on, second) >= 25
        while scheduler.requests:
            on.step()
    nothing_is_left(on)
