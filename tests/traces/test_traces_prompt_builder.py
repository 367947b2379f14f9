"""Synthetic prompts keep the lengths, common prefixes and blocks of the recorded ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.traces.prompt_builder import (
    PromptBuilder,
    PromptPlan,
    block_runs,
    common_blocks,
    plan_turns,
    recomputed_tokens,
    run_ids,
    system_blocks,
)
from sojourn_server.traces.token_ids import FIRST_ID, TokenIdGenerator, seed_from_text, splitmix64
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


def test_what_is_computed_again_are_whole_blocks_of_the_kept_prefix() -> None:
    plans = plan_turns(APPENDING)
    # Nothing before the first; 1,049 of 1,050 tokens have KV; 1,250, 256 and 320 are kept.
    assert [recomputed_tokens(plans, turn, 0, 50) for turn in range(5)] == [0, 1000, 1250, 250, 300]
    assert [recomputed_tokens(plans, turn, 300, 50) for turn in range(5)] == [0, 700, 950, 0, 0]


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


# -- recorded block ids --------------------------------------------------------------------

SIZE = 16


def blocks_of(*turns: TraceTurn, **fields: Any) -> TraceProgram:
    """A program whose prompts are recorded as block ids."""
    return program(*turns, **{"block_size": SIZE, "hash_scope": "global", **fields})


def prompts_of(trace: TraceProgram, **options: Any) -> list[list[int]]:
    builder = PromptBuilder(trace, **options)
    return [builder.prompt(i) for i in range(len(builder.plans))]


FIRST = TraceTurn(prompt_tokens=5 * SIZE + 3, output_tokens=20, hash_runs=((1, 2), (50, 3)))
GOES_ON = TraceTurn(
    prompt_tokens=8 * SIZE + 1, output_tokens=9, append_tokens=25, hash_lcp=5, hash_runs=((53, 2), (90, 1))
)
GOES_BACK = TraceTurn(prompt_tokens=4 * SIZE + 5, output_tokens=7, reset=1, hash_lcp=3, hash_runs=((200, 1),))
A = blocks_of(FIRST, GOES_ON, GOES_BACK)


def test_sessions_share_exactly_the_blocks_of_the_same_ids() -> None:
    turn = TraceTurn(prompt_tokens=4 * SIZE, output_tokens=1, hash_runs=((1, 2), (50, 1), (7, 1)))
    shared = common_prefix(prompts_of(A)[0], prompts_of(blocks_of(turn, program_id="other"))[0])
    assert 3 * SIZE <= shared < 3 * SIZE + 3
    alone = blocks_of(turn, program_id="other", hash_scope="program")
    assert common_prefix(prompts_of(A)[0], prompts_of(alone)[0]) < 3


def test_copies_share_system_prompts_and_nothing_else() -> None:
    trace = blocks_of(FIRST, GOES_ON, shared_prefix_tokens=2 * SIZE + 5)
    system = system_blocks([trace])
    assert system == {1, 2}
    as_recorded = prompts_of(trace, system_blocks=system)
    copies = [prompts_of(trace, copy=copy, system_blocks=system) for copy in (1, 2)]
    assert as_recorded == prompts_of(trace)
    for one, other in ((as_recorded, copies[0]), (copies[0], copies[1])):
        assert 2 * SIZE <= common_prefix(one[1], other[1]) < 2 * SIZE + 3
    assert copies[0][1][:83] == copies[0][0]
    assert common_prefix(prompts_of(trace, copy=1)[0], as_recorded[0]) < 3


def test_thinking_that_is_taken_out_is_not_in_the_next_prompt() -> None:
    after = TraceTurn(
        prompt_tokens=6 * SIZE, output_tokens=9, hash_lcp=5, hash_runs=((53, 1),), out_dropped=8
    )
    trace = blocks_of(FIRST, after)
    first, second = prompts_of(trace)
    output = PromptBuilder(trace).planned_output(0)
    assert len(output) == 20
    assert second[:95] == first + output[8:]
    plan = PromptPlan(trace).plans[1]
    assert (plan.reused_tokens, plan.dropped_tokens, plan.base) == (83, 8, 0)


@st.composite
def traces_with_blocks(draw: st.DrawFn) -> TraceProgram:
    """Any program whose blocks add up; few ids, so that they meet again."""
    turns: list[TraceTurn] = []
    blocks = 0
    for index in range(draw(st.integers(1, 8))):
        kept = draw(st.integers(0, blocks)) if index else 0
        runs = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=3))
        blocks = kept + sum(count for _, count in runs)
        tail = draw(st.integers(0 if blocks else 1, 3))
        turns.append(
            TraceTurn(
                prompt_tokens=blocks * 4 + tail,
                output_tokens=draw(st.integers(0, 12)),
                out_dropped=draw(st.integers(0, 14)),
                hash_lcp=kept,
                hash_runs=tuple(runs),
            )
        )
    return blocks_of(*turns, block_size=4)


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


ANY_TRACE = st.tuples(
    st.lists(TURNS, min_size=1, max_size=16).map(lambda turns: program(*turns)),
    st.sampled_from([0.05, 0.5, 1.0, 2.0]),
)


@given(ANY_TRACE | st.tuples(traces_with_blocks(), st.just(1.0)), st.integers(0, 2))
def test_any_trace_gives_prompts_of_the_planned_lengths(drawn: tuple[TraceProgram, float], copy: int) -> None:
    trace, scale = drawn
    outline = PromptPlan(trace, scale)
    builder = PromptBuilder(trace, copy=copy, outline=outline, ids=TokenIdGenerator(500))
    contexts: list[list[int]] = []
    by_block: dict[int, list[int]] = {}
    for index, plan in enumerate(builder.plans):
        prompt, output = builder.prompt(index), builder.planned_output(index)
        assert len(prompt) == plan.prompt_tokens == max(1, round(trace.turns[index].prompt_tokens * scale))
        assert len(output) == plan.output_tokens >= 1
        assert all(FIRST_ID <= token < 500 for token in prompt)
        base = [] if plan.base is None else contexts[plan.base]
        assert prompt[: plan.reused_tokens] == base[: plan.reused_tokens]
        assert 0 <= plan.reused_tokens <= len(base)
        contexts.append(prompt + output)
        for place, block in enumerate(run_ids(outline.runs[index], 0, 2**31) if outline.runs else ()):
            content = prompt[place * 4 : place * 4 + 4]
            assert by_block.setdefault(block, content) == content


RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5).map(tuple)


@given(RUNS, RUNS)
def test_common_blocks_are_counted_as_ids_would_be(a: Any, b: Any) -> None:
    def joined(runs: Any) -> Any:
        tokens = sum(count for _, count in runs) * SIZE
        return block_runs(blocks_of(TraceTurn(prompt_tokens=tokens or 1, output_tokens=1, hash_runs=runs)))[0]

    ids_a, ids_b = ([i for start, n in runs for i in range(start, start + n)] for runs in (a, b))
    assert list(run_ids(joined(a), 0, len(ids_a))) == ids_a
    assert list(run_ids(joined(a), 1, len(ids_a) - 1)) == ids_a[1:-1]
    assert common_blocks(joined(a), joined(b)) == common_prefix(ids_a, ids_b)


@given(st.integers(0, 2**64 - 1), st.integers(0, 9000), st.sampled_from([400, 8000, 32_000]))
def test_a_draw_is_a_prefix_of_a_longer_one_and_names_its_seed(
    seed: int, count: int, vocabulary: int
) -> None:
    ids = TokenIdGenerator(vocabulary)
    drawn = ids.draw(seed, count)
    assert len(drawn) == count
    assert ids.draw(seed, count + 5)[:count] == drawn
    assert all(FIRST_ID <= token < vocabulary for token in drawn)
    assert ids.draw(seed ^ 1, 12) != ids.draw(seed, 12)


def test_seeds_are_the_same_in_every_process() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF, "the first number of splitmix64"
    drawn = TokenIdGenerator(8000).draw(seed_from_text("shared/x"), 7)
    assert drawn == [5182, 7602, 4334, 727, 2988, 5182, 5183]
