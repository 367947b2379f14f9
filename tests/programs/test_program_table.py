"""The table against a naive model: bounded, counted, and forgetting in the promised order."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st
from sojourn.ids import CallId, ProgramId
from sojourn_server.programs.program_state import SEQ_WINDOW, ProgramState, RunningTool, SequenceWindow
from sojourn_server.programs.program_status import ProgramSignal, ProgramStatus
from sojourn_server.programs.program_table import ProgramTable


def opened(table: ProgramTable, name: str, now: float = 0.0) -> ProgramState:
    program, _ = table.open(ProgramId(name), now)
    return program


def with_turn(table: ProgramTable, name: str, now: float = 0.0) -> ProgramState:
    """A program that has had a turn."""
    program = opened(table, name, now)
    table.signal(program, ProgramSignal.REQUEST_ARRIVED)
    table.signal(program, ProgramSignal.TURN_OVER)
    return program


def forgotten_for(table: ProgramTable, name: str, now: float = 100.0) -> list[str]:
    _, forgotten = table.open(ProgramId(name), now)
    return [program.id for program in forgotten]


def test_a_program_keeps_its_first_rank_and_arrival() -> None:
    table = ProgramTable()
    first, second = opened(table, "a", 1.0), opened(table, "b", 2.0)
    again = opened(table, "a", 50.0)
    assert again is first
    assert (first.rank, first.arrived_s, first.last_contact_s) == (1, 1.0, 50.0)
    assert second.rank == 2
    assert table.next_rank() == 3


def test_the_longest_over_is_forgotten_first_then_the_never_seen_then_the_quietest() -> None:
    table = ProgramTable(4)
    quiet = with_turn(table, "quiet", 0.0)
    with_turn(table, "lively", 1.0)
    opened(table, "invented", 2.0)
    ended = with_turn(table, "ended", 3.0)
    table.signal(ended, ProgramSignal.END)
    assert forgotten_for(table, "new1") == ["ended"]
    assert forgotten_for(table, "new2") == ["invented"]
    assert forgotten_for(table, "new3") == ["new1"]
    table.signal(opened(table, "new3"), ProgramSignal.REQUEST_ARRIVED)
    opened(table, "lively", 200.0)
    assert forgotten_for(table, "new4") == ["new2"]
    table.signal(opened(table, "new4"), ProgramSignal.REQUEST_ARRIVED)
    assert forgotten_for(table, "new5") == [quiet.id]
    assert table.forgotten == 5


def test_a_million_ids_take_the_memory_of_as_many_as_the_table_holds() -> None:
    table = ProgramTable(1000)

    def invent(first: int, last: int) -> int:
        """Objects of the interpreter once these programs have been opened."""
        for i in range(first, last):
            table.open(ProgramId(f"invented{i:07}"), float(i))
        gc.collect()
        return len(gc.get_objects())

    full = invent(0, 2000)
    assert invent(2000, 1_000_000) <= full + 100
    assert len(table) == 1000
    assert table.forgotten == 999_000


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
    table = ProgramTable(limit)
    ranks: dict[str, int] = {}
    for step, (name, op) in enumerate(ops):
        program, forgotten = table.open(ProgramId(name), float(step))
        for lost in forgotten:
            assert lost.id not in table
            del ranks[lost.id]
        assert ranks.setdefault(name, program.rank) == program.rank
        if op == "promise":
            table.promise_heartbeats(program)
        elif isinstance(op, ProgramSignal):
            table.signal(program, op)
        assert len(table) == len(ranks) <= limit
        for status in ProgramStatus:
            assert table.counts[status] == sum(p.status is status for p in table)
        acting = [p for p in table if p.status is ProgramStatus.ACTING]
        silent = table.silent(step + 1.0, idle_s=0.0, promised_s=0.0)
        assert (silent in acting) if acting else silent is None
    if ranks:
        assert len(set(ranks.values())) == len(ranks)


def test_silence_is_told_of_the_quietest_and_only_between_turns() -> None:
    table = ProgramTable()
    a, b = opened(table, "a", 0.0), opened(table, "b", 1.0)
    assert table.silent(10.0, idle_s=10.0, promised_s=10.0) is None
    assert table.silent(10.5, idle_s=10.0, promised_s=10.0) is a
    opened(table, "a", 10.0)
    assert table.silent(11.5, idle_s=10.0, promised_s=10.0) is b
    table.signal(b, ProgramSignal.REQUEST_ARRIVED)
    assert table.silent(19.0, idle_s=10.0, promised_s=10.0) is None


def test_a_promise_is_not_hidden_behind_a_quieter_program_without_one() -> None:
    table = ProgramTable()
    opened(table, "plain", 0.0)
    promised = opened(table, "promised", 1.0)
    table.promise_heartbeats(promised)
    table.promise_heartbeats(promised)
    assert table.silent(70.0, idle_s=1800.0, promised_s=60.0) is promised
    opened(table, "promised", 65.0)
    assert table.silent(70.0, idle_s=1800.0, promised_s=60.0) is None


def test_a_promise_during_a_turn_counts_after_it() -> None:
    table = ProgramTable()
    program = opened(table, "p", 0.0)
    table.signal(program, ProgramSignal.REQUEST_ARRIVED)
    table.promise_heartbeats(program)
    assert table.silent(100.0, idle_s=1.0, promised_s=1.0) is None
    table.signal(program, ProgramSignal.TURN_OVER)
    assert table.silent(100.0, idle_s=1800.0, promised_s=60.0) is program


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
