"""The transition table: each row as drawn, and every pair it does not name changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.program_status import (
    OVER_STATUSES,
    STATUS_TRANSITIONS,
    ProgramSignal,
    ProgramStatus,
    next_status,
)

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
@pytest.mark.parametrize("signal", ProgramSignal)
def test_each_pair_leads_where_it_is_drawn(status: ProgramStatus, signal: ProgramSignal) -> None:
    expected = DRAWN[status][list(ProgramSignal).index(signal)]
    assert next_status(status, signal) is (expected or status)


def test_no_row_stands_still() -> None:
    assert all(status is not new for (status, _), new in STATUS_TRANSITIONS.items())


@given(st.lists(st.sampled_from(ProgramSignal)))
def test_a_request_is_never_refused_whatever_came_before(signals: list[ProgramSignal]) -> None:
    status = ProgramStatus.ACTING
    for signal in signals:
        status = next_status(status, signal)
    assert next_status(status, ProgramSignal.REQUEST_ARRIVED) in (R, G)


@pytest.mark.parametrize("status", ProgramStatus)
@pytest.mark.parametrize("signal", [ProgramSignal.REQUEST_ARRIVED, ProgramSignal.END])
def test_requests_and_ends_may_come_twice(status: ProgramStatus, signal: ProgramSignal) -> None:
    once = next_status(status, signal)
    assert next_status(once, signal) is once


def test_only_a_program_between_turns_can_fall_silent() -> None:
    assert [s for s in ProgramStatus if next_status(s, ProgramSignal.SILENCE) is X and s is not X] == [A]
    assert {E, X} == OVER_STATUSES
