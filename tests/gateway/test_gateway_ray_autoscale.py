"""How many engines there should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.gateway.ray.autoscale import (
    AutoscaleDecision,
    AutoscaleLimits,
    CapacityDemand,
    wanted_engines,
)

LIMITS = AutoscaleLimits(min_engines=1, max_engines=4, shrink_after_s=100.0)


def test_more_at_once() -> None:
    assert wanted_engines(CapacityDemand(8_000, 10_000), AutoscaleDecision(1), LIMITS, 0.0).engines == 1
    assert wanted_engines(CapacityDemand(8_001, 10_000), AutoscaleDecision(1), LIMITS, 0.0).engines == 2
    assert wanted_engines(CapacityDemand(30_000, 10_000), AutoscaleDecision(1), LIMITS, 0.0).engines == 4
    assert wanted_engines(CapacityDemand(900_000, 10_000), AutoscaleDecision(1), LIMITS, 0.0).engines == 4


def test_fewer_after_a_while_and_one_at_a_time() -> None:
    wanted = AutoscaleDecision(4)
    for now, engines in ((0.0, 4), (99.0, 4), (100.0, 3), (150.0, 3), (200.0, 2), (300.0, 1), (900.0, 1)):
        wanted = wanted_engines(CapacityDemand(0, 10_000), wanted, LIMITS, now)
        assert wanted.engines == engines, now


def test_a_short_lull_changes_nothing() -> None:
    wanted = wanted_engines(CapacityDemand(0, 10_000), AutoscaleDecision(2), LIMITS, 0.0)
    wanted = wanted_engines(CapacityDemand(12_000, 10_000), wanted, LIMITS, 90.0)
    wanted = wanted_engines(CapacityDemand(0, 10_000), wanted, LIMITS, 110.0)
    assert wanted_engines(CapacityDemand(0, 10_000), wanted, LIMITS, 200.0).engines == 2
    assert wanted_engines(CapacityDemand(0, 10_000), wanted, LIMITS, 210.0).engines == 1


def test_without_an_engine_nothing_is_known() -> None:
    assert wanted_engines(CapacityDemand(10**9, 0), AutoscaleDecision(2), LIMITS, 0.0).engines == 2


def test_a_clock_that_steps_back_makes_nothing_shrink() -> None:
    wanted = wanted_engines(CapacityDemand(0, 10_000), AutoscaleDecision(2, 1_000.0), LIMITS, 0.0)
    assert wanted == AutoscaleDecision(2, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5), st.floats(0, 50)), max_size=40),
    st.integers(-5, 9),
)
def test_it_stays_within_bounds_and_does_not_swing(steps: list[tuple[int, int, float]], first: int) -> None:
    wanted, now = AutoscaleDecision(first), 0.0
    for programs, engine, later in steps:
        now += later
        before, wanted = wanted.engines, wanted_engines(CapacityDemand(programs, engine), wanted, LIMITS, now)
        assert 1 <= wanted.engines <= 4
        if 1 <= before <= 4:
            assert wanted.engines >= before - 1
            if wanted.engines < before:  # what is left is not too little at once
                assert (
                    wanted_engines(CapacityDemand(programs, engine), wanted, LIMITS, now).engines
                    == wanted.engines
                )


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_engines": 0},
        {"min_engines": 3, "max_engines": 2},
        {"target_use": 0.5, "shrink_below_use": 0.5},
        {"target_use": 1.1},
        {"shrink_after_s": -1.0},
    ],
)
def test_bounds_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        AutoscaleLimits(**wrong)  # type: ignore[arg-type]
