"""What benchmarks/length_prediction_error.py makes of predictions: small cases worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import pytest
from script_modules import benchmark
from sojourn_server.policies.forecasting.output_length_prediction import QUANTILE_POINTS
from sojourn_server.simulator.workloads.program_plans import ProgramPlanner
from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun, TraceTurn


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark("length_prediction_error") as module:
        yield module


EIGHT = tuple(float(10 * place) for place in range(1, QUANTILE_POINTS + 1))
"""10, 20, … 80 tokens."""


def test_a_whole_output_is_judged_by_the_middle_one(script: ModuleType) -> None:
    assert script.log_error(script.Answer(50, EIGHT, 50)) == 0.0
    assert script.log_error(script.Answer(0, EIGHT, 100)) == pytest.approx(math.log(2))
    assert script.log_error(script.Answer(100, (100.0,), 300)) == pytest.approx(math.log(2))


def test_of_a_single_number_the_loss_is_how_far_off_it_is(script: ModuleType) -> None:
    for actual in (40, 100, 160):
        assert script.pinball(script.Answer(0, (100.0,), actual)) == pytest.approx(abs(actual - 100))


def test_a_distribution_loses_less_than_its_middle(script: ModuleType) -> None:
    # Below the actual 45 lie four points at 1/16, 3/16, 5/16, 7/16, off by 35, 25, 15, 5, and mirrored above.
    by_hand = 2 * 2 * (35 * 1 + 25 * 3 + 15 * 5 + 5 * 7) / 16 / 8
    assert script.pinball(script.Answer(0, EIGHT, 45)) == pytest.approx(by_hand) == 6.875
    sure = [script.pinball(script.Answer(0, (45.0,), actual)) for actual in range(5, 86)]
    spread = [script.pinball(script.Answer(0, EIGHT, actual)) for actual in range(5, 86)]
    assert sum(spread) < sum(sure)


def test_who_is_calibrated_is_not_off_and_who_is_sure_is(script: ModuleType) -> None:
    # Half an output below the first point, and one between each two: as many below each as should be.
    actual = [5, *(place for place in range(15, 80, 10) for _ in range(2)), 85]
    said = [script.Answer(0, EIGHT, tokens) for tokens in actual]
    assert script.coverage(said) == pytest.approx(script.LEVELS)
    assert script.off(script.coverage(said)) == pytest.approx(0.0)
    sure = [script.Answer(0, (45.0,), tokens) for tokens in actual]
    assert script.coverage(sure) == [0.5] * QUANTILE_POINTS
    assert script.off(script.coverage(sure)) == pytest.approx(7 / 16)
    assert script.coverage([script.Answer(0, (45.0,), 45)]) == [0.5] * QUANTILE_POINTS, "a hit is half below"


def test_bias_is_what_all_are_off_by_together(script: ModuleType) -> None:
    said = [script.Answer(0, (10.0,), 20), script.Answer(0, (10.0, 30.0), 40)]
    assert script.bias(said) == pytest.approx(30 / 60)


def program(name: str, outputs: list[int]) -> TraceProgram:
    turns = tuple(
        TraceTurn(
            prompt_tokens=100 + 200 * turn, output_tokens=tokens, tools=(TraceToolRun(name="read", s=1.0),)
        )
        for turn, tokens in enumerate(outputs)
    )
    return TraceProgram(program_id=name, turns=turns)


def plans(*programs: TraceProgram) -> list:
    playable = ProgramPlanner(programs)
    return [playable.plan(index) for index in range(len(playable))]


def test_outputs_come_one_after_the_other_with_the_tool_before_them(script: ModuleType) -> None:
    made, begins = script.outputs(plans(program("a", [50, 100]), program("b", [10])), 1)
    assert [(output.key, output.tokens, output.place) for output in made] == [
        (("agent", None), 50, 0),
        (("agent", "read"), 100, 0),
        (("agent", None), 10, 1),
    ]
    # A token every 20 ms, a second in the tool.
    assert [output.begins_s for output in made] == pytest.approx([0.0, 2.0, 5.0])
    assert (made[1].ends_s, *begins) == pytest.approx((4.0, 0.0, 5.0))


def test_who_is_held_back_is_learned_only_online_and_only_once_it_has_ended(script: ModuleType) -> None:
    past = plans(*(program(f"p{n}", [40]) for n in range(4)))
    of = plans(program("a", [100]), program("b", [40]))
    lesson = script.lesson(past, of)
    # One at a time; of the second time round all but the last have ended when the first is asked about.
    assert [output.tokens for output in lesson.learned] == [40] * len(lesson.learned)
    assert {output.place for output in lesson.learned} <= {3, 4, 5, 6, 7}
    assert [output.place for output in lesson.of] == [8, 9]
    assert {output.place for output in lesson.later} >= {8, 9}
    assert not {output.place for output in lesson.later} & {output.place for output in lesson.learned}
    known = len(lesson.learned)
    for online, counts in ((False, [0, 0, 0, 0]), (True, [0, 0, 1, 1])):
        asked = [
            (output.place, so_far, lengths.count() - known)
            for output, so_far, lengths in script.asked(lesson, online=online)
        ]
        assert [moment[:2] for moment in asked] == [(8, 0), (8, 32), (9, 0), (9, 32)]
        assert [moment[2] for moment in asked] == counts


def test_halves_share_no_program_and_hold_all(script: ModuleType) -> None:
    dealt = plans(*(program(f"p{n}", [10]) for n in range(9)))
    learned, held_back = script.halves(dealt, 1)
    names = [{plan.instance_id for plan in half} for half in (learned, held_back)]
    assert (len(names[0]), len(names[1])) == (4, 5)
    assert not names[0] & names[1]
    assert script.halves(dealt, 1)[0] == learned
    assert script.halves(dealt, 2)[0] != learned


def test_everybody_is_asked_the_same_and_the_oracle_is_never_off(script: ModuleType) -> None:
    past = [script.Output(f"p{n}", ("agent", None), 0.0, 10, 40 + n) for n in range(20)]
    of = [script.Output(f"o{n}", ("agent", None), 5.0, 10, 45 + n) for n in range(10)]
    said = script.answers(script.Lesson(past, of, of), online=False)
    assert {name: [len(at[so_far]) for so_far in script.SO_FAR] for name, at in said.items()} == {
        name: [10, 10, 0, 0, 0] for name in script.PREDICTORS
    }
    measured = script.measures(said["oracle"][32])
    assert (measured["pinball_tokens"], measured["bias"], measured["log_error_mean"]) == (0.0, 1.0, 0.0)
    few = script.Lesson(past[:15], of, of)
    assert script.answers(few, online=False)["survival"][0] == [], "too few are known"
