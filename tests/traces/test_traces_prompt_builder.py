"""Synthetic prompts keep the lengths and common prefixes of the recorded ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.traces.prompt_builder import PromptBuilder, PromptPlan, plan_turns
from sojourn_server.traces.token_ids import FIRST_ID, TokenIdGenerator
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn


def program(*turns: TraceTurn, program_id: str = "p", **fields: Any) -> TraceProgram:
    return TraceProgram(program_id=program_id, turns=turns, **fields)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


APPENDING = program(
    TraceTurn(prompt_tokens=1000, output_tokens=50),
    TraceTurn(prompt_tokens=1250, output_tokens=30, append_tokens=200),
    TraceTurn(prompt_tokens=1275, output_tokens=10, append_tokens=15, out_dropped=20),
    TraceTurn(prompt_tokens=600, output_tokens=10, append_tokens=0, reset=1, prefix_tokens=256),
    TraceTurn(prompt_tokens=900, output_tokens=10, append_tokens=290, prefix_tokens=320),
)


def test_each_relation_holds_exactly() -> None:
    builder = PromptBuilder(APPENDING)
    prompts = [builder.prompt(i) for i in range(5)]
    outputs = [builder.planned_output(i) for i in range(5)]
    assert [len(p) for p in prompts] == [1000, 1250, 1275, 600, 900]
    assert prompts[1][:1050] == prompts[0] + outputs[0]
    assert prompts[2][:1260] == prompts[1] + outputs[1][20:]
    assert common_prefix(prompts[3], prompts[2]) == 256
    assert common_prefix(prompts[4], prompts[3]) == 320
    assert [plan.new_tokens for plan in builder.plans] == [1000, 200, 25, 344, 580]


def test_a_conversation_that_returns_continues_its_own_prompt() -> None:
    interleaved = program(
        TraceTurn(prompt_tokens=1000, output_tokens=50),
        TraceTurn(prompt_tokens=700, output_tokens=20, reset=1, prefix_tokens=100, prefix_tokens_any=100),
        TraceTurn(prompt_tokens=1300, output_tokens=20, prefix_tokens=100, prefix_tokens_any=1050),
        TraceTurn(prompt_tokens=900, output_tokens=20, reset=1, prefix_tokens=100, prefix_tokens_any=710),
    )
    builder = PromptBuilder(interleaved)
    prompts = [builder.prompt(i) for i in range(4)]
    assert [plan.base for plan in builder.plans] == [None, 0, 0, 1]
    assert prompts[2][:1050] == prompts[0] + builder.planned_output(0)
    assert common_prefix(prompts[2], prompts[1]) == 100
    assert prompts[3][:710] == prompts[1] + builder.planned_output(1)[:10]


@pytest.mark.parametrize(
    ("turns", "reused"),
    [
        # A compaction that the source does not name keeps what programs share, here nothing.
        ([(100_000, 500), (20_000, 500), (25_000, 500)], [0, 0, 20_500]),
        # A model that thinks: each prompt lacks the beginning of the previous output.
        ([(5_000, 10_000), (5_500, 10_000), (6_000, 10_000)], [0, 5_000, 5_500]),
        # A prompt that is a little shorter than the previous one.
        ([(10_000, 50), (9_900, 50), (10_000, 50)], [0, 9_900, 9_950]),
        # An output without tokens has one token here, which the next prompt has no room for.
        ([(1_000, 0), (1_000, 0)], [0, 1_000]),
    ],
)
def test_prompts_have_the_recorded_lengths_if_nothing_else_is_recorded(
    turns: list[tuple[int, int]], reused: list[int]
) -> None:
    plans = plan_turns(program(*(TraceTurn(prompt_tokens=p, output_tokens=o) for p, o in turns)))
    assert [plan.prompt_tokens for plan in plans] == [prompt for prompt, _ in turns]
    assert [plan.reused_tokens for plan in plans] == reused


def test_two_runs_send_the_same_and_two_programs_do_not() -> None:
    again = [PromptBuilder(APPENDING).prompt(0) for _ in range(2)]
    assert again[0] == again[1]
    other = PromptBuilder(program(*APPENDING.turns, program_id="q")).prompt(0)
    assert common_prefix(other, again[0]) < 3


def test_real_outputs_replace_the_planned_ones_if_they_fit() -> None:
    builder = PromptBuilder(APPENDING)
    builder.prompt(0)
    assert not builder.replace_output([7] * 49)
    assert builder.replace_output([7] * 50)
    assert builder.prompt(1)[1000:1050] == [7] * 50


@pytest.mark.parametrize(
    ("group", "source", "expected"),
    [(("g", "g"), ("s", "t"), 300), (("p", "q"), ("s", "s"), 300), (("p", "q"), ("s", "t"), 0)],
)
def test_shared_prefixes_are_shared(group: tuple[str, str], source: tuple[str, str], expected: int) -> None:
    turn = TraceTurn(prompt_tokens=1000, output_tokens=5)
    a = program(turn, program_id="p", group=group[0], source=source[0], shared_prefix_tokens=400)
    b = program(turn, program_id="q", group=group[1], source=source[1], shared_prefix_tokens=300)
    shared = common_prefix(PromptBuilder(a).prompt(0), PromptBuilder(b).prompt(0))
    assert expected <= shared < expected + 3


TURNS = st.builds(
    TraceTurn,
    prompt_tokens=st.integers(1, 400),
    output_tokens=st.integers(0, 60),
    append_tokens=st.none() | st.integers(0, 50),
    reset=st.booleans(),
    prefix_tokens=st.none() | st.integers(0, 500),
    prefix_tokens_any=st.none() | st.integers(0, 500),
    out_dropped=st.integers(0, 80),
)


@given(st.lists(TURNS, min_size=1, max_size=16), st.sampled_from([0.05, 0.5, 1.0, 2.0]))
def test_any_trace_gives_prompts_of_the_planned_lengths(turns: list[TraceTurn], scale: float) -> None:
    trace = program(*turns)
    builder = PromptBuilder(trace, outline=PromptPlan(trace, scale), ids=TokenIdGenerator(500))
    contexts: list[list[int]] = []
    for index, plan in enumerate(builder.plans):
        prompt = builder.prompt(index)
        assert len(prompt) == plan.prompt_tokens == max(1, round(turns[index].prompt_tokens * scale))
        assert plan.output_tokens >= 1
        assert all(FIRST_ID <= token < 500 for token in prompt)
        base = [] if plan.base is None else contexts[plan.base]
        assert prompt[: plan.reused_tokens] == base[: plan.reused_tokens]
        assert 0 <= plan.reused_tokens <= len(base)
        contexts.append(prompt + builder.planned_output(index))
