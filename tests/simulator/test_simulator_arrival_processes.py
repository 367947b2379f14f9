"""Arrivals: who, when, in which order, and that neither policy nor chance changes it."""

from __future__ import annotations

import itertools
import statistics

import pytest
from sojourn_server.simulator.workloads.arrival_processes import (
    ArrivalProcess,
    closed_loop,
    finite_closed_loop,
    open_loop,
)
from sojourn_server.simulator.workloads.program_plans import ProgramPlanner
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

TURNS = (
    TraceTurn(prompt_tokens=50, output_tokens=5, gap_s=1.0),
    TraceTurn(prompt_tokens=80, output_tokens=5),
)


def planner(count: int) -> ProgramPlanner:
    return ProgramPlanner([TraceProgram(program_id=f"p{i}", turns=TURNS) for i in range(count)])


def test_a_closed_loop_keeps_n_going_for_ever() -> None:
    loop = closed_loop(planner(3), 2, seed=1, stagger_s=0.5)
    first = list(loop.initial)
    assert [at_s for at_s, _ in first] == [0.0, 0.5]
    played = [*(plan for _, plan in first), *itertools.islice(loop.following, 10)]
    passes = [{plan.trace_id for plan in played[i : i + 3]} for i in range(0, 12, 3)]
    assert passes == [{"p0", "p1", "p2"}] * 4, "each once before any again"
    assert [plan.instance_id[-2:] for plan in played] == ["@0"] * 3 + ["@1"] * 3 + ["@2"] * 3 + ["@3"] * 3
    assert len({tuple(plan.prompt(0)) for plan in played}) == 12


def names(loop: ArrivalProcess) -> list[str]:
    return [plan.trace_id for _, plan in loop.initial]


def test_the_order_is_the_seeds() -> None:
    programs = planner(30)
    order = names(closed_loop(programs, 30, 7))
    assert order == names(closed_loop(programs, 30, 7)) == names(open_loop(programs, 1.0, 30, 7))
    assert order != names(closed_loop(programs, 30, 8))


@pytest.mark.parametrize("burst", [1, 10])
def test_poisson_arrivals_have_the_rate_and_are_as_many_as_asked_for(burst: int) -> None:
    loop = open_loop(planner(40), 2.0, 5000, seed=3, burst=burst)
    times = [at_s for at_s, _ in loop.initial]
    assert [times.count(at_s) for at_s in dict.fromkeys(times)] == [burst] * (5000 // burst)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *dict.fromkeys(times)])]
    assert statistics.mean(gaps) == pytest.approx(0.5 * burst, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.5 * burst, rel=0.1)
    assert next(loop.following, None) is None


def test_a_finite_loop_plays_each_program_once_and_in_order() -> None:
    loop = finite_closed_loop(planner(5), 2, stagger_s=0.5)
    assert [(at_s, plan.trace_id) for at_s, plan in loop.initial] == [(0.0, "p0"), (0.5, "p1")]
    assert [plan.trace_id for plan in loop.following] == ["p2", "p3", "p4"]
