"""Whom best fit preempts: against the rule said naively, and in a small engine in which requests grow."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from running_requests import needed_at, request_sets
from sojourn_server.policies.forecasting import STEP_POINTS
from sojourn_server.policies.policy_views import BlockShortage, RunningRequestView
from sojourn_server.policies.preemption_policies import (
    HORIZON_STEPS,
    IMMUNE_TOKENS,
    MOST_COMPARED,
    MOST_PREEMPTIONS,
    BestFitVictim,
)

NEED = BlockShortage(100, 16, 0.05)


def request(name: str, position: int, **facts: object) -> RunningRequestView:
    return RunningRequestView(name, position + 1, position, 10, of_program=True)._replace(**facts)


# -- the rule, said naively ------------------------------------------------------------------


def candidates_of(running: list[RunningRequestView]) -> list[RunningRequestView]:
    """Those who may be preempted."""

    def may_go(view: RunningRequestView) -> bool:
        often = view.preemptions >= MOST_PREEMPTIONS
        lately = view.preemptions > 0 and view.stayed_tokens < IMMUNE_TOKENS
        return not often and not lately

    candidates = [view for view in running if may_go(view)]
    if not candidates:
        fewest = min(view.preemptions for view in running)
        candidates = [view for view in running if view.preemptions == fewest]
    return candidates


def naive(running: list[RunningRequestView], need: BlockShortage) -> tuple[list[RunningRequestView], bool]:
    """The candidates, best first, and whether the best one is unambiguous."""
    candidates = candidates_of(running)

    def worth(view: RunningRequestView) -> tuple[float, ...]:
        rest = [other for other in running if other is not view]
        others = [needed_at(rest, need.block_size, step) for step in STEP_POINTS]
        most = max(need for at, need in zip(STEP_POINTS, others, strict=True) if at <= HORIZON_STEPS)
        room = need.available_blocks - view.shared_blocks
        own = Fraction(2 * view.context_tokens + need.block_size, 2 * need.block_size)
        fits = [at for at, taken in zip(STEP_POINTS, others, strict=True) if taken + own <= room]
        away = fits[0] if fits else 2 * STEP_POINTS[-1]
        work = view.recover_s / need.step_s if need.step_s else 0.0
        left = sum(view.remaining) / len(view.remaining) if view.remaining else 0.0
        loss = (away + work) / max(1.0, view.output_tokens + left)
        return (max(0.0, float(most - room)), loss, -view.program_rank, -view.position)

    ordered = sorted(candidates, key=worth)
    if len(ordered) < 2:
        return ordered, True
    (lacking, loss, *_), (next_lacking, next_loss, *_) = worth(ordered[0]), worth(ordered[1])
    near = math.isclose(lacking, next_lacking, rel_tol=1e-9, abs_tol=1e-5)
    if near and lacking == next_lacking:
        return ordered, loss == next_loss or not math.isclose(loss, next_loss, rel_tol=1e-9)
    return ordered, not near


shortages = st.builds(
    BlockShortage, st.integers(0, 400), st.sampled_from([4, 16, 64]), step_s=st.sampled_from([0.0, 0.05])
)


def test_of_very_many_only_the_largest_are_compared() -> None:
    """The small ones would lose less, as their outputs are long."""
    large = [request(f"l{at}", at, blocks=20, context_tokens=320) for at in range(MOST_COMPARED)]
    small = [request(f"s{at}", at, context_tokens=160, output_tokens=900) for at in range(200)]
    running = [one._replace(remaining=(50.0,)) for one in (*small, *large)]
    need = BlockShortage(4560, 16, 0.05)
    assert (BestFitVictim().victim(running[100:228], need, 0.0) or "").startswith("s")
    assert (BestFitVictim().victim(running, need, 0.0) or "").startswith("l")


@settings(max_examples=150)
@given(running=request_sets, need=shortages)
def test_it_chooses_like_a_naive_implementation(
    running: list[RunningRequestView], need: BlockShortage
) -> None:
    chosen = BestFitVictim().victim(running, need, 0.0)
    if not any(view.of_program and view.remaining for view in running):
        candidates = candidates_of(running)
        if len(candidates) == len(running) or not any(view.of_program for view in running):
            assert chosen is None
        else:
            assert chosen == max(candidates, key=lambda view: (view.position, view.request_id)).request_id
        return
    ordered, clear = naive(running, need)
    if clear:
        assert chosen == ordered[0].request_id
    else:
        assert chosen in {view.request_id for view in ordered}


# -- the rule, by example ---------------------------------------------------------------------------


def test_where_all_outputs_are_short_the_engine_chooses() -> None:
    running = [request(name, at, context_tokens=1000, remaining=(500.0,)) for at, name in enumerate("ab")]
    for least_tokens, chosen in ((500, "b"), (501, None)):
        assert BestFitVictim(least_tokens=least_tokens).victim(running, NEED, 0.0) == chosen


def test_what_fits_to_the_block_fits() -> None:
    """Three equally likely lives do not add up to the last digit: no trillionth of a block decides."""
    lives = ((2000.0,), (2000.0,) * 3, (2000.0,) * 7)
    for blocks in range(60, 400):
        for cheap_lives, dear_lives in permutations(lives, 2):
            # Without either, the other fills the memory exactly in 1024 steps.
            context = 16 * blocks - 8
            cheap = request("cheap", 0, context_tokens=context, remaining=cheap_lives, output_tokens=10_000)
            dear = request("dear", 1, context_tokens=context, remaining=dear_lives, recover_s=50.0)
            assert (
                BestFitVictim().victim([cheap, dear], NEED._replace(available_blocks=blocks + 64), 0.0)
                == "cheap"
            )
