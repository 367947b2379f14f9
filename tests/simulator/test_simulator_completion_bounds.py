"""Bounds on completion: what is counted, against hand-made sums and against the engine's own scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.simulator.latency.latency_model import StepWork
from sojourn_server.simulator.limits.completion_bounds import (
    CompletionLowerBound,
    completion_lower_bound,
    max_programs_started,
    unbounded_pool_blocks,
)
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions
from sojourn_server.traces.prompt_builder import TurnPlan


class Linear:
    """A second a step, a millisecond a token, a microsecond a pair."""

    def __init__(self) -> None:
        self.steps: list[StepWork] = []

    def step_s(self, work: StepWork) -> float:
        self.steps.append(work)
        return 1.0 + 1e-3 * work.tokens + 1e-6 * work.attention_pairs

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        raise AssertionError("nothing is copied")


def test_a_turn_alone_is_its_prefill_in_chunks_and_its_decode_steps() -> None:
    model = Linear()

    took = completion_lower_bound([TurnPlan(100, 3)], [], model, block_size=16, chunk_tokens=64)

    assert model.steps == [
        StepWork(1, 64, 64, 64 * 65 // 2, 64 * 65 // 2, 64, 0),
        StepWork(1, 36, 36, 36 * 64 + 36 * 37 // 2, 36 * 64 + 36 * 37 // 2, 100, 1),
        StepWork(1, 1, 0, 101, 0, 101, 1),
        StepWork(1, 1, 0, 102, 0, 102, 1),
    ]
    assert took.prefill_s == pytest.approx(2 + 0.1 + 1e-6 * (100 * 101 // 2))
    assert took.decode_s == pytest.approx(2 + 0.002 + 1e-6 * 203)
    assert took.gaps_s == 0


def test_what_was_computed_once_is_there() -> None:
    model = Linear()
    plans = [
        TurnPlan(40, 9),
        TurnPlan(60, 1, reused_tokens=49, base=0),
        TurnPlan(48, 1, reused_tokens=48, base=1),
    ]

    took = completion_lower_bound(
        plans, [2.0, 3.0, 99.0], model, block_size=16, chunk_tokens=512, shared_tokens=20
    )

    # 16 of 20 shared tokens; 48 of 49, of which the last was never computed; 32 of 48, since one must be.
    assert [work.tokens for work in model.steps if work.tokens > 1] == [40 - 16, 60 - 48, 48 - 32]
    assert took.gaps_s == 5.0
    assert took.total_s == took.prefill_s + took.decode_s + 5.0


turns = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=5)


def plans_of(sizes: Sequence[tuple[int, int, bool]]) -> list[TurnPlan]:
    """Turns that append to, or cut back, what the turn before left."""
    plans: list[TurnPlan] = []
    for new, output, cut in sizes:
        if not plans:
            plans.append(TurnPlan(new, output))
            continue
        context = plans[-1].prompt_tokens + plans[-1].output_tokens
        kept = context // 2 if cut else context
        plans.append(TurnPlan(kept + new, output, kept, 0, len(plans) - 1))
    return plans


@settings(max_examples=15, deadline=None)
@given(st.lists(turns, min_size=1, max_size=3), st.integers(4, 32))
def test_in_a_pool_that_never_fills_the_engine_computes_just_this(
    programs: list[list[tuple[int, int, bool]]], chunk: int
) -> None:
    """Each program alone, one after the other, in the pool that is said to be enough: no token more."""
    all_plans = [plans_of(sizes) for sizes in programs]
    bound = Linear()
    for plans in all_plans:
        completion_lower_bound(plans, [0.0] * len(plans), bound, block_size=4, chunk_tokens=chunk)
    blocks = unbounded_pool_blocks(all_plans, 4)
    engine = SimulatedEngine(
        SimulatedEngineOptions(
            blocks=blocks, block_size=4, max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=1024
        ),
        clock=lambda: 0.0,
    )
    fresh = itertools.count(100)
    computed = []
    for number, plans in enumerate(all_plans):
        context: list[int] = []
        for turn, plan in enumerate(plans):
            prompt = context[: plan.reused_tokens] + [
                next(fresh) for _ in range(plan.prompt_tokens - plan.reused_tokens)
            ]
            request = engine.add(f"{number}/{turn}", prompt, max_tokens=plan.output_tokens)
            for _ in range(200):
                computed.append(engine.step().planned.total_num_scheduled_tokens)
            assert request.is_finished()
            context = list(request.all_token_ids)

    assert [tokens for tokens in computed if tokens] == [work.tokens for work in bound.steps]


def test_a_block_less_may_be_too_few() -> None:
    """The pool is no larger than needed where nothing is shared and every context ends on a block's edge."""
    plans = [TurnPlan(7, 1), TurnPlan(15, 1, reused_tokens=8, base=0)]
    # Of the first 8 tokens the last is never computed: of two blocks one is cached and one written anew.
    assert unbounded_pool_blocks([plans], 4) == 1 + 2 + 3
    assert unbounded_pool_blocks([plans, plans], 4) == 1 + 2 * 5
    assert unbounded_pool_blocks([], 4) == 1


def test_programs_that_can_have_begun() -> None:
    # Two at once: 0 and 3, then at 3 and 4, at 6 and 8.
    assert max_programs_started(itertools.cycle([3.0, 4.0]), 2, 6.0) == 4
    assert max_programs_started(itertools.cycle([3.0, 4.0]), 2, 6.5) == 5
    assert max_programs_started([1.0], 3, 100.0) == 1
    assert max_programs_started([1.0], 3, 0.0) == 0


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 9)), max_size=30), st.integers(1, 5))
def test_slower_programs_begin_no_sooner(times: list[tuple[float, float]], at_once: int) -> None:
    least = [least_s for least_s, _ in times]
    real = [least_s + more_s for least_s, more_s in times]

    assert max_programs_started(real, at_once, 10.0) <= max_programs_started(least, at_once, 10.0)


def test_bad_input_is_named() -> None:
    model = Linear()
    with pytest.raises(ValueError, match="1 gaps for 3 turns; expected one after each but the last"):
        completion_lower_bound([TurnPlan(1, 1)] * 3, [1.0], model, block_size=16, chunk_tokens=64)
    with pytest.raises(ValueError, match="chunk_tokens is 0; expected at least 1"):
        completion_lower_bound([TurnPlan(1, 1)], [], model, block_size=16, chunk_tokens=0)
    with pytest.raises(ValueError, match="block_size is -1; expected at least 1"):
        unbounded_pool_blocks([], -1)
    with pytest.raises(ValueError, match=r"program 1 takes 0\.0 s at least; expected more than 0"):
        max_programs_started([1.0, 0.0], 1, 100.0)
    assert completion_lower_bound([], [], model, block_size=16, chunk_tokens=1) == CompletionLowerBound(
        0.0, 0.0, 0.0
    )
