"""The table against a naive model: bounded, counted, and forgetting in the promised order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn.ids import CallId, ProgramId
from sojourn_server.programs.program_state import SEQ_WINDOW, ProgramState, RunningTool, SequenceWindow
from sojourn_server.programs.program_status import ProgramSignal, ProgramStatus
from sojourn_server.programs.program_table import ProgramTable

R, A, _, E, X = ProgramStatus  # GATED is only reported, by ``ProgramScheduler.status``
DRAWN = {
    #   arrived over contact end silence
    R: (None, A, None, E, None),
    A: (R, None, None, E, X),
    E: (R, None, None, None, None),
    X: (R, None, A, E, None),
}
"""Status → the status after each signal; ``None``: nothing changes."""


def opened(table: ProgramTable, name: str, now: float = 0.0) -> ProgramState:
    program, _ = table.open(ProgramId(name), now)
    return program


def with_turn(table: ProgramTable, name: str, now: float = 0.0) -> ProgramState:
    """A program that has had a turn."""
    program = opened(table, name, now)
    program.ranked = True
    table.signal(program, ProgramSignal.REQUEST_ARRIVED)
    table.signal(program, ProgramSignal.TURN_OVER)
    return program


def forgotten_for(table: ProgramTable, name: str, now: float = 100.0) -> list[str]:
    _, forgotten = table.open(ProgramId(name), now)
    return [program.id for program in forgotten]


def test_statuses_change_as_drawn() -> None:
    for status, drawn in DRAWN.items():
        for signal, expected in zip(ProgramSignal, drawn, strict=True):
            table = ProgramTable()
            program = opened(table, "p")
            program.status = status
            assert table.signal(program, signal) is (expected is not None), (status, signal)
            assert program.status is (expected or status)


def test_the_over_are_forgotten_first_then_the_never_seen_then_the_quietest() -> None:
    table = ProgramTable(4)
    for now, name in enumerate(["quiet", "lively", "ended"]):
        with_turn(table, name, float(now))
    opened(table, "invented", 3.0)
    opened(table, "lively", 4.0)
    table.signal(opened(table, "ended", 5.0), ProgramSignal.END)
    assert forgotten_for(table, "new1") == ["ended"]
    assert forgotten_for(table, "new2") == ["invented"]
    for name in ("new1", "new2"):
        opened(table, name, 200.0).ranked = True
    assert forgotten_for(table, "new3") == ["quiet"]
    assert table.forgotten == 3


def test_twenty_thousand_invented_ids_displace_no_real_program_and_are_forgotten_many_at_once() -> None:
    table = ProgramTable(1000)
    with_turn(table, "real", 0.0)
    times = 0
    for number in range(20_000):
        forgotten = forgotten_for(table, f"invented{number}", float(number))
        times += bool(forgotten)
        assert "real" not in forgotten
        assert len(table) <= 1000
    assert len(table) + table.forgotten == 20_001
    assert times < 1000


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([*ProgramSignal, "open", "promise"])),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_counts_and_bounds_hold_whatever_happens(
    ops: list[tuple[str, ProgramSignal | str]], limit: int
) -> None:
    table = ProgramTable(limit, idle_s=7.5, promised_s=2.5)
    first: dict[str, tuple[int, float]] = {}
    newest_rank = 0
    for step, (name, op) in enumerate(ops):
        program, forgotten = table.open(ProgramId(name), float(step))
        for lost in forgotten:
            assert lost.id not in table
            del first[lost.id]
        if name not in first:
            assert newest_rank < program.rank
            newest_rank = table.next_rank()
        assert first.setdefault(name, (program.rank, float(step))) == (program.rank, program.arrived_s)
        assert program.last_contact_s == step
        if op == "promise":
            program.heartbeats = True
        elif isinstance(op, ProgramSignal):
            table.signal(program, op)
        assert len(table) == len(first) <= limit
        for status in ProgramStatus:
            assert table.counts[status] == sum(p.status is status for p in table)
        now = step + 1.0
        acting = [p for p in table if p.status is ProgramStatus.ACTING]
        silent = [p for p in acting if now - p.last_contact_s > (2.5 if p.heartbeats else 7.5)]
        assert sorted(p.id for p in table.silent(now)) == sorted(p.id for p in silent)


@given(st.lists(st.integers(0, 3 * SEQ_WINDOW) | st.sampled_from([10**12, 2**70]), max_size=80))
def test_a_sequence_number_is_admitted_once_within_the_window(numbers: list[int]) -> None:
    seen, model, newest = SequenceWindow(), set[int](), -1
    for seq in numbers:
        expected = seq not in model and seq > newest - SEQ_WINDOW
        assert seen.admit(seq) is expected
        model.add(seq)
        newest = max(newest, seq)
        assert seen.mask.bit_length() <= SEQ_WINDOW


def test_the_tool_now_is_the_longest_running() -> None:
    program = ProgramState(ProgramId("p"), 1, 0.0, pending_tool="parsed")
    assert program.tool_now() == "parsed"
    program.tools[CallId("late")] = RunningTool("late", 5.0)
    program.tools[CallId("early")] = RunningTool("early", 2.0)
    assert program.tool_now() == "early"
