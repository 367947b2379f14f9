"""Hints that simulated clients state: true, wrong by half, hostile; and turns that wait for sub-agents."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from script_modules import benchmark
from sojourn_server.simulator.event_queue import EventQueue
from sojourn_server.simulator.workloads.program_plans import ProgramPlan, ProgramPlanner

hint_value, stated_hints = benchmark("hint_value"), benchmark("stated_hints")
ALL = (*stated_hints.HOSTILE, "aeg")


def plans_of(load: str) -> list[ProgramPlan]:
    planner = ProgramPlanner(hint_value.LOADS[load].draw(0))
    return [planner.plan(number) for number in range(len(planner))]


def client(plan: ProgramPlan, **setting: Any) -> Any:
    setting = stated_hints.HintSetting(**setting)
    return stated_hints.StatedHints(plan, None, "a", setting, EventQueue())


def numbers(plan: ProgramPlan, **setting: Any) -> list[float]:
    stated = ("expected_steps_left",)
    one = client(plan, stated=stated, **setting)
    return [one.context()["sojourn"]["expected_steps_left"] for _ in plan.plans]


def test_true_hints_say_what_follows_and_only_what_is_asked_for() -> None:
    plan = plans_of("branches")[0]
    turns = len(plan.plans)
    one = client(plan, stated=ALL)
    events = one.start_events()
    assert [event["type"] for event in events] == ["program_start", "aeg"]
    assert {node["id"] for node in events[1]["graph"]["nodes"]} == {"plan", "work", "join"}
    contexts = [one.context() for _ in range(turns)]
    assert [context["sojourn"]["expected_steps_left"] for context in contexts] == [*range(turns - 1, -1, -1)]
    assert [context["sojourn"]["final"] for context in contexts] == [False] * (turns - 1) + [True]
    assert [context["sojourn"]["node"] for context in contexts[:2]] == ["plan", "work"]
    assert contexts[0]["expected_output_length"] == 800
    run = plans_of("known tools")[0].tool_runs(0)[0]
    assert one.tool_start("c", run)["expected_s"] == run.s
    silent = client(plan)
    assert silent.context() == {"step_id": "1", "sojourn": {"agent_type": "a", "node": "agent"}}
    assert "expected_s" not in silent.tool_start("c", run)
    assert client(plan, ends=False).end_events() == []


def test_liars_state_what_would_help_them_and_the_others_the_truth() -> None:
    for plan in plans_of("step limits"):
        true, half = numbers(plan), numbers(plan, quality="half")
        assert half in ([left / 2 for left in true], [left * 2 for left in true])
        lies = stated_hints.HintSetting(quality="hostile", liars=0.5).lies(plan.instance_id)
        assert numbers(plan, quality="hostile", liars=0.5) == ([0.0] * len(true) if lies else true)
    plan = plans_of("branches")[0]
    graph = client(plan, stated=ALL, quality="hostile").start_events()[1]["graph"]
    assert {("work", "work"), ("join", "join")} <= {(one["source"], one["target"]) for one in graph["edges"]}


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_a_turn_waits_for_the_last_of_its_sub_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine accepts every hint, true or not."""
    logs = []
    run_simulation, setting = hint_value.run_simulation, hint_value.setting

    def simulated(*arguments: Any, **more: Any) -> Any:
        logs.append(run_simulation(*arguments, **more))
        return logs[-1]

    monkeypatch.setattr(hint_value, "run_simulation", simulated)
    monkeypatch.setattr(hint_value, "setting", lambda run: replace(setting(run), stated=ALL))
    for load in ("fan-out", "urgent, gateway"):
        monkeypatch.setitem(hint_value.LOADS, load, replace(hint_value.LOADS[load], programs=4))
        for quality in hint_value.QUALITIES:
            hint_value.play(hint_value.Run(load=load, policy="saga", hint="aeg", quality=quality))
    waits = 0
    for log in logs[:3]:
        ends = defaultdict(list)
        for program in log.programs:
            assert program.finished_s is not None
            if program.parent is not None:
                ends[program.parent].append(program.finished_s)
        for program in log.programs:
            if program.parent is None:
                waits += 1
                assert all(turn.submitted_s in ends[program.program_id] for turn in program.turns[1:])
                assert program.turns[-1].submitted_s == max(ends[program.program_id])
    assert waits == 12
