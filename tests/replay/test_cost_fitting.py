"""Fits of step costs recover the coefficients of their samples and are never negative."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sojourn_server.policies.costs.step_costs import StepCosts, StepSample
from sojourn_server.profiling.cost_fitting import fit_step_costs, non_negative_least_squares

TRUE = StepCosts(step_s=5e-3, token_s=7e-5, pair_s=3e-9, kv_token_s=9e-8, request_s=2e-5, call_s=4e-3)


def plan() -> list[StepSample]:
    """Prefills, extensions and decodes as a profile measures them, without their seconds."""
    prefills = [StepSample(1, 1, n, n * (n + 1) / 2, n, 1, 1) for n in (250, 500, 1000, 2000, 4000)]
    extended = [
        StepSample(1, 1, n, n * c + n * (n + 1) / 2, n + c, 1, 1) for c in (2000, 6000) for n in (60, 500)
    ]
    decodes = [StepSample(1, 1, b, b * c, b * c, b) for b in (1, 2, 8, 32) for c in (256, 2000, 8000)]
    return [*prefills, *extended, *decodes]


def measured(costs: StepCosts, noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    rng = random.Random(seed)
    return [s._replace(seconds=costs.seconds(s) * (1 + rng.uniform(-noise, noise))) for s in plan()]


COST = st.floats(0.1, 10)


@given(st.tuples(COST, COST, COST, COST, COST, COST))
def test_what_made_the_samples_comes_back(factors: tuple[float, ...]) -> None:
    costs = StepCosts(*(factor * cost for factor, cost in zip(factors, TRUE, strict=True)))
    fitted = fit_step_costs(measured(costs))
    assert fitted == pytest.approx(costs, rel=1e-4)
    assert fitted.relative_error(measured(costs)) < 1e-6


@given(st.lists(st.floats(1e-4, 10), min_size=len(plan()), max_size=len(plan())))
def test_any_measurement_gives_costs_that_are_not_negative(seconds: list[float]) -> None:
    samples = [s._replace(seconds=value) for s, value in zip(plan(), seconds, strict=True)]
    costs = fit_step_costs(samples)
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs)
    assert costs.relative_error(samples) <= 1 + 1e-9  # nothing at all would be off by 1 everywhere


@pytest.mark.parametrize("factor", [1e-3, 1e-1, 10.0, 1e3])
@pytest.mark.parametrize("place", [0, 8, 12])  # not the farthest: nothing else tells of that corner
def test_one_absurd_sample_does_not_decide(place: int, factor: float) -> None:
    samples = measured(TRUE, noise=0.02, seed=5)
    samples[place] = samples[place]._replace(seconds=samples[place].seconds * factor)
    costs = fit_step_costs(samples)
    for sample in measured(TRUE):
        assert costs.seconds(sample) == pytest.approx(sample.seconds, rel=0.25)


@example(rows=[(0.0,) * 3, (0.0,) * 3, (0.0, 0.0, -5e-324)], targets=[0.0, 0.0, -1.0], rival=(0.0,) * 3)
@example(rows=[(1, 2, 0), (2, 4, 0), (3, 6, 0)], targets=[1, 2, 3], rival=(1, 0, 0))
@given(
    st.lists(st.tuples(*[st.floats(-10, 10)] * 3), min_size=3, max_size=8),
    st.lists(st.floats(-10, 10), min_size=8, max_size=8),
    st.tuples(*[st.floats(0, 5)] * 3),
)
def test_no_other_non_negative_solution_is_better(
    rows: list[tuple[float, float, float]], targets: list[float], rival: tuple[float, float, float]
) -> None:
    def error(x: list[float] | tuple[float, ...]) -> float:
        return math.fsum(
            (math.fsum(a * b for a, b in zip(row, x, strict=True)) - t) ** 2
            for row, t in zip(rows, targets, strict=False)
        )

    found = non_negative_least_squares(rows, targets[: len(rows)])
    assert min(found) >= 0
    assert error(found) <= error(rival) * (1 + 1e-6) + 1e-6
