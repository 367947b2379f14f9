"""The compute quota: Figure 6's walk by hand, and never above the quota but for the floor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policy.compute_quota import AttentionCosts, ComputeQuota, Prefill
from sojourn_server.policy.step_costs import StepCosts

FLAT = AttentionCosts(pair_s=0.0, token_s=0.001)
"""A millisecond a token, whatever the context."""


def test_pairs_are_those_of_a_causal_mask() -> None:
    costs = AttentionCosts(pair_s=1.0)
    # Tokens 5, 6 and 7 (from 1) of a context of four before them look back at 5, 6 and 7 tokens.
    assert costs.seconds(4, 3) == 5 + 6 + 7
    assert AttentionCosts(pair_s=0.0, token_s=2.0, request_s=1.0).seconds(4, 3) == 7.0
    assert AttentionCosts.of(StepCosts(1, 2, 3, 4, 5)) == AttentionCosts(pair_s=3)


@pytest.mark.parametrize(
    ("case", "requests", "chunks"),
    [
        ("all fit", [(0, 100), (0, 50)], (100, 50)),
        ("the one that does not fit is cut at a block", [(0, 200), (0, 200), (0, 1)], (200, 64)),
        ("nobody passes who is too long", [(0, 290), (0, 200), (0, 5)], (290,)),
        ("a first one that is too long is cut", [(0, 1000)], (256,)),
        ("exactly the quota", [(0, 300), (0, 1)], (300,)),
        ("nothing to do", [], ()),
    ],
)
def test_the_walk(case: str, requests: list[tuple[int, int]], chunks: tuple[int, ...]) -> None:
    plan = ComputeQuota(costs=FLAT, quota_s=0.3, block_tokens=64).plan([Prefill(*r) for r in requests])
    assert plan.chunks == chunks, case
    assert plan.tokens == sum(chunks)
    assert plan.attention_s == pytest.approx(0.001 * sum(chunks))


def test_a_step_in_which_nothing_fits_computes_one_block() -> None:
    quota = ComputeQuota(costs=AttentionCosts(pair_s=1.0), quota_s=0.3)
    assert quota.plan([Prefill(10**6, 500), Prefill(0, 1)]).chunks == (64,)
    assert quota.plan([Prefill(10**6, 30), Prefill(10**6, 30)]).chunks == (30,)


def test_tokens_and_requests_are_bounded_too() -> None:
    quota = ComputeQuota(costs=FLAT, quota_s=10.0)
    waiting = [Prefill(0, 100)] * 10
    assert quota.plan(waiting, tokens_at_most=250).chunks == (100, 100, 50)
    assert quota.plan(waiting, requests_at_most=2).chunks == (100, 100)
    assert quota.plan(waiting, requests_at_most=0).chunks == ()


def test_only_who_is_looked_at_is_asked_for() -> None:
    asked = []

    def waiting() -> object:
        for number in range(1000):
            asked.append(number)
            yield Prefill(0, 200)

    ComputeQuota(costs=FLAT).plan(waiting())  # type: ignore[arg-type]
    assert asked == [0, 1]


waiting_lists = st.lists(st.builds(Prefill, st.integers(0, 10**5), st.integers(1, 9000)), max_size=30)
costs = st.builds(
    AttentionCosts,
    pair_s=st.floats(0, 1e-6),
    token_s=st.floats(0, 1e-3),
    request_s=st.floats(0, 1e-2),
)


@given(
    waiting_lists, costs, st.floats(1e-4, 1.0), st.sampled_from([1, 16, 64]), st.none() | st.integers(1, 9000)
)
def test_never_above_the_quota_but_for_the_floor(
    waiting: list[Prefill], cost: AttentionCosts, quota_s: float, block: int, budget: int | None
) -> None:
    quota = ComputeQuota(costs=cost, quota_s=quota_s, block_tokens=block)
    at_most = math.inf if budget is None else budget
    plan = quota.plan(waiting, tokens_at_most=at_most)
    assert plan.tokens <= at_most
    assert bool(plan.chunks) == bool(waiting)  # it always goes on
    spent_s = sum(cost.seconds(r.cached, chunk) for r, chunk in zip(waiting, plan.chunks, strict=False))
    assert plan.attention_s == pytest.approx(spent_s)
    alone = len(plan.chunks) == 1 and plan.chunks[0] <= block
    assert plan.attention_s <= quota_s * (1 + 1e-9) or alone
    # First come first served: all whole but the last, and nobody who would have fitted was left out.
    for request, chunk in zip(waiting[: len(plan.chunks) - 1], plan.chunks, strict=False):
        assert chunk == request.new
    if plan.chunks and plan.tokens < at_most:
        last = waiting[len(plan.chunks) - 1]
        left_s = quota_s - sum(cost.seconds(r.cached, r.new) for r in waiting[: len(plan.chunks) - 1])
        if plan.chunks[-1] < last.new:
            assert plan.chunks[-1] % block == 0
            assert cost.seconds(last.cached, plan.chunks[-1] + block) > left_s * (1 - 1e-9)
        elif len(plan.chunks) < len(waiting):
            following = waiting[len(plan.chunks)]
            whole, part = following.new, min(block, following.new)
            rest_s = quota_s - plan.attention_s
            room = at_most - plan.tokens
            if whole <= room:
                assert cost.seconds(following.cached, whole) > rest_s * (1 - 1e-9)
            if block <= min(whole, room):
                assert cost.seconds(following.cached, part) > rest_s * (1 - 1e-9)


@pytest.mark.parametrize("bad", [Prefill(0, 0), Prefill(-1, 5)])
def test_what_makes_no_sense_is_refused(bad: Prefill) -> None:
    with pytest.raises(ValueError, match="expected ≥ 0 and ≥ 1"):
        ComputeQuota(costs=FLAT).plan([bad])
    with pytest.raises(ValueError, match="expected above 0"):
        ComputeQuota(costs=FLAT, quota_s=0.0)
    with pytest.raises(ValueError, match="expected seconds"):
        AttentionCosts(pair_s=math.nan)
