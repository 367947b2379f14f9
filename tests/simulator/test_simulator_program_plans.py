"""Programs as a client plays them: what fits, what runs in the gaps, who comes when."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from sojourn.ids import id_problem
from sojourn_server.simulator.workloads.arrival_processes import (
    ArrivalProcess,
    closed_loop,
    finite_closed_loop,
    open_loop,
)
from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlan, ProgramPlanner
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn


def turn(prompt: int, **fields: Any) -> TraceTurn:
    return TraceTurn(prompt_tokens=prompt, output_tokens=10, **fields)


def program(program_id: str = "p", *turns: TraceTurn, **fields: Any) -> TraceProgram:
    chosen = turns or (turn(100, gap_s=1.0), turn(200, gap_s=2.0), turn(300))
    return TraceProgram(program_id=program_id, turns=chosen, **fields)


def only(*programs: TraceProgram, **options: Any) -> ProgramPlan:
    return ProgramPlanner(programs, PlaybackOptions(**options)).plan(0)


def test_a_program_is_played_as_recorded() -> None:
    plan = only(program())
    assert (plan.instance_id, plan.trace_id, plan.cut, plan.children) == ("p@0", "p", False, [])
    assert [len(plan.prompt(i)) for i in range(3)] == [p.prompt_tokens for p in plan.plans] == [100, 200, 300]
    assert len(plan.planned_output(0)) == 10
    assert [plan.gap_s(i) for i in range(2)] == [1.0, 2.0]


def test_it_ends_before_the_first_turn_that_does_not_fit() -> None:
    for limit, fitting in ((309, 2), (310, 3), (210, 2), (110, 1)):
        plan = only(program(), max_context_tokens=limit)
        assert (len(plan.plans), plan.cut) == (fitting, fitting < 3)
    shrunk = program("p", turn(100), turn(400), turn(50, reset=1, prefix_tokens=10))
    assert len(only(shrunk, max_context_tokens=200).plans) == 1


def test_programs_that_do_not_fit_at_all_are_left_out_and_counted() -> None:
    planner = ProgramPlanner(
        [program("long", turn(900)), program("short")], PlaybackOptions(max_context_tokens=500)
    )
    assert [root.program_id for root in planner.roots] == ["short"]
    assert planner.notes == [
        "1 programs left out: their first turn is beyond the context limit of 500 tokens"
    ]
    with pytest.raises(
        TraceError, match="no program fits a context of 50 tokens: the shortest first turn needs 110"
    ):
        ProgramPlanner([program()], PlaybackOptions(max_context_tokens=50))
    with pytest.raises(TraceError, match="no programs to play"):
        ProgramPlanner([])


def test_gaps_can_be_bounded_and_people_left_out() -> None:
    trace = program(
        "p",
        turn(1, gap_s=500.0, gap_kind="human"),
        turn(2, gap_s=90.0, gap_kind="tool", interactive=1),
        turn(3, gap_s=80.0, gap_kind="tool"),
        turn(4),
    )
    for options, gaps in (
        ({}, [500.0, 90.0, 80.0]),
        ({"max_gap_s": 85.0}, [85.0, 85.0, 80.0]),
        ({"human_gaps": False}, [0.0, 0.0, 80.0]),
        ({"human_gaps": False, "max_gap_s": 3.0}, [0.0, 0.0, 3.0]),
    ):
        assert [only(trace, **options).gap_s(i) for i in range(3)] == gaps


def test_tools_go_by_the_name_of_their_history() -> None:
    shell = TraceToolRun(name="Bash", cmd="pytest", s=3.0)
    editor = TraceToolRun(name="edit_tool", cmd="view", s=1.0)
    background = TraceToolRun(name="Bash", cmd="sleep", s=99.0, bg=1)
    trace = program(
        "p",
        turn(1, tools=(editor, shell, background)),
        turn(2, tools=(editor,)),
        turn(3, tool="x+y"),
        turn(4),
    )
    plan = only(trace)
    assert [plan.tool(i) for i in range(4)] == ["Bash:pytest", "edit_tool", "x", None]
    assert plan.tool_runs(0) == (TraceToolRun(name="edit_tool", s=1.0), shell)
    assert plan.tool_runs(2) == (TraceToolRun(name="x"), TraceToolRun(name="y"))
    assert plan.tool_runs(3) == ()


def test_sub_agents_start_in_the_gap_they_were_recorded_in() -> None:
    parent = program(
        "p", turn(1, t=0.0, llm_s=2.0, gap_s=10.0), turn(2, t=12.0, llm_s=1.0, gap_s=4.0), turn(3)
    )
    early = program("early", parent="p", parent_turn=0, start_offset_s=1.0)
    later = program("later", parent="p", parent_turn=0, start_offset_s=7.0)
    by_turn = program("by_turn", parent="p", parent_turn=1)
    by_time = program("by_time", parent="p", start_offset_s=5.0)
    unknown = program("unknown", parent="p")
    below = program("below", parent="later", parent_turn=2)
    plan = only(below, parent, early, later, by_turn, by_time, unknown)
    told = {c.trace_id: (c.parent_turn, c.delay_s, c.start_offset_s) for c in plan.children}
    assert told == {
        "early": (0, 0.0, None),
        "later": (0, 5.0, None),
        "by_turn": (1, 0.0, None),
        "by_time": (None, 0.0, 5.0),
        "unknown": (None, 0.0, 0.0),
    }
    nested = next(c for c in plan.children if c.trace_id == "later").children
    assert [c.instance_id for c in nested] == ["below@0"]
    bounded = only(parent, later, max_gap_s=3.0)
    assert bounded.children[0].delay_s == 3.0


def test_a_sub_agent_of_a_turn_that_is_cut_never_starts() -> None:
    child = program("c", turn(20), parent="p", parent_turn=2)
    below = program("b", turn(20), parent="c")
    assert len(only(program(), child, below).children) == 1
    planner = ProgramPlanner([program(), child, below], PlaybackOptions(max_context_tokens=250))
    assert planner.plan(0).children == []
    assert planner.notes[0].startswith("1 of 3 programs end early")


def test_orphans_are_programs_and_circles_are_refused() -> None:
    planner = ProgramPlanner([program("a", parent="gone"), program("b")])
    assert len(planner) == 2
    circle = [program("a", parent="b"), program("b", parent="a"), program("c")]
    with pytest.raises(TraceError, match="'a' is among its own parents"):
        ProgramPlanner(circle)
    late = program("late", parent="p", parent_turn=3)
    with pytest.raises(TraceError, match="'late': parent_turn is 3; expected 0 to 2, the 3 turns of 'p'"):
        ProgramPlanner([late, program()])
    with pytest.raises(TraceError, match="among its own parents"):
        ProgramPlanner([program("x", parent="a"), *circle])


@pytest.mark.parametrize("start", ["x" * 300, "中" * 100, "a\nb", "é" * 127, "\x7f"])
def test_ids_that_the_wire_refuses_get_a_digest(start: str) -> None:
    ids = [only(program(start + end)).instance_id for end in "ab"]
    assert all(id_problem(name) is None and len(name.encode()) <= 200 for name in ids)
    assert ids[0] != ids[1]


def test_missing_timing_is_said() -> None:
    planner = ProgramPlanner([program("p", turn(1), turn(2))])
    assert planner.notes == ["no gap takes any time: the trace has no timing, or the options took it away"]


# -- Arrivals: who, when, in which order, and that neither policy nor chance changes it.


def planner_of(count: int) -> ProgramPlanner:
    return ProgramPlanner([program(f"p{number}") for number in range(count)])


def test_a_closed_loop_keeps_n_going_for_ever() -> None:
    loop = closed_loop(planner_of(3), 2, seed=1, stagger_s=0.5)
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
    programs = planner_of(30)
    order = names(closed_loop(programs, 30, 7))
    assert order == names(closed_loop(programs, 30, 7)) == names(open_loop(programs, 1.0, 30, 7))
    assert order != names(closed_loop(programs, 30, 8))


@pytest.mark.parametrize("burst", [1, 10])
def test_poisson_arrivals_have_the_rate_and_are_as_many_as_asked_for(burst: int) -> None:
    loop = open_loop(planner_of(40), 2.0, 5000, seed=3, burst=burst)
    times = [at_s for at_s, _ in loop.initial]
    assert [times.count(at_s) for at_s in dict.fromkeys(times)] == [burst] * (5000 // burst)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *dict.fromkeys(times)])]
    assert statistics.mean(gaps) == pytest.approx(0.5 * burst, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.5 * burst, rel=0.1)
    assert next(loop.following, None) is None


def test_a_finite_loop_plays_each_program_once_and_in_order() -> None:
    loop = finite_closed_loop(planner_of(5), 2, stagger_s=0.5)
    assert [(at_s, plan.trace_id) for at_s, plan in loop.initial] == [(0.0, "p0"), (0.5, "p1")]
    assert [plan.trace_id for plan in loop.following] == ["p2", "p3", "p4"]
