"""The baselines in vLLM's own scheduler: what they decide there, and that nobody is ever stuck."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from sojourn_server.policies.preset import preset_names
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.simulator.simulator_policies import BASELINES

BLOCK = 16
MINE = sorted({baseline.preset for baseline in BASELINES.values() if baseline.preset})
OTHERS = [
    "observe",
    "known-ends",
    "fixed-ttl",
    *(name for name in preset_names() if name.startswith(("mori", "saga", "sojourn", "tetris"))),
]


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(policy: str | None, clock: Clock, **options: Any) -> SimulatedEngine:
    options.setdefault("max_num_seqs", 32)
    settings = None if policy is None else {"policy": policy, "strict": True}
    return SimulatedEngine(SimulatedEngineOptions(block_size=BLOCK, sojourn=settings, **options), clock)


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


def running(engine: SimulatedEngine) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


class Agents:
    """Programs that take turns with tools in between, in a closed loop, until all have ended."""

    def __init__(
        self, engine: SimulatedEngine, clock: Clock, seed: int, *, at_once: int, programs: int
    ) -> None:
        self.engine, self.clock = engine, clock
        self.random = random.Random(seed)
        self.to_come = [f"P{number}" for number in range(programs)]
        self.contexts: dict[str, list[int]] = {}
        self.turns_left: dict[str, int] = {}
        self.returns_s: dict[str, float] = {}
        self.finished: list[str] = []
        self.preemptions = 0
        self.requests = 0
        self._sequence = Counter[str]()
        for _ in range(at_once):
            self._begin()

    def live(self, max_s: float) -> None:
        """Go on until all have ended, for at most ``max_s`` virtual seconds."""
        end_s = self.clock.now + max_s
        while (self.contexts or self.to_come) and self.clock.now < end_s:
            for program in [name for name, at_s in self.returns_s.items() if at_s <= self.clock.now]:
                del self.returns_s[program]
                self._turn(program)
            result = self.engine.step()
            tokens = result.planned.total_num_scheduled_tokens
            self.preemptions += len(result.planned.preempted_req_ids or ())
            self.clock.now += 0.01 + tokens * 1e-3 if tokens else 0.05
            for request_id in result.finished:
                self._finished(request_id.partition("/")[0])

    def _tell(self, program: str, **event: Any) -> None:
        if self.engine.options.sojourn is not None:
            self._sequence[program] += 1
            self.engine.tell(
                {"program_id": program, "seq": self._sequence[program], **event}, emitter=program
            )

    def _begin(self) -> None:
        if self.to_come:
            program = self.to_come.pop(0)
            self.contexts[program] = prompt(len(self.to_come) + 1, self.random.randrange(32, 160))
            self.turns_left[program] = self.random.randrange(2, 7)
            self._turn(program)

    def _turn(self, program: str) -> None:
        self.requests += 1
        self.contexts[program] += [
            9_000_000 + self.requests * 100 + n for n in range(self.random.randrange(4, 60))
        ]
        output = self.random.randrange(2, 30)
        self.engine.add(
            f"{program}/{self.requests}", self.contexts[program], max_tokens=output, program_id=program
        )
        self.contexts[program] += [7] * output

    def _finished(self, program: str) -> None:
        self.turns_left[program] -= 1
        if self.turns_left[program]:
            self._tell(program, type="tool_start", call_id="c", tool="bash")
            self.returns_s[program] = self.clock.now + self.random.choice([0.02, 0.3, 1.0, 8.0])
        else:
            self._tell(program, type="program_end", status="ok")
            del self.contexts[program]
            self.finished.append(program)
            self._begin()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("policy", [*MINE, *OTHERS])
def test_a_pressed_workload_runs_to_its_end(policy: str, seed: int) -> None:
    """Ten programs at once whose contexts grow to three times the pool."""
    clock = Clock()
    engine = make_engine(policy, clock, blocks=61, max_model_len=960, max_num_batched_tokens=128)
    agents = Agents(engine, clock, seed, at_once=10, programs=20)
    agents.live(3000.0)
    assert sorted(agents.finished) == sorted(f"P{number}" for number in range(20))
    adapter = engine.scheduler.sojourn
    assert adapter.failures == 0
    engine.step()
    assert engine.pool.get_num_free_blocks() == 60
    assert not adapter.program_scheduler.state.requests.states
    assert adapter.program_scheduler.state.requests.running_tokens == 0
    assert len(adapter.program_scheduler.state.leases) == 0


def test_every_preset_is_tried_above() -> None:
    assert {*MINE, *OTHERS} == set(preset_names())


def test_the_workload_above_does_press() -> None:
    clock = Clock()
    engine = make_engine("observe", clock, blocks=61, max_model_len=960, max_num_batched_tokens=128)
    agents = Agents(engine, clock, 1, at_once=10, programs=20)
    agents.live(3000.0)
    assert agents.preemptions > 0


# -- admit ------------------------------------------------------------------------------


def in_a_tool(engine: SimulatedEngine, program: str, start: int, tokens: int, seq: int = 1) -> list[int]:
    """A program has taken a turn and is now in a tool; returns its context."""
    engine.add(f"{program}/0", prompt(start, tokens), max_tokens=1, program_id=program)
    engine.run()
    engine.tell(
        {"type": "tool_start", "program_id": program, "seq": seq, "call_id": "c", "tool": "bash"},
        emitter=program,
    )
    return [*prompt(start, tokens), 7]


def test_admit_lets_nobody_in_who_does_not_fit_beside_programs_in_their_tools() -> None:
    inside = {}
    for policy in ("admit", "continuum-paper"):
        clock = Clock()
        engine = make_engine(policy, clock, blocks=101)
        in_a_tool(engine, "A", 1, 800)
        engine.add("B/0", prompt(2, 800), max_tokens=200, program_id="B")
        engine.add("plain", prompt(3, 32), max_tokens=5)
        for _ in range(3):
            clock.now += 1.0
            engine.step()
        inside[policy] = running(engine)
    assert inside == {"admit": {"plain"}, "continuum-paper": {"B/0", "plain"}}


def test_admit_counts_prompts_that_are_not_computed_yet() -> None:
    """Blocks are taken piece by piece as a long prompt is computed: what is still to come is not free."""
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101, max_num_batched_tokens=64)
    engine.add("A/0", prompt(1, 960), max_tokens=5, program_id="A")
    engine.add("B/0", prompt(2, 960), max_tokens=5, program_id="B")
    engine.step()
    assert engine.pool.get_num_free_blocks() > 90
    assert running(engine) == {"A/0"}
    for _ in range(3):
        engine.step()
    assert running(engine) == {"A/0"}


def test_admit_lets_the_next_in_when_one_ends() -> None:
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101)
    in_a_tool(engine, "A", 1, 800)
    engine.add("B/0", prompt(2, 800), max_tokens=5, program_id="B")
    engine.add("C/0", prompt(3, 800), max_tokens=5, program_id="C")
    engine.step()
    assert running(engine) == set()
    engine.tell({"type": "program_end", "program_id": "A", "seq": 2, "status": "ok"}, emitter="A")
    engine.step()
    assert running(engine) == {"B/0"}, "in order of arrival"


def test_admit_what_outgrows_the_pool_takes_from_the_latest() -> None:
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101)
    contexts = {name: in_a_tool(engine, name, number, 448) for number, name in enumerate("ABC", 1)}
    engine.add("A/1", [*contexts["A"], *prompt(9, 320)], max_tokens=5, program_id="A")
    engine.run()
    held = {lease.program_id for lease in engine.scheduler.sojourn.program_scheduler.state.leases}
    assert held == {"B"}
    engine.add("B/1", [*contexts["B"], *prompt(8, 16)], max_tokens=5, program_id="B")
    planned = engine.step().planned
    assert planned.scheduled_new_reqs[0].num_computed_tokens == 448


def test_admit_a_sub_agent_whose_parent_holds_the_pool_gets_in_after_a_while() -> None:
    """The parent waits for it, so nothing would ever move: an idle engine opens after half a minute."""
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101)
    in_a_tool(engine, "parent", 1, 1280)
    engine.add(
        "child/0", prompt(2, 640), max_tokens=5, program_id="child", context={"parent_program_id": "parent"}
    )
    waited_s = 0.0
    while not running(engine) and waited_s < 100.0:
        engine.step()
        clock.now += 1.0
        waited_s += 1.0
    assert 30.0 <= waited_s <= 33.0
    engine.run()
    assert not engine.scheduler.has_unfinished_requests()


def test_admit_a_program_that_exceeds_what_is_left_waits_and_then_runs_alone() -> None:
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101, max_model_len=1600)
    context = in_a_tool(engine, "A", 1, 320)
    engine.add("B/0", prompt(2, 1580), max_tokens=10, program_id="B")
    engine.add("A/1", [*context, *prompt(3, 16)], max_tokens=300, program_id="A")
    for _ in range(20):
        clock.now += 0.1
        engine.step()
    assert running(engine) == {"A/1"}
    while running(engine) == {"A/1"}:
        clock.now += 0.1
        engine.step()
    engine.tell({"type": "program_end", "program_id": "A", "seq": 2, "status": "ok"}, emitter="A")
    engine.step()
    assert running(engine) == {"B/0"}
    engine.run()
    assert not engine.scheduler.has_unfinished_requests()


# -- autellix -----------------------------------------------------------------------------


def serve(engine: SimulatedEngine, clock: Clock, program: str, start: int, seconds: float) -> None:
    """The program runs alone for so long."""
    engine.add(f"{program}/0", prompt(start, 32), max_tokens=5, program_id=program)
    engine.step()
    clock.now += seconds
    engine.run()


def test_autellix_serves_the_program_first_that_was_served_least() -> None:
    clock = Clock()
    engine = make_engine("autellix", clock, blocks=201, max_num_seqs=1)
    serve(engine, clock, "long", 1, 40.0)
    serve(engine, clock, "short", 2, 3.0)
    engine.add("busy", prompt(3, 32), max_tokens=3)
    engine.step()
    for name in ("long", "short", "new"):
        engine.add(f"{name}/1", prompt(5, 32), max_tokens=2, program_id=name)
    order = []
    while engine.scheduler.has_unfinished_requests():
        order += engine.step().finished
    assert order == ["busy", "new/1", "short/1", "long/1"]


def test_autellix_who_waited_too_long_goes_before_newcomers() -> None:
    """Filed anew when its time has come, though nothing happens to it: 8 times its 3 seconds of service."""
    finished_s = {}
    clock = Clock()
    engine = make_engine("autellix", clock, blocks=201, max_num_seqs=1)
    serve(engine, clock, "old", 1, 3.0)
    started_s = clock.now
    engine.add("old/1", prompt(2, 32), max_tokens=2, program_id="old")
    for number in range(60):
        engine.add(f"n{number}/0", prompt(100 + number, 32), max_tokens=2, program_id=f"n{number}")
        for _ in range(2):  # a newcomer arrives and is served every second
            for request_id in engine.step().finished:
                finished_s[request_id] = clock.now - started_s
            clock.now += 0.5
    assert 24.0 <= finished_s["old/1"] <= 26.0
    assert finished_s["n5/0"] < finished_s["old/1"]
    assert engine.scheduler.sojourn.failures == 0


def test_autellix_takes_from_whoever_attained_most_when_kv_runs_out() -> None:
    clock = Clock()
    engine = make_engine("autellix", clock, blocks=21)
    serve(engine, clock, "old", 1, 10.0)
    engine.add("old/1", prompt(2, 150), max_tokens=100, program_id="old")
    engine.step()
    engine.add("new/0", prompt(3, 150), max_tokens=100, program_id="new")
    preempted: set[str] = set()
    while engine.scheduler.has_unfinished_requests():
        preempted |= set(engine.step().planned.preempted_req_ids or ())
        clock.now += 0.001
    assert preempted == {"old/1"}


# -- infercept ------------------------------------------------------------------------------


def test_infercept_lets_go_when_keeping_wastes_more() -> None:
    clock = Clock()
    engine = make_engine("infercept", clock, blocks=101)
    reload = engine.scheduler.sojourn.program_scheduler.state.reload
    for _ in range(50):
        reload.observe_step(1000, 1.0)  # a millisecond a token
    engine.add("A/0", prompt(1, 640), max_tokens=1, program_id="A")
    engine.step()
    engine.tell({"type": "tool_start", "program_id": "A", "seq": 1, "call_id": "c", "tool": "bash"})
    program_scheduler = engine.scheduler.sojourn.program_scheduler
    (lease,) = program_scheduler.state.leases
    assert lease.ttl_s == pytest.approx(0.641 / 2, rel=0.2), "alone: half of its own recompute"
    clock.now += lease.ttl_s + 0.01
    engine.step()
    assert not len(program_scheduler.state.leases)


def test_infercept_knows_of_a_host_tier_only_where_there_is_one() -> None:
    engine = make_engine("infercept", Clock(), blocks=101)
    assert engine.scheduler.sojourn.program_scheduler.pool.host_s_per_token is None
    assert (
        engine.scheduler.sojourn.program_scheduler.pool.step_tokens == engine.options.max_num_batched_tokens
    )
