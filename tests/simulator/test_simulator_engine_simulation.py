"""The loop itself: time, programs, what is counted, and that nothing of ours is in the way of stock."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

pytest.importorskip("vllm")

from simulator_crowded_workload import CROWDED_BLOCKS, crowded_workload
from simulator_small_runs import SmallRun
from simulator_small_workload import BLOCK, SmallLoop, copied_workload, small_workload
from sojourn_server.core.scheduler_state import SchedulerLimits
from sojourn_server.simulator.client_hints import EVENT_SEND_DELAY_S
from sojourn_server.simulator.run_log import RunLog, TurnLog
from sojourn_server.simulator.simulator_policies import find_policy, policy_names

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

POLICIES = policy_names()


def turns(log: RunLog) -> list[TurnLog]:
    return [turn for program in log.programs for turn in program.turns]


def repeatable(log: RunLog) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(log, wall_s=0.0, scheduler_s=0.0))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_every_program_to_its_end(policy: str, asynchronous: bool):
    loop = small_workload(seed=1)
    run = SmallRun(policy, loop, asynchronous=asynchronous)
    assert not run.log.notes
    assert run.log.hook_failures == run.log.refused_hints == 0
    assert {program.program_id for program in run.log.programs} == {p.instance_id for p in loop.programs}
    planned = {p.instance_id: p for p in loop.programs}
    for program in run.log.programs:
        plan = planned[program.program_id]
        assert program.arrived_s >= plan.arrival_s
        assert [turn.output_tokens for turn in program.turns] == [turn.output for turn in plan.turns]
        assert [turn.prompt_tokens for turn in program.turns] == [p.prompt_tokens for p in plan.plans]
        assert program.finished_s == program.turns[-1].finished_s
        for turn in program.turns:
            assert (
                turn.submitted_s <= turn.entered_s <= turn.admitted_s < turn.first_token_s <= turn.finished_s
            )
            found = turn.device_tokens + turn.host_tokens
            if not turn.preemptions:
                assert turn.computed_tokens + found == turn.prompt_tokens
            assert turn.known_tokens % BLOCK == 0
            assert turn.known_tokens - found <= turn.regenerated_tokens <= turn.computed_tokens
        for (before, after), planned_turn in zip(pairwise(program.turns), plan.turns, strict=False):
            assert after.submitted_s == before.finished_s + planned_turn.gap_s


def test_a_step_is_planned_before_the_one_before_it_has_ended():
    """A request that ends is in one more step, whose result is not used."""
    for policy in ("stock", "mori"):
        loop = SmallLoop(small_workload(seed=3).programs[:1])
        at_once, ahead = (SmallRun(policy, loop, asynchronous=which).log for which in (False, True))
        assert ahead.steps == at_once.steps + len(turns(at_once))
        assert [turn.output_tokens for turn in turns(ahead)] == [
            turn.output_tokens for turn in turns(at_once)
        ]
        assert ahead.busy_s > at_once.busy_s


def test_the_same_seed_gives_the_same_bytes():
    for policy in ("stock", "continuum", "thunderagent-offload"):
        first = SmallRun(policy, small_workload(seed=4), until_s=20.0)
        second = SmallRun(policy, small_workload(seed=4), until_s=20.0)
        assert repeatable(first.log) == repeatable(second.log)
        assert first.log.steps


def test_pressure_makes_stock_compute_again_and_a_pool_without_end_does_not():
    loop = small_workload(seed=5)
    stock, unlimited = SmallRun("stock", loop), SmallRun("unlimited", loop)
    assert sum(turn.regenerated_tokens for turn in turns(stock.log)) > 1000
    assert all(turn.regenerated_tokens == 0 for turn in turns(unlimited.log))
    assert unlimited.log.virtual_s < stock.log.virtual_s


def test_whoever_is_preempted_waits_for_as_long_as_its_log_says():
    log = SmallRun("stock", crowded_workload(59)[0], blocks=CROWDED_BLOCKS).log
    waits = [t for t in turns(log) if t.preemptions]
    assert waits
    for turn in turns(log):
        assert (turn.preempted_before_first_token_s + turn.preempted_after_s > 0) <= (turn.preemptions > 0)
        assert turn.preempted_before_first_token_s <= turn.first_token_s - turn.admitted_s
        assert turn.preempted_after_s <= turn.finished_s - turn.first_token_s
    assert sum(t.preempted_before_first_token_s + t.preempted_after_s for t in waits) > 0


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_observe_decides_as_the_untouched_scheduler_does(seed: int):
    """With every hint a client sends, ends of programs among them; ``known-ends`` differs by those alone."""
    lives = {}
    for policy in ("stock", "observe", "known-ends"):
        run = SmallRun(policy, small_workload(seed=seed))
        lives[policy] = [
            (
                life.program_id,
                life.turn,
                life.admitted_s,
                life.first_token_s,
                life.finished_s,
                life.device_tokens,
            )
            for life in turns(run.log)
        ]
    assert lives["observe"] == lives["stock"]
    assert lives["known-ends"] != lives["stock"]


@pytest.mark.parametrize("call_s", [0.0, 0.002])
def test_a_request_that_leaves_when_an_event_does_does_not_overtake_it(call_s: float):
    loop = small_workload(seed=1)
    for program in loop.programs:
        for turn in program.turns:
            turn.gap_s = EVENT_SEND_DELAY_S
    assert SmallRun("continuum", loop, call_s=call_s).log.refused_hints == 0


@pytest.mark.parametrize("policy", ["observe", "continuum"])
def test_the_end_of_a_tool_that_outlasts_the_servers_patience_is_taken(policy: str):
    loop = small_workload(seed=1)
    loop.programs[0].turns[0].gap_s = SchedulerLimits().idle_program_s + 200.0
    run = SmallRun(policy, loop)
    assert run.log.hook_failures == run.log.refused_hints == 0
    assert all(program.finished_s is not None for program in run.log.programs)
    tools = run.engine.scheduler.sojourn.program_scheduler.histories.tools
    assert max(tools.durations()) == loop.programs[0].turns[0].gap_s, "as told, not from request to request"


def test_what_is_counted_is_what_the_adapters_ledger_counts():
    run = SmallRun("continuum-paper", small_workload(seed=6))
    totals = run.engine.ask("stats")["ledger"]
    causes: dict[str, int] = {}
    for turn in turns(run.log):
        for cause, tokens in turn.regenerated.items():
            causes[cause] = causes.get(cause, 0) + tokens
    again = causes.pop("preempted", 0)
    assert causes == {cause: tokens for cause, tokens in totals["lost_tokens"].items() if tokens}
    assert sum(causes.values()) > 0
    assert (again > 0) == (totals["recomputed_after_preemption_tokens"] > 0)
    assert sum(turn.device_tokens for turn in turns(run.log)) == totals["device_tokens"]


def test_copies_to_and_from_host_memory_take_their_time():
    loop = small_workload(seed=7)
    offload, free = SmallRun("lru-offload", loop), SmallRun("free-io", loop)
    assert offload.log.copied_to_host_bytes > 0
    assert offload.log.copied_to_device_bytes > 0
    assert sum(turn.host_tokens for turn in turns(offload.log)) > 0
    assert sum(turn.host_tokens for turn in turns(free.log)) > 0
    assert free.log.copied_to_device_bytes == 0
    waited = [t.first_token_s - t.submitted_s for t in turns(offload.log) if t.host_tokens]
    assert min(waited) > 0


@pytest.mark.parametrize("preset", ["continuum", "saga", "observe"])
def test_our_own_tiers_save_what_the_device_loses_and_load_it_again(preset):
    loop = small_workload(seed=7)
    alone, below = SmallRun(preset, loop), SmallRun(f"{preset}+host", loop)
    assert below.log.copied_to_host_bytes > below.log.copied_to_device_bytes > 0
    found = sum(turn.host_tokens for turn in turns(below.log))
    assert found > 0
    assert below.log.hook_failures == 0
    again = [sum(turn.regenerated_tokens for turn in turns(run.log)) for run in (alone, below)]
    assert again[1] < again[0]
    if not sum(turn.preemptions for turn in turns(below.log)):
        assert below.engine.scheduler.sojourn.program_scheduler.state.ledger.totals.host_tokens == found
    planner = below.engine.scheduler.connector.planner
    assert not any(entry.pins for entry in planner.host)


def test_a_sub_agent_starts_in_the_gap_it_was_recorded_in():
    loop = copied_workload(small_workload(seed=8, programs=3))
    parent, child, beside = loop.programs
    loop.programs = [parent]
    parent.children = [child, beside]
    child.parent_turn, child.delay_s = 0, 0.25
    beside.start_offset_s = 0.5
    log = SmallRun("continuum", SmallLoop([parent])).log
    lives = {program.program_id: program for program in log.programs}
    assert lives["p1"].parent == lives["p2"].parent == "p0"
    assert lives["p1"].arrived_s >= lives["p0"].turns[0].finished_s + 0.25
    assert lives["p2"].arrived_s >= lives["p0"].arrived_s + 0.5
    assert all(program.finished_s is not None for program in log.programs)


def test_a_router_that_lets_nobody_in_is_said_and_does_not_hang():
    class Shut:
        is_open = False
        tick_s = float("inf")

        def select_requests(self, view, now):
            return ()

    log = SmallRun(replace(find_policy("stock"), request_router=Shut), small_workload(seed=9)).log
    assert any("given up" in note for note in log.notes)
    assert all(turn.entered_s is None for turn in turns(log))


def test_stock_runs_without_anything_of_ours_in_its_process(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"program_id": "a", "turns": [{"prompt_tokens": 100, "output_tokens": 10}]}\n')
    code = (
        "import sys\n"
        "from sojourn_server.simulator.simulation_run import RunSpec, run_simulation\n"
        f"spec = RunSpec(policy='stock', workload={str(trace)!r}, programs=1, until_s=5.0)\n"
        "log = run_simulation(spec)\n"
        "assert log.steps > 5, log\n"
        "ours = {m for m in sys.modules if m.startswith('sojourn_server.vllm')}\n"
        "assert ours <= {'sojourn_server.vllm', 'sojourn_server.vllm.compat'}, ours\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
