"""Workloads as lengths: hits by hand, scaling, limits, and who plays which."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS
from sojourn_server.simulator.prefill_decode.trajectories import (
    TrajectoryShaping,
    TurnShape,
    load_trajectories,
    sample_agents,
    shape_trajectory,
    workload_means,
)
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceTurn


def program(*turns: TraceTurn) -> TraceProgram:
    return TraceProgram(program_id="p", turns=turns)


def turn(prompt: int, output: int, **more: object) -> TraceTurn:
    return TraceTurn(prompt_tokens=prompt, output_tokens=output, **more)  # type: ignore[arg-type]


def test_hits_are_whole_blocks_of_the_turns_before() -> None:
    shaped = shape_trajectory(
        program(turn(100, 30, gap_s=2.0), turn(200, 10), turn(214, 5)), TrajectoryShaping()
    )
    assert shaped == (
        TurnShape(0, 100, 30, 2.0),
        TurnShape(2, 200, 10, 0.0),  # 130 tokens are there: two blocks
        TurnShape(3, 214, 5, 0.0),  # 210
    )


def test_the_last_token_is_always_computed() -> None:
    shaped = shape_trajectory(program(turn(120, 8), turn(128, 1)), TrajectoryShaping())
    assert shaped[1].hit_blocks == 1


def test_a_prompt_that_does_not_go_on_finds_what_it_shares() -> None:
    reset = turn(500, 5, reset=True, prefix_tokens=140)
    dropped = [turn(128, 200, out_dropped=50), turn(400, 5)]
    assert shape_trajectory(program(turn(1000, 10), reset), TrajectoryShaping())[1].hit_blocks == 2
    assert (
        shape_trajectory(program(turn(1000, 10), turn(500, 5, reset=True)), TrajectoryShaping())[1].hit_blocks
        == 0
    )
    assert (
        shape_trajectory(program(*dropped), TrajectoryShaping())[1].hit_blocks == 2
    )  # what the model wrote has moved


def test_scaling_makes_appends_and_outputs_longer_and_cuts_sooner() -> None:
    plain = program(turn(1000, 100), turn(1300, 100), turn(1600, 100))
    assert [t.prompt_tokens for t in shape_trajectory(plain, TrajectoryShaping(append_scale=2.0))] == [
        1000,
        1500,
        2000,
    ]
    outputs = shape_trajectory(plain, TrajectoryShaping(output_scale=3.0))
    assert [(t.prompt_tokens, t.output_tokens) for t in outputs] == [(1000, 300), (1500, 300), (2000, 300)]
    assert len(shape_trajectory(plain, TrajectoryShaping(append_scale=2.0, max_context_tokens=1600))) == 2
    assert shape_trajectory(plain, TrajectoryShaping(max_context_tokens=1000)) == ()


growths = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 800)), min_size=1, max_size=20)


@given(growths, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.5, 1.0, 4.0]))
def test_no_hit_is_more_than_was_there(grown: list[tuple[int, int]], append: float, output: float) -> None:
    turns, context = [], 0
    for new, written in grown:
        turns.append(turn(context + new, written))
        context += new + written
    shaped = shape_trajectory(program(*turns), TrajectoryShaping(append_scale=append, output_scale=output))
    assert len(shaped) == len(turns)
    before = 0
    for each in shaped:
        assert 0 <= each.hit_blocks * FULL_BLOCK_TOKENS <= min(before, each.prompt_tokens - 1)
        before = each.prompt_tokens + each.output_tokens
    if append == output == 1.0:
        assert [t.prompt_tokens for t in shaped] == [t.prompt_tokens for t in turns]


def test_the_papers_workload_and_its_agents() -> None:
    found = load_trajectories("synthetic:dualpath-32k", TrajectoryShaping(max_context_tokens=32768))
    assert len(found) == 500
    load = workload_means(found)
    assert load.turns == pytest.approx(60, rel=0.1)
    assert load.hit_tokens / load.prompt_tokens > 0.95
    few, many = sample_agents(found, 20, seed=1), sample_agents(found, 1200, seed=1)
    assert few == many[:20] == sample_agents(found, 20, seed=1)
    assert few != sample_agents(found, 20, seed=2)
    assert sorted(many[:500]) == sorted(found)
    assert len(many) == 1200


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected above 0"):
        TrajectoryShaping(append_scale=0.0)
    with pytest.raises(ValueError, match="expected at least 2"):
        TrajectoryShaping(max_context_tokens=1)
    with pytest.raises(ValueError, match="max_gap_s is nan"):
        TrajectoryShaping(max_gap_s=math.nan)
    with pytest.raises(TraceError, match="no first turn fits a context of 2 tokens"):
        load_trajectories("synthetic:dualpath-32k", TrajectoryShaping(max_context_tokens=2))
    with pytest.raises(TraceError, match="did you mean"):
        load_trajectories("synthetic:dualpath-32", TrajectoryShaping())
