"""The compute quota: first come first served, and never above the quota but for the floor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.prefill_decode.prefill_compute_quota import PrefillComputeQuota, StepQuotaUsage

FLAT = StepCosts(0, 0.001, 0, 0, 0)
"""A millisecond a token, whatever the context."""


def test_pairs_are_those_of_a_causal_mask() -> None:
    # Tokens 5, 6 and 7 (from 1) of a context of four before them look back at 5, 6 and 7 tokens.
    assert StepCosts(9, 0, 1, 0, 9, 9).chunk_s(4, 3) == 5 + 6 + 7
    assert StepCosts(9, 2, 0, 0, 9, 9).chunk_s(4, 3) == 6.0
    assert StepCosts(9, 0, 0, 3, 9, 9).chunk_s(4, 3) == 21.0


waiting_lists = st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 9000)), max_size=30)
costs = st.builds(
    StepCosts,
    step_s=st.just(0.0),
    request_s=st.just(0.0),
    pair_s=st.floats(0, 1e-6),
    token_s=st.floats(0, 1e-3),
    kv_token_s=st.floats(0, 1e-6),
)


@given(waiting_lists, costs, st.floats(1e-4, 1.0), st.sampled_from([1, 16, 64]))
def test_never_above_the_quota_but_for_the_floor(
    waiting: list[tuple[int, int]], cost: StepCosts, quota_s: float, block: int
) -> None:
    step = StepQuotaUsage(PrefillComputeQuota(costs=cost, quota_s=quota_s, block_tokens=block), 0.0)
    chunks: list[int] = []
    for number, (cached, new) in enumerate(waiting):
        if chunk := step.offer(str(number), cached, new):
            assert len(chunks) == number, "later requests get nothing"
            step.take(str(number), cached, chunk)
            chunks.append(chunk)
    assert bool(chunks) == bool(waiting)  # it always goes on
    spent_s = sum(cost.chunk_s(cached, chunk) for (cached, _), chunk in zip(waiting, chunks, strict=False))
    assert step.prompts_s == pytest.approx(spent_s)
    alone = len(chunks) == 1 and chunks[0] <= block
    assert step.prompts_s <= quota_s * (1 + 1e-9) or alone
    if not chunks:
        return
    # First come first served: all whole but the last, and none that would fit is left out.
    last = len(chunks) - 1
    assert chunks[:last] == [new for _, new in waiting[:last]]
    cached, new = waiting[last]
    left_s = quota_s - sum(cost.chunk_s(*each) for each in waiting[:last])
    is_cut = chunks[last] < new
    assert step.closed == (is_cut or len(chunks) < len(waiting))
    assert step.cut == (str(last) if is_cut else None)
    if is_cut:
        assert (cached + chunks[last]) % block == 0
        assert cost.chunk_s(cached, chunks[last] + block) > left_s * (1 - 1e-9)
    elif len(chunks) < len(waiting):
        cached, new = waiting[len(chunks)]
        least = min(new, block - cached % block)
        assert cost.chunk_s(cached, least) > (quota_s - step.prompts_s) * (1 - 1e-9)


def opened(decodes_s: float = 0.0) -> StepQuotaUsage:
    return StepQuotaUsage(PrefillComputeQuota(costs=FLAT, quota_s=0.3, block_tokens=64), decodes_s)


def test_what_generates_comes_before_prompts_and_keeps_none_out_for_ever() -> None:
    assert opened().offer("a", 0, 300) == 300, "exactly the quota"
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
    # One that could not be cut opens the step again.
    step = opened()
    step.take("a", 0, step.offer("a", 0, 500, chunkable=False))
    assert (step.closed, step.cut, step.offer("b", 0, 90)) == (True, None, 0)
    step.undo_take("a")
    assert (step.closed, step.cut, step.prompts_s) == (False, None, 0.0)
    assert step.offer("b", 0, 90) == 90
