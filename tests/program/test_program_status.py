"""The transition table: each row as drawn, and every pair it does not name changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.program.status import OVER, TRANSITIONS, ProgramStatus, Signal, after

A, R, G, E, X = (
    ProgramStatus.ACTING,
    ProgramStatus.REASONING,
    ProgramStatus.GATED,
    ProgramStatus.ENDED,
    ProgramStatus.EXPIRED,
)

# rows: status; columns in the order of Signal; "." means that nothing changes
DRAWN = {
    #   arrived over gate ungate contact end silence
    R: (None, A, G, None, None, E, None),
    A: (R, None, None, None, None, E, X),
    G: (None, A, None, R, None, E, None),
    E: (R, None, None, None, None, None, None),
    X: (R, None, None, None, A, E, None),
}


@pytest.mark.parametrize("status", ProgramStatus)
@pytest.mark.parametrize("signal", Signal)
def test_each_pair_leads_where_it_is_drawn(status: ProgramStatus, signal: Signal) -> None:
    expected = DRAWN[status][list(Signal).index(signal)]
    assert after(status, signal) is (expected or status)


def test_no_row_stands_still() -> None:
    assert all(status is not new for (status, _), new in TRANSITIONS.items())


@given(st.lists(st.sampled_from(Signal)))
def test_a_request_is_never_refused_whatever_came_before(signals: list[Signal]) -> None:
    status = ProgramStatus.ACTING
    for signal in signals:
        status = after(status, signal)
    assert after(status, Signal.REQUEST_ARRIVED) in (R, G)


@pytest.mark.parametrize("status", ProgramStatus)
@pytest.mark.parametrize("signal", [Signal.REQUEST_ARRIVED, Signal.END])
def test_requests_and_ends_may_come_twice(status: ProgramStatus, signal: Signal) -> None:
    once = after(status, signal)
    assert after(once, signal) is once


def test_only_a_program_between_turns_can_fall_silent() -> None:
    assert [s for s in ProgramStatus if after(s, Signal.SILENCE) is X and s is not X] == [A]
    assert {E, X} == OVER
