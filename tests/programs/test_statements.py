"""Statements about the turns that programs have left, and how far they are believed."""

import pytest
from sojourn_server.programs.program_state import ProgramState
from sojourn_server.programs.statements import ENOUGH_RATIOS, PLAN, STATED, RatioHistory, StepsLeftHistory


def run(history: StepsLeftHistory, turns: int, stated, agent_type: str = "a", source: str = STATED) -> None:
    """Let a program of ``turns`` turns end; ``stated(left)``: what it states where ``left`` turns follow."""
    program = ProgramState("p", 0, 0.0)
    for turn in range(turns):
        program.turns = turn
        history.state(program, source, stated(turns - turn - 1))
    program.turns = turns
    history.learn_end(program, agent_type)


def left(history: StepsLeftHistory, steps: float, agent_type: str = "a", source: str = STATED):
    program = ProgramState("q", 0, 0.0)
    history.state(program, source, steps)
    return history.total_turns(agent_type, program.steps_left)


def test_statements_count_for_nothing_before_some_of_their_kind_were_seen():
    history = StepsLeftHistory()
    for _ in range(ENOUGH_RATIOS):
        assert left(history, 9.0) == ()
        run(history, 10, lambda left: left)
    assert left(history, 9.0) == pytest.approx((10.0,) * ENOUGH_RATIOS)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_statements_that_are_wrong_by_a_factor_are_corrected(factor):
    history = StepsLeftHistory()
    for _ in range(ENOUGH_RATIOS):
        run(history, 31, lambda left: (left + 1.0) * factor - 1.0)
    assert left(history, 31 * factor - 1.0) == pytest.approx((31.0,) * ENOUGH_RATIOS)
    assert left(history, 31 * factor - 1.0, "other") == pytest.approx((31.0,) * ENOUGH_RATIOS), (
        "as other types"
    )


def test_who_always_states_the_end_tells_nothing_after_ten_programs():
    history = StepsLeftHistory()
    lengths = (5, 10, 20, 50, 100, 5, 10, 20, 50, 100)
    for turns in lengths:
        run(history, turns, lambda left: 0.0)
    assert left(history, 0.0) == tuple(sorted(map(float, lengths))), "as all programs of its type"


def test_a_statement_is_kept_until_its_size_changes():
    history, program = StepsLeftHistory(), ProgramState("p", 0, 0.0)
    history.state(program, STATED, 30.0)
    first = program.steps_left
    program.turns = 5
    history.state(program, STATED, 20.0)
    assert program.steps_left is first, "30 and 20 are of one class"
    history.state(program, "another source", 20.0)
    assert program.steps_left.after == 5
    history.state(program, STATED, 3.0)
    assert program.steps_left.turns == 4.0
    history.state(program, STATED, 25.0)
    assert program.steps_left is first, "a liar can't renew a statement"


def test_learned_ratios_are_saved():
    history, restored = StepsLeftHistory(), StepsLeftHistory()
    run(history, 8, lambda left: left)
    restored.restore(history.snapshot())
    assert restored.snapshot() == history.snapshot()
    assert left(restored, 7.0) == left(history, 7.0)


def test_an_endless_number_is_clipped():
    program = ProgramState("q", 0, 0.0)
    StepsLeftHistory().state(program, STATED, 1e300)
    assert program.steps_left.turns < 1e7


def test_assumed_numbers_fill_up_what_is_not_learned():
    history = RatioHistory()
    assert history.expected("pytest", 4.0, (1.0, 2.0, 3.0)) == (1.0, 2.0, 3.0)
    for known in range(ENOUGH_RATIOS):
        assert len(history.expected("pytest", 4.0, (1.0, 2.0, 3.0))) == (ENOUGH_RATIOS if known else 3)
        history.learn("pytest", 5.0, 50.0)
    assert history.expected("pytest", 4.0, (1.0, 2.0, 3.0)) == (40.0,) * ENOUGH_RATIOS
    assert history.expected("pytest", 400.0, (1.0,)) == (1.0,), "of another size"


def test_a_ratio_is_clipped():
    history = RatioHistory()
    for stated in (1e-320, 1e300):
        history.learn("pytest", stated, 1.0)
    RatioHistory().restore(history.snapshot())
    assert history.expected("pytest", 1e-320, (1.0,))[-1] == 1.0


@pytest.mark.parametrize(("limit", "sure"), [(250, False), (5, True)])
def test_a_limit_that_is_seldom_reached_is_not_sure(limit: int, sure: bool):
    history = StepsLeftHistory()
    for turns in (2, 3, 5, 9, 14, 20, 30, 50):
        run(history, min(turns, limit) if not sure else limit, lambda left, turns=turns: limit - 1.0)
    program = ProgramState("q", 0, 0.0)
    history.state(program, STATED, limit - 1.0)
    mean, is_sure = history.turns_left(program, "a")
    assert is_sure is sure
    assert mean < 20.0
    program.turns = 60
    assert history.turns_left(program, "a")[0] == 0.0


def test_a_new_to_do_list_replaces_the_old_one():
    history, program = StepsLeftHistory(), ProgramState("p", 0, 0.0)
    history.state(program, PLAN, 8)
    for turn, items in enumerate((6, 3, 0), 1):
        program.turns = turn
        history.state(program, PLAN, items)
    program.turns = 9
    history.state(program, PLAN, 8)
    assert program.steps_left.after == 9
    program.turns = 17
    history.learn_end(program, "a")
    assert history.values(PLAN) == [8 / 9], "of the last list"
