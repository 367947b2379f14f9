"""When running requests run out of blocks, and admission that prevents it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from admission_views import admission_view
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.admission_policies import DemandForecastAdmission
from sojourn_server.policies.forecasting import (
    STEP_POINTS,
    ExpectedDemandForecast,
    KvDemandView,
    ShortageForecastPolicy,
    needed_blocks,
)
from sojourn_server.policies.policy_views import RunningRequestView
from sojourn_server.policies.preset import load_preset

NOTHING = (0.0,) * len(STEP_POINTS)
NEWCOMER = RunningRequestView(
    "new", 2, -1, 0, context_tokens=152, most_tokens=1000, remaining=(33.0,), of_program=True
)
"""It needs ten blocks of sixteen tokens now, eleven in sixteen steps, twelve in 32, and none in 33."""
ENTRY = admission_view(
    10,
    free_blocks=100,
    pool_blocks=100,
    block_size=16,
    max_context_tokens=10_000,
    own=NEWCOMER,
    needed_blocks=NOTHING,
    available_blocks=100,
)
EXACTLY = DemandForecastAdmission(reserve=0.0)

needs = st.lists(st.floats(0, 200), min_size=len(STEP_POINTS), max_size=len(STEP_POINTS)).map(tuple)
newcomers = st.builds(
    NEWCOMER._replace,
    context_tokens=st.integers(0, 2000),
    remaining=st.lists(st.floats(1, 5000), min_size=1, max_size=8).map(sorted).map(tuple),
)


# -- when ----------------------------------------------------------------------------------


def test_a_policy_that_does_not_look_expects_none() -> None:
    assert not ShortageForecastPolicy().is_used
    demand = KvDemandView((999.0,) * len(STEP_POINTS), 1)
    assert not ShortageForecastPolicy().expects_shortage(demand, 0.0)


@given(needed=needs, room=st.integers(0, 200), steps=st.integers(1, 1000))
def test_a_shortage_is_seen_within_the_horizon(needed: tuple[float, ...], room: int, steps: int) -> None:
    reached = [need for point, need in zip(STEP_POINTS, needed, strict=True) if point <= steps]
    expected = ExpectedDemandForecast(steps=steps).expects_shortage(KvDemandView(needed, room), 0.0)
    assert expected == (max(reached) > room)


# -- admission -----------------------------------------------------------------------------------


def test_a_request_enters_exactly_if_its_whole_demand_fits() -> None:
    # The others need ninety blocks; at its longest the newcomer needs twelve.
    crowded = replace(ENTRY, needed_blocks=(90.0,) * len(STEP_POINTS))
    assert EXACTLY.may_admit(replace(crowded, available_blocks=102), 0.0)
    assert not EXACTLY.may_admit(replace(crowded, available_blocks=101), 0.0), "though its prompt would fit"


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
        {"own": NEWCOMER._replace(remaining=None)},
        {"own": NEWCOMER._replace(remaining=())},
        {"needed_blocks": ()},
    ],
    ids=[
        "nothing runs",
        "no request view",
        "nothing is known",
        "empty prediction",
        "no demand forecast",
    ],
)
def test_the_first_and_unknown_requests_enter_as_in_stock_vllm(unknown: dict[str, Any]) -> None:
    assert not EXACTLY.may_admit(replace(ENTRY, **FULL), 0.0)
    assert EXACTLY.may_admit(replace(ENTRY, **{**FULL, **unknown}), 0.0)


def test_a_request_that_ends_before_a_shortage_does_not_wait_for_it() -> None:
    short_of = replace(ENTRY, needed_blocks=tuple(1000.0 if point > 500 else 50.0 for point in STEP_POINTS))
    assert EXACTLY.may_admit(short_of, 0.0), "in 33 steps it needs nothing"
    one_in_sixty = NEWCOMER._replace(remaining=(33.0,) * 59 + (600.0,))
    assert EXACTLY.may_admit(replace(short_of, own=one_in_sixty), 0.0)
    one_in_four = NEWCOMER._replace(remaining=(33.0,) * 3 + (600.0,))
    assert not EXACTLY.may_admit(replace(short_of, own=one_in_four), 0.0)


def test_a_request_larger_than_the_memory_waits_for_half_of_it_only() -> None:
    giant = NEWCOMER._replace(remaining=(30_000.0,))
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


# -- in a preset ------------------------------------------------------------------------------


def test_the_preset_of_the_paper_forecasts() -> None:
    preset = load_preset("tetris")
    assert preset.admission == DemandForecastAdmission()
    assert preset.forecast == ExpectedDemandForecast()
    assert preset.admission.is_used
    assert preset.admission.forecasts
    assert preset.output_length.predicts, "otherwise demand is unknown"
