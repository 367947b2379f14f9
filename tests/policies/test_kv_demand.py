"""What running requests will need: against sums by hand."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.forecasting import (
    STEP_POINTS,
    needed_blocks,
    peak_demand_blocks,
)
from sojourn_server.policies.policy_views import RunningRequestView


def request(context: int, remaining: tuple[float, ...] | None, name: str = "r") -> RunningRequestView:
    return RunningRequestView(name, 1, 0, 0, context_tokens=context, remaining=remaining)


left = st.floats(1, 40_000) | st.integers(1, 40_000).map(float) | st.sampled_from(STEP_POINTS[1:]).map(float)
requests = st.builds(
    request,
    st.integers(0, 10**6),
    st.none() | st.lists(left, min_size=1, max_size=8).map(sorted).map(tuple),
)
sets = st.lists(requests, max_size=10)
sizes = st.sampled_from([1, 16, 64])
needs = st.lists(st.floats(0, 1000), min_size=len(STEP_POINTS), max_size=len(STEP_POINTS))
steps = st.floats(0, 50_000) | st.just(math.inf)


def naive(running: list[RunningRequestView], size: int, step: float) -> float:
    """Blocks that these need after ``step`` steps, on average over what each may yet write."""
    tokens = 0.0
    for view in running:
        present = view.context_tokens + size / 2
        if view.remaining is None:
            tokens += present
        else:
            lives = [present + step if remaining > step else 0.0 for remaining in view.remaining]
            tokens += sum(lives) / len(lives)
    return tokens / size


@given(running=sets, size=sizes)
def test_the_need_is_the_mean_over_what_each_may_yet_write(
    running: list[RunningRequestView], size: int
) -> None:
    expected = [naive(running, size, point) for point in STEP_POINTS]
    assert needed_blocks(running, size) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("unknown", [None, ()])
def test_without_history_the_present_demand_is_the_forecast(unknown: tuple[float, ...] | None) -> None:
    assert needed_blocks([request(152, unknown)], 16) == [10.0] * len(STEP_POINTS)


def test_no_requests_have_no_demand() -> None:
    assert needed_blocks([], 16) == [0.0] * len(STEP_POINTS)
    assert peak_demand_blocks(needed_blocks([], 16), math.inf) == 0.0


@given(needed=needs, within=steps)
def test_the_peak_is_the_most_up_to_then(needed: list[float], within: float) -> None:
    reached = [need for point, need in zip(STEP_POINTS, needed, strict=True) if point <= within]
    assert peak_demand_blocks(needed, within) == max(reached)
    assert peak_demand_blocks(iter(needed), math.inf) == max(needed)


def test_a_shortage_is_looked_for_at_points_that_are_near_enough() -> None:
    """Short contexts and long outputs that are foreseen exactly are the worst case: each grows to many times
    what it is, and is gone in one step."""
    lower = []
    for seed in range(60):
        random = Random(seed)
        running = [
            request(random.randint(100, 1000), (math.ceil(random.lognormvariate(math.log(2000), 1.0)) + 0.0,))
            for _ in range(random.choice((1, 4, 16)))
        ]
        highest = max(naive(running, 16, view.remaining[0] - 1) for view in running if view.remaining)
        lower.append(1 - peak_demand_blocks(needed_blocks(running, 16), math.inf) / highest)
    assert all(0 <= short < 0.16 for short in lower)
    assert fmean(lower) < 0.08
