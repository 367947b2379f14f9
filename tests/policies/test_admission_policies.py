"""Admission: a program waits until earlier ones can still grow."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_requests import needed_at
from sojourn_server.policies.admission_policies import (
    AdmissionPolicy,
    DemandForecastAdmission,
    ExpectedGrowthAdmission,
    WholeProgramAdmission,
)
from sojourn_server.policies.forecasting import (
    MIN_PROGRAMS_SEEN,
    MIN_TURNS_SEEN,
    STEP_POINTS,
    ExpectedDemandForecast,
    KvDemandView,
    expected_growth_tokens,
    needed_blocks,
    peak_demand_blocks,
)
from sojourn_server.policies.policy_views import (
    AdmissionView,
    GrowthStatistics,
    ProgramGrowthView,
    RunningRequestView,
)


def admission_view(need_blocks: int, **facts: Any) -> AdmissionView:
    """Return the view of a newcomer to a busy engine without earlier programs or history."""
    return AdmissionView(
        need_blocks=need_blocks, anything_running=True, earlier=(), growth=GrowthStatistics(), **facts
    )


LONGEST = 100_000
NEWCOMER = admission_view(20, free_blocks=100, pool_blocks=1_000, block_size=10, max_context_tokens=LONGEST)
YOUNG = ProgramGrowthView(turns=1, first_prompt_tokens=100, context_tokens=100)


def test_a_whole_program_enters_where_its_prompt_fits_and_the_earliest_always() -> None:
    full = replace(NEWCOMER, free_blocks=19, earlier=(YOUNG,))
    assert not WholeProgramAdmission().may_admit(full, 0.0)
    assert WholeProgramAdmission().may_admit(replace(full, free_blocks=20), 0.0)
    assert WholeProgramAdmission().may_admit(replace(full, free_blocks=0, earlier=()), 0.0)
    for idle_s, enters in ((29.9, False), (30.0, True)):
        idle = replace(full, free_blocks=0, anything_running=False, idle_s=idle_s)
        assert WholeProgramAdmission().may_admit(idle, 0.0) is enters


GROWS = ExpectedGrowthAdmission(reserve=1.0)
"""Two earlier programs of 100 tokens will each grow by 300 tokens: 60 blocks of 10 are to stay free."""
GIANT = ProgramGrowthView(turns=0, first_prompt_tokens=50_000, context_tokens=10)


@pytest.mark.parametrize(
    ("case", "policy", "changes", "enters"),
    [
        ("the engine decides", AdmissionPolicy(), {"free_blocks": 0, "earlier": (YOUNG,) * 9}, True),
        ("all of it fits", GROWS, {"free_blocks": 80}, True),
        ("a block is missing", GROWS, {"free_blocks": 79}, False),
        ("half of it fits", ExpectedGrowthAdmission(reserve=0.5), {"free_blocks": 50}, True),
        ("nothing runs", GROWS, {"free_blocks": 20, "anything_running": False}, True),
        ("all need no more than the pool", GROWS, {"free_blocks": 1_020, "earlier": (GIANT,) * 3}, True),
        ("KV was just lost", GROWS, {"since_shortage_s": 0.0}, False),
        ("30 blocks and a little half of the time later", GROWS, {"since_shortage_s": 299.0}, False),
        ("then fewer", GROWS, {"since_shortage_s": 301.0}, True),
        ("KV was never lost", GROWS, {"since_shortage_s": math.inf, "free_blocks": 20}, True),
        ("but the prompt must fit", GROWS, {"since_shortage_s": math.inf, "free_blocks": 19}, False),
    ],
)
def test_the_gate_shuts_exactly_where_the_growth_no_longer_fits(
    case: str, policy: AdmissionPolicy, changes: dict[str, Any], enters: bool
) -> None:
    entry = replace(NEWCOMER, earlier=(YOUNG, YOUNG), free_blocks=50)
    assert policy.may_admit(replace(entry, **changes), 0.0) is enters, case


def test_priors_hold_until_growth_was_seen() -> None:
    assert expected_growth_tokens(YOUNG, GrowthStatistics(), LONGEST) == pytest.approx(10 * 30)
    seen = GrowthStatistics(MIN_TURNS_SEEN, 7.0, MIN_PROGRAMS_SEEN, 5.0)
    assert expected_growth_tokens(YOUNG, seen, LONGEST) == pytest.approx(4 * 7)
    assert expected_growth_tokens(YOUNG, GrowthStatistics(), 105) == 5, "up to the longest context"
    few = GrowthStatistics(MIN_TURNS_SEEN - 1, 7.0, MIN_PROGRAMS_SEEN - 1, 5.0)
    assert expected_growth_tokens(YOUNG, few, LONGEST) == pytest.approx(10 * 30)


def test_a_program_older_than_expected_still_grows_by_a_turn() -> None:
    old = GrowthStatistics(MIN_TURNS_SEEN, 50.0)
    aged = ProgramGrowthView(turns=99, first_prompt_tokens=10, context_tokens=900)
    assert expected_growth_tokens(aged, old, LONGEST) == pytest.approx(50.0)


# -- admission by the demand that is forecast ------------------------------------------------------


NOTHING = (0.0,) * len(STEP_POINTS)
OWN = RunningRequestView(
    "new", 2, -1, 0, context_tokens=152, most_tokens=1000, remaining=(33.0,), of_program=True
)
"""It needs ten blocks of sixteen tokens now, eleven in sixteen steps, twelve in 32, and none in 33."""
ENTRY = admission_view(
    10,
    free_blocks=100,
    pool_blocks=100,
    block_size=16,
    max_context_tokens=10_000,
    own=OWN,
    needed_blocks=NOTHING,
    available_blocks=100,
)
EXACTLY = DemandForecastAdmission(reserve=0.0)

needs = st.lists(st.floats(0, 200), min_size=len(STEP_POINTS), max_size=len(STEP_POINTS)).map(tuple)
newcomers = st.builds(
    OWN._replace,
    context_tokens=st.integers(0, 2000),
    remaining=st.lists(st.floats(1, 5000), min_size=1, max_size=8).map(sorted).map(tuple),
)


# -- admission -----------------------------------------------------------------------------------


def test_a_share_of_the_memory_stays_free() -> None:
    crowded = replace(ENTRY, needed_blocks=(78.0,) * len(STEP_POINTS))
    assert DemandForecastAdmission(reserve=0.1).may_admit(crowded, 0.0)
    assert not DemandForecastAdmission(reserve=0.11).may_admit(crowded, 0.0)


FULL: dict[str, Any] = {"needed_blocks": (1e6,) * len(STEP_POINTS), "available_blocks": 1}


@pytest.mark.parametrize(
    "unknown",
    [
        {"anything_running": False},
        {"own": None},
        {"own": OWN._replace(remaining=None)},
        {"own": OWN._replace(remaining=())},
        {"needed_blocks": ()},
    ],
    ids=["nothing runs", "no request view", "nothing is known", "empty prediction", "no demand forecast"],
)
def test_the_first_and_unknown_requests_enter_as_in_stock_vllm(unknown: dict[str, Any]) -> None:
    assert not EXACTLY.may_admit(replace(ENTRY, **FULL), 0.0)
    assert EXACTLY.may_admit(replace(ENTRY, **{**FULL, **unknown}), 0.0)


def test_a_request_that_ends_before_a_shortage_does_not_wait_for_it() -> None:
    short_of = replace(ENTRY, needed_blocks=tuple(1000.0 if point > 500 else 50.0 for point in STEP_POINTS))
    assert EXACTLY.may_admit(short_of, 0.0), "in 33 steps it needs nothing"
    one_in_sixty = OWN._replace(remaining=(33.0,) * 59 + (600.0,))
    assert EXACTLY.may_admit(replace(short_of, own=one_in_sixty), 0.0)
    one_in_four = OWN._replace(remaining=(33.0,) * 3 + (600.0,))
    assert not EXACTLY.may_admit(replace(short_of, own=one_in_four), 0.0)


def test_a_request_larger_than_the_memory_waits_for_half_of_it_only() -> None:
    giant = OWN._replace(remaining=(30_000.0,))
    for others, enters in ((50.0, True), (51.0, False)):
        beside = replace(ENTRY, own=giant, needed_blocks=(others,) * len(STEP_POINTS))
        assert EXACTLY.may_admit(beside, 0.0) is enters


@given(needed=needs, own=newcomers, room=st.integers(0, 500))
def test_the_gate_is_the_peak_of_the_sum_while_it_is_there(
    needed: tuple[float, ...], own: RunningRequestView, room: int
) -> None:
    entry = replace(ENTRY, own=own, needed_blocks=needed, available_blocks=room)
    its = needed_blocks([own], 16)
    together = [sum(at) for at in zip(needed, its, strict=True)]
    entered = EXACTLY.may_admit(entry, 0.0)
    if max(together) <= room:
        assert entered, "no request waits if all fit"
    if entered:
        assert EXACTLY.may_admit(replace(entry, available_blocks=room + 1), 0.0), (
            "more memory never refuses it"
        )
        most = max(its)
        if most <= room / 2:
            for need, part in zip(together, its, strict=True):
                assert need <= room or part < 0.1 * most


# -- what running requests will need ---------------------------------------------------------------


def request(context: int, remaining: tuple[float, ...] | None, name: str = "r") -> RunningRequestView:
    return RunningRequestView(name, 1, 0, 0, context_tokens=context, remaining=remaining)


left = st.floats(1, 40_000) | st.integers(1, 40_000).map(float) | st.sampled_from(STEP_POINTS[1:]).map(float)
requests = st.builds(
    request, st.integers(0, 10**6), st.none() | st.lists(left, max_size=8).map(sorted).map(tuple)
)
sets = st.lists(requests, max_size=10)
sizes = st.sampled_from([1, 16, 64])


@given(running=sets, size=sizes)
def test_the_need_is_the_mean_over_what_each_may_yet_write(
    running: list[RunningRequestView], size: int
) -> None:
    expected = [float(needed_at(running, size, point)) for point in STEP_POINTS]
    assert needed_blocks(running, size) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(
    needed=needs, steps=st.integers(1, 50_000) | st.sampled_from(STEP_POINTS[1:]), beside=st.integers(-2, 2)
)
def test_a_shortage_is_seen_within_the_horizon(needed: tuple[float, ...], steps: int, beside: int) -> None:
    highest = max(need for point, need in zip(STEP_POINTS, needed, strict=True) if point <= steps)
    assert peak_demand_blocks(iter(needed), steps) == highest
    assert peak_demand_blocks(needed, math.inf) == max(needed)
    room = round(highest) + beside
    expected = ExpectedDemandForecast(steps=steps).expects_shortage(KvDemandView(needed, room), 0.0)
    assert expected == (highest > room)


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
        highest = max(needed_at(running, 16, view.remaining[0] - 1) for view in running if view.remaining)
        lower.append(1 - peak_demand_blocks(needed_blocks(running, 16), math.inf) / highest)
    assert all(0 <= short < 0.16 for short in lower)
    assert fmean(lower) < 0.08
