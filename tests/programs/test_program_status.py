"""The transition table: each row as drawn, and every pair it does not name changes nothing."""

from __future__ import annotations

import pytest
from sojourn.ids import ProgramId
from sojourn_server.programs.program_status import ProgramSignal, ProgramStatus
from sojourn_server.programs.program_table import ProgramTable

R, A, _, E, X = ProgramStatus

# rows: status; columns in the order of Signal; "." means that nothing changes
DRAWN = {
    #   arrived over contact end silence
    R: (None, A, None, E, None),
    A: (R, None, None, E, X),
    E: (R, None, None, None, None),
    X: (R, None, A, E, None),
}  # GATED is only reported, by ``ProgramScheduler.status``


@pytest.mark.parametrize("status", DRAWN)
@pytest.mark.parametrize("signal", ProgramSignal)
def test_each_pair_leads_where_it_is_drawn(status: ProgramStatus, signal: ProgramSignal) -> None:
    expected = DRAWN[status][list(ProgramSignal).index(signal)]
    table = ProgramTable()
    program, _ = table.open(ProgramId("p"), 0.0)
    program.status = status
    assert table.signal(program, signal) is (expected is not None)
    assert program.status is (expected or status)
