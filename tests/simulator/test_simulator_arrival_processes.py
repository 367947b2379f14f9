"""Arrivals: who, when, in which order, and that neither policy nor chance changes it."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
from sojourn_server.simulator.workloads.arrival_processes import (
    ArrivalProcess,
    ClosedLoop,
    FiniteClosedLoop,
    OpenLoop,
    load_programs,
)
from sojourn_server.simulator.workloads.program_plans import ProgramPlanner
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceTurn

TURNS = (
    TraceTurn(prompt_tokens=50, output_tokens=5, gap_s=1.0),
    TraceTurn(prompt_tokens=80, output_tokens=5),
)


def planner(count: int, *arrivals: float | None) -> ProgramPlanner:
    times = arrivals or (None,) * count
    return ProgramPlanner(
        [
            TraceProgram(program_id=f"p{i}", turns=TURNS, arrival_s=t)
            for i, t in zip(range(count), times, strict=True)
        ]
    )


def test_a_closed_loop_keeps_n_going_for_ever() -> None:
    loop = ClosedLoop(planner(3), 2, seed=1, stagger_s=0.5)
    first = list(loop.initial())
    assert [at_s for at_s, _ in first] == [0.0, 0.5]
    played = [plan for _, plan in first]
    for number in range(10):
        arrival = loop.finished(played[number], 100.0 + number)
        assert arrival is not None
        assert arrival[0] == 100.0 + number
        played.append(arrival[1])
    assert len({plan.instance_id for plan in played}) == 12
    passes = [{plan.trace_id for plan in played[i : i + 3]} for i in range(0, 12, 3)]
    assert passes == [{"p0", "p1", "p2"}] * 4, "each once before any again"
    assert [plan.instance_id[-2:] for plan in played] == ["@0"] * 3 + ["@1"] * 3 + ["@2"] * 3 + ["@3"] * 3


def test_more_at_once_than_there_are_programs() -> None:
    plans = [plan for _, plan in ClosedLoop(planner(2), 5, seed=0).initial()]
    assert len({plan.instance_id for plan in plans}) == 5
    prompts = [tuple(plan.prompt(0)) for plan in plans]
    assert len(set(prompts)) == 5


def names(loop: ArrivalProcess, count: int) -> list[str]:
    return [plan.trace_id for _, plan in itertools.islice(loop.initial(), count)]


def test_the_order_is_the_seeds() -> None:
    programs = planner(30)
    assert names(ClosedLoop(programs, 30, 7), 30) == names(ClosedLoop(programs, 30, 7), 30)
    assert names(ClosedLoop(programs, 30, 7), 30) != names(ClosedLoop(programs, 30, 8), 30)
    assert names(ClosedLoop(programs, 30, 7), 30) == names(OpenLoop(programs, 1.0, None, 7), 30)


def test_who_comes_next_does_not_depend_on_who_finished() -> None:
    loops = [ClosedLoop(planner(9), 3, seed=4) for _ in range(2)]
    running = [[plan for _, plan in loop.initial()] for loop in loops]
    following = []
    for loop, plans in zip(loops, (running[0], running[1][::-1]), strict=True):
        following.append([loop.finished(plan, now)[1].trace_id for now, plan in enumerate(plans)])  # type: ignore[index]
    assert following[0] == following[1]


def test_poisson_arrivals_have_the_rate_and_are_as_many_as_asked_for() -> None:
    programs = planner(40)
    times = [at_s for at_s, _ in OpenLoop(programs, 2.0, 5000, seed=3).initial()]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert len(times) == 5000
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.06)
    once = list(OpenLoop(programs, 2.0, None, seed=3).initial())
    assert sorted(plan.trace_id for _, plan in once) == sorted(root.program_id for root in programs.roots)
    assert OpenLoop(programs, 2.0, None, seed=3).finished(once[0][1], 1.0) is None


def test_a_burst_arrives_together_and_the_rate_stays() -> None:
    times = [at_s for at_s, _ in OpenLoop(planner(40), 2.0, 5000, seed=3, burst=10).initial()]
    assert [times.count(at_s) for at_s in dict.fromkeys(times)] == [10] * 500
    assert times[-1] / 5000 == pytest.approx(0.5, rel=0.1)


def test_a_workload_is_a_file_or_a_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    turn = '{"prompt_tokens":5,"output_tokens":5}'
    path.write_text(f'{{"program_id":"p","turns":[{turn},{turn}]}}\n')
    assert [p.program_id for p in load_programs(str(path))] == ["p"]
    assert load_programs("synthetic:continuum-bfcl", seed=3)[0].source == "synthetic:continuum-bfcl"
    assert len(list(OpenLoop(ProgramPlanner(load_programs(str(path))), 1.0, 4, seed=0).initial())) == 4
    with pytest.raises(TraceError, match="No such file"):
        load_programs(str(tmp_path / "none"))


def test_a_finite_loop_plays_each_program_once_and_in_order() -> None:
    loop = FiniteClosedLoop(planner(5), 2, stagger_s=0.5)
    first = list(loop.initial())
    assert [(at_s, plan.trace_id) for at_s, plan in first] == [(0.0, "p0"), (0.5, "p1")]
    later = [loop.finished(first[0][1], 7.0) for _ in range(4)]
    assert [arrival and (arrival[0], arrival[1].trace_id) for arrival in later] == [
        (7.0, "p2"), (7.0, "p3"), (7.0, "p4"), None,
    ]  # fmt: skip
