"""The baselines in vLLM's own scheduler: what they decide there, and that nobody is ever stuck."""

from __future__ import annotations

from typing import Any

import pytest
from simulator_parity_workload import Clock
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

BLOCK = 16


def make_engine(policy: str | None, clock: Clock, **options: Any) -> SimulatedEngine:
    options.setdefault("max_num_seqs", 32)
    settings = None if policy is None else {"policy": policy, "strict": True}
    return SimulatedEngine(SimulatedEngineOptions(block_size=BLOCK, sojourn=settings, **options), clock)


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


def running(engine: SimulatedEngine) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


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


def test_admit_what_outgrows_the_pool_takes_from_the_latest() -> None:
    clock = Clock()
    engine = make_engine("admit", clock, blocks=101)
    contexts = {name: in_a_tool(engine, name, number, 448) for number, name in enumerate("ABC", 1)}
    engine.add("A/1", [*contexts["A"], *prompt(9, 320)], max_tokens=5, program_id="A")
    engine.run()
    held = set(engine.scheduler.sojourn.program_scheduler.state.leases)
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


# -- autellix -----------------------------------------------------------------------------


def serve(engine: SimulatedEngine, clock: Clock, program: str, start: int, seconds: float) -> None:
    """The program runs alone for so long."""
    engine.add(f"{program}/0", prompt(start, 32), max_tokens=5, program_id=program)
    engine.step()
    clock.now += seconds
    engine.run()


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
    (lease,) = program_scheduler.state.leases.values()
    assert lease.ttl_s == pytest.approx(0.641 / 2, rel=0.2), "alone: half of its own recompute"
    clock.now += lease.ttl_s + 0.01
    engine.step()
    assert not len(program_scheduler.state.leases)
