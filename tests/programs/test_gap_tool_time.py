"""The time in which a program's tools ran between two turns."""

from __future__ import annotations

import random

from sojourn.ids import ProgramId
from sojourn_server.programs.program_state import MAX_GAP_CALLS, ProgramState, RunningTool


def in_a_gap(*calls: tuple[str, float, float], since_s: float = 0.0) -> ProgramState:
    program = ProgramState(ProgramId("p"), 1, 0.0, gap_started_s=since_s)
    for key, start_s, end_s in calls:
        program.tool_ended(RunningTool(key, start_s), end_s - start_s, 1e9)
    return program


def test_the_time_of_calls_is_the_union_of_their_intervals_in_the_gap_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(300):
        calls = [(start, start + rng.randrange(4)) for start in (rng.randrange(30) for _ in range(9))]
        since_s = rng.randrange(30)
        program = in_a_gap(
            *(("t", float(start_s), float(end_s)) for start_s, end_s in calls), since_s=since_s
        )
        union = {second for start, end in calls for second in range(max(start, since_s), end)}
        assert (program.gap_tool_s() or 0) == len(union), (since_s, calls)
    assert in_a_gap(("t", 8.0, 9.0), since_s=10.0).gap_tool_s() is None


def test_of_many_calls_the_last_ones_count() -> None:
    program = in_a_gap(*(("t", number, number + 0.5) for number in range(10_000)))
    assert program.gap_tool_s() == MAX_GAP_CALLS / 2


def test_the_call_that_began_last_is_named_whatever_was_reported_last() -> None:
    assert in_a_gap(("late", 5.0, 6.0), ("early", 1.0, 9.0)).tool_of_gap() == "late"
