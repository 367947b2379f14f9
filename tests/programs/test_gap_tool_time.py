"""The time in which a program's tools ran between two turns."""

from __future__ import annotations

import random

from sojourn_server.programs.program_state import MAX_GAP_CALLS, GapToolTime


def test_the_time_of_calls_is_the_union_of_their_intervals_in_any_order() -> None:
    rng = random.Random(1)
    for _ in range(300):
        calls = [(start, start + rng.randrange(4)) for start in (rng.randrange(30) for _ in range(9))]
        time = GapToolTime()
        for start_s, end_s in calls:
            time.add("t", float(start_s), float(end_s))
        union = {second for start, end in calls for second in range(start, end)}
        assert time.seconds == len(union), calls


def test_of_many_calls_the_last_ones_count() -> None:
    time = GapToolTime()
    for number in range(10_000):
        time.add("t", number, number + 0.5)
    assert time.seconds == MAX_GAP_CALLS / 2


def test_the_call_that_began_last_is_named_whatever_was_reported_last() -> None:
    time = GapToolTime()
    time.add("late", 5.0, 6.0)
    time.add("early", 1.0, 9.0)
    assert (time.last_tool, time.last_started_s) == ("late", 5.0)


def test_what_a_call_ran_before_the_gap_does_not_count() -> None:
    time = GapToolTime(10.0)
    time.add("t", 8.0, 9.0)
    assert time.seconds == 0.0
    time.add("t", 8.0, 12.0)
    assert time.seconds == 2.0
