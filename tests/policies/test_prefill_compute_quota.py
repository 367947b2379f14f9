"""The compute quota: Figure 6's walk by hand, and never above the quota but for the floor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.prefill_decode.prefill_compute_quota import (
    AttentionCosts,
    PrefillCandidate,
    PrefillComputeQuota,
    StepQuotaUsage,
)

FLAT = AttentionCosts(pair_s=0.0, token_s=0.001)
"""A millisecond a token, whatever the context."""


def test_pairs_are_those_of_a_causal_mask() -> None:
    costs = AttentionCosts(pair_s=1.0)
    # Tokens 5, 6 and 7 (from 1) of a context of four before them look back at 5, 6 and 7 tokens.
    assert costs.seconds(4, 3) == 5 + 6 + 7
    assert AttentionCosts(pair_s=0.0, token_s=2.0, request_s=1.0).seconds(4, 3) == 7.0
    assert AttentionCosts(pair_s=0.0, kv_token_s=3.0).seconds(4, 3) == 21.0
    assert AttentionCosts.of(StepCosts(1, 2, 3, 4, 5)) == AttentionCosts(pair_s=3, kv_token_s=4)


def test_a_chunk_ends_where_a_block_does() -> None:
    quota = PrefillComputeQuota(costs=FLAT, quota_s=0.3, block_tokens=64)
    assert quota.chunk(40, 500, 0.2, first=False) == 24 + 2 * 64
    assert quota.chunk(40, 500, 0.02, first=False) == 0
    assert quota.chunk(40, 500, 0.02, first=True) == 24, "the rest of its block"
    assert quota.chunk(40, 20, 0.0, first=True) == 20, "or of the prompt"


@pytest.mark.parametrize(
    ("case", "requests", "chunks"),
    [
        ("all fit", [(0, 100), (0, 50)], (100, 50)),
        ("the one that does not fit is cut at a block", [(0, 200), (0, 200), (0, 1)], (200, 64)),
        ("a request that is too long blocks the rest", [(0, 290), (0, 200), (0, 5)], (290,)),
        ("a first one that is too long is cut", [(0, 1000)], (256,)),
        ("exactly the quota", [(0, 300), (0, 1)], (300,)),
        ("nothing to do", [], ()),
    ],
)
def test_the_walk(case: str, requests: list[tuple[int, int]], chunks: tuple[int, ...]) -> None:
    plan = PrefillComputeQuota(costs=FLAT, quota_s=0.3, block_tokens=64).plan(
        [PrefillCandidate(*r) for r in requests]
    )
    assert plan.chunks == chunks, case
    assert plan.tokens == sum(chunks)
    assert plan.attention_s == pytest.approx(0.001 * sum(chunks))


def test_a_step_in_which_nothing_fits_computes_one_block() -> None:
    quota = PrefillComputeQuota(costs=AttentionCosts(pair_s=1.0), quota_s=0.3)
    assert quota.plan([PrefillCandidate(10**6, 500), PrefillCandidate(0, 1)]).chunks == (64,)
    assert quota.plan([PrefillCandidate(10**6, 30), PrefillCandidate(10**6, 30)]).chunks == (30,)


def test_tokens_and_requests_are_bounded_too() -> None:
    quota = PrefillComputeQuota(costs=FLAT, quota_s=10.0)
    waiting = [PrefillCandidate(0, 100)] * 10
    assert quota.plan(waiting, tokens_at_most=250).chunks == (100, 100, 50)
    assert quota.plan(waiting, max_requests_per_step=2).chunks == (100, 100)
    assert quota.plan(waiting, max_requests_per_step=0).chunks == ()


def test_the_plan_reads_only_the_requests_that_it_needs() -> None:
    asked = []

    def waiting() -> object:
        for number in range(1000):
            asked.append(number)
            yield PrefillCandidate(0, 200)

    PrefillComputeQuota(costs=FLAT).plan(waiting())  # type: ignore[arg-type]
    assert asked == [0, 1]


waiting_lists = st.lists(
    st.builds(PrefillCandidate, st.integers(0, 10**5), st.integers(1, 9000)), max_size=30
)
costs = st.builds(
    AttentionCosts,
    pair_s=st.floats(0, 1e-6),
    token_s=st.floats(0, 1e-3),
    request_s=st.floats(0, 1e-2),
    kv_token_s=st.floats(0, 1e-6),
)


@given(
    waiting_lists, costs, st.floats(1e-4, 1.0), st.sampled_from([1, 16, 64]), st.none() | st.integers(1, 9000)
)
def test_never_above_the_quota_but_for_the_floor(
    waiting: list[PrefillCandidate], cost: AttentionCosts, quota_s: float, block: int, budget: int | None
) -> None:
    quota = PrefillComputeQuota(costs=cost, quota_s=quota_s, block_tokens=block)
    at_most = math.inf if budget is None else budget
    plan = quota.plan(waiting, tokens_at_most=at_most)
    assert plan.tokens <= at_most
    assert bool(plan.chunks) == bool(waiting)  # it always goes on
    spent_s = sum(cost.seconds(r.cached, chunk) for r, chunk in zip(waiting, plan.chunks, strict=False))
    assert plan.attention_s == pytest.approx(spent_s)
    alone = len(plan.chunks) == 1 and plan.chunks[0] <= block
    assert plan.attention_s <= quota_s * (1 + 1e-9) or alone
    # First come first served: all whole but the last, and none that would fit is left out.
    for request, chunk in zip(waiting[: len(plan.chunks) - 1], plan.chunks, strict=False):
        assert chunk == request.new
    if plan.chunks and plan.tokens < at_most:
        last = waiting[len(plan.chunks) - 1]
        left_s = quota_s - sum(cost.seconds(r.cached, r.new) for r in waiting[: len(plan.chunks) - 1])
        if plan.chunks[-1] < last.new:
            assert (last.cached + plan.chunks[-1]) % block == 0
            assert cost.seconds(last.cached, plan.chunks[-1] + block) > left_s * (1 - 1e-9)
        elif len(plan.chunks) < len(waiting):
            following = waiting[len(plan.chunks)]
            whole, part = following.new, block - following.cached % block
            rest_s = quota_s - plan.attention_s
            room = at_most - plan.tokens
            if whole <= room:
                assert cost.seconds(following.cached, whole) > rest_s * (1 - 1e-9)
            if part <= min(whole, room):
                assert cost.seconds(following.cached, part) > rest_s * (1 - 1e-9)


@given(waiting_lists, costs, st.floats(1e-4, 1.0), st.sampled_from([1, 16, 64]))
def test_a_step_that_an_engine_packs_is_the_one_that_is_planned(
    waiting: list[PrefillCandidate], cost: AttentionCosts, quota_s: float, block: int
) -> None:
    quota = PrefillComputeQuota(costs=cost, quota_s=quota_s, block_tokens=block)
    plan = quota.plan(waiting)
    step = StepQuotaUsage(quota, 0.0)
    chunks = []
    for number, (cached, new) in enumerate(waiting):
        chunks.append(step.offer(str(number), cached, new))
        if chunks[-1]:
            step.take(str(number), cached, chunks[-1])
    chunks += [0]
    last = len(plan.chunks) - 1
    assert tuple(chunks[: last + 1]) == plan.chunks
    assert not any(chunks[last + 1 :])
    assert step.prompts_s == pytest.approx(plan.attention_s)
    assert step.closed == (
        len(plan.chunks) < len(waiting) or (last >= 0 and chunks[last] < waiting[last].new)
    )
    assert step.cut == (str(last) if last >= 0 and chunks[last] < waiting[last].new else None)


def opened(decodes_s: float = 0.0) -> StepQuotaUsage:
    return StepQuotaUsage(PrefillComputeQuota(costs=FLAT, quota_s=0.3, block_tokens=64), decodes_s)


def test_what_generates_comes_before_prompts_and_keeps_none_out_for_ever() -> None:
    assert opened(0.1).offer("a", 0, 500) == 192
    assert opened(5.0).offer("a", 0, 500) == 64, "one block all the same"
    step = opened(5.0)
    step.take("a", 0, step.offer("a", 0, 10))
    assert step.offer("b", 0, 10) == 0
    assert (step.closed, step.cut) == (True, None)


def test_a_request_that_cannot_be_cut_gets_all_or_nothing() -> None:
    assert opened().offer("a", 0, 500, chunkable=False) == 500, "the first of a step"
    step = opened()
    step.take("a", 0, step.offer("a", 0, 200))
    assert step.offer("b", 0, 90, chunkable=False) == 90
    assert step.offer("b", 0, 110, chunkable=False) == 0
    assert step.offer("c", 0, 1) == 0, "later requests get nothing"
    assert step.cut is None


def test_a_preempted_request_gives_its_share_back() -> None:
    step = opened()
    step.take("a", 0, step.offer("a", 0, 200))
    step.take("b", 0, step.offer("b", 0, 200))
    assert (step.cut, step.taken()) == ("b", {"a", "b"})
    step.undo_take("unknown")
    step.undo_take("b")
    assert (step.cut, step.closed, step.taken()) == (None, False, {"a"})
    assert step.offer("c", 0, 90) == 90
    step.undo_take("a")
    assert step.prompts_s == 0.0


def test_a_preempted_request_that_could_not_be_cut_opens_the_step_again() -> None:
    step = opened()
    step.take("a", 0, step.offer("a", 0, 500, chunkable=False))
    assert (step.closed, step.cut, step.offer("b", 0, 90)) == (True, None, 0)
    step.undo_take("a")
    assert (step.closed, step.cut, step.prompts_s) == (False, None, 0.0)
    assert step.offer("b", 0, 90) == 90


@pytest.mark.parametrize("bad", [PrefillCandidate(0, 0), PrefillCandidate(-1, 5)])
def test_what_makes_no_sense_is_refused(bad: PrefillCandidate) -> None:
    with pytest.raises(ValueError, match="expected ≥ 0 and ≥ 1"):
        PrefillComputeQuota(costs=FLAT).plan([bad])
    with pytest.raises(ValueError, match="expected above 0"):
        PrefillComputeQuota(costs=FLAT, quota_s=0.0)
    with pytest.raises(ValueError, match="expected seconds"):
        AttentionCosts(pair_s=math.nan)
