"""Prompts recorded as block ids: programs share exactly what they shared when recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.traces.prompt_builder import (
    PromptBuilder,
    PromptPlan,
    block_runs,
    common_blocks,
    count_blocks,
    run_ids,
    system_blocks,
)
from sojourn_server.traces.token_ids import FIRST_ID, TokenIdGenerator, seed_from_text, splitmix64
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceTurn

SIZE = 16


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def program(*turns: TraceTurn, program_id: str = "p", **fields: Any) -> TraceProgram:
    return TraceProgram(
        program_id=program_id, turns=turns, **{"block_size": SIZE, "hash_scope": "global", **fields}
    )


def prompts_of(trace: TraceProgram, **options: Any) -> list[list[int]]:
    builder = PromptBuilder(trace, **options)
    return [builder.prompt(i) for i in range(len(builder.plans))]


FIRST = TraceTurn(prompt_tokens=5 * SIZE + 3, output_tokens=20, hash_runs=((1, 2), (50, 3)))
GOES_ON = TraceTurn(
    prompt_tokens=8 * SIZE + 1, output_tokens=9, append_tokens=25, hash_lcp=5, hash_runs=((53, 2), (90, 1))
)
GOES_BACK = TraceTurn(prompt_tokens=4 * SIZE + 5, output_tokens=7, reset=1, hash_lcp=3, hash_runs=((200, 1),))
A = program(FIRST, GOES_ON, GOES_BACK)


def test_sessions_share_exactly_the_blocks_of_the_same_ids() -> None:
    turn = TraceTurn(prompt_tokens=4 * SIZE, output_tokens=1, hash_runs=((1, 2), (50, 1), (7, 1)))
    shared = common_prefix(prompts_of(A)[0], prompts_of(program(turn, program_id="other"))[0])
    assert 3 * SIZE <= shared < 3 * SIZE + 3
    alone = program(turn, program_id="other", hash_scope="program")
    assert common_prefix(prompts_of(A)[0], prompts_of(alone)[0]) < 3


def test_copies_share_system_prompts_and_nothing_else() -> None:
    trace = program(FIRST, GOES_ON, shared_prefix_tokens=2 * SIZE + 5)
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
    trace = program(FIRST, after)
    first, second = prompts_of(trace)
    output = PromptBuilder(trace).planned_output(0)
    assert len(output) == 20
    assert second[:95] == first + output[8:]
    plan = PromptPlan(trace).plans[1]
    assert (plan.reused_tokens, plan.dropped_tokens, plan.base) == (83, 8, 0)


def test_the_next_prompt_continues_the_servers_real_output() -> None:
    builder = PromptBuilder(A)
    builder.prompt(0)
    assert builder.replace_output([7] * 20)
    assert builder.prompt(1)[83:103] == [7] * 20


@st.composite
def traces(draw: st.DrawFn) -> TraceProgram:
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
    return program(*turns, block_size=4)


@given(traces(), st.integers(0, 2))
def test_any_blocks_give_prompts_that_keep_what_is_planned(trace: TraceProgram, copy: int) -> None:
    builder = PromptBuilder(trace, copy=copy, ids=TokenIdGenerator(500))
    runs = block_runs(trace)
    contexts: list[list[int]] = []
    by_block: dict[int, list[int]] = {}
    for index, plan in enumerate(builder.plans):
        prompt = builder.prompt(index)
        output = builder.planned_output(index)
        assert len(prompt) == plan.prompt_tokens == trace.turns[index].prompt_tokens
        assert len(output) == plan.output_tokens
        if plan.base is not None:
            assert prompt[: plan.reused_tokens] == contexts[plan.base][: plan.reused_tokens]
        contexts.append(prompt + output)
        for place, block in enumerate(run_ids(runs[index], 0, count_blocks(runs[index]))):
            content = prompt[place * 4 : place * 4 + 4]
            assert by_block.setdefault(block, content) == content


RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5).map(tuple)


@given(RUNS, RUNS)
def test_common_blocks_are_counted_as_ids_would_be(a: Any, b: Any) -> None:
    def joined(runs: Any) -> Any:
        tokens = sum(count for _, count in runs) * SIZE
        return block_runs(program(TraceTurn(prompt_tokens=tokens or 1, output_tokens=1, hash_runs=runs)))[0]

    ids_a, ids_b = ([i for start, n in runs for i in range(start, start + n)] for runs in (a, b))
    assert list(run_ids(joined(a), 0, len(ids_a))) == ids_a
    assert list(run_ids(joined(a), 1, len(ids_a) - 1)) == ids_a[1:-1]
    assert common_blocks(joined(a), joined(b)) == common_prefix(ids_a, ids_b)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": None}, "hash_runs without block_size"),
        ({"block_size": 0}, r"`int` >= 1 - at `\$.block_size`"),
        ({"hash_scope": "galaxy"}, "Invalid enum value 'galaxy'"),
        ({"turns": [{"hash_runs": [[1, 5]]}, {}]}, "turn 1: hash_runs is missing"),
        ({"turns": [{"hash_runs": [[1, 5]], "hash_lcp": 1}]}, "turn 0: hash_lcp is 1; expected 0 to 0"),
        ({"turns": [{"hash_runs": [[1, 4]]}]}, "make 4 blocks; expected 5 full ones in 83 tokens"),
        ({"turns": [{"hash_runs": [[1, 2, 3]]}]}, "Expected `array` of length 2"),
        ({"turns": [{"hash_runs": 7}]}, r"Expected `array \| null`, got `int`"),
    ],
)
def test_blocks_that_do_not_add_up_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    turn = {"prompt_tokens": 83, "output_tokens": 20}
    line = {"program_id": "p", "block_size": SIZE, "hash_scope": "global", **changes}
    line["turns"] = [{**turn, **one} for one in changes.get("turns", [{"hash_runs": [[1, 2], [50, 3]]}])]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(TraceError, match=reason) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line 1: ")


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
    assert TokenIdGenerator(8000).draw(seed_from_text("shared/x"), 7) == [
        5182,
        7602,
        4334,
        727,
        2988,
        5182,
        5183,
    ]
