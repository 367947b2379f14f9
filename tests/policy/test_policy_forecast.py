"""When running requests will run short, and who may enter so that they do not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policy.demand import POINTS, needed_blocks, peak, shortage_in
from sojourn_server.policy.entry_forecast import ForecastFits
from sojourn_server.policy.forecast import DemandView, ExpectedNeed, NoForecast
from sojourn_server.policy.preset import PresetError, load_preset, parse_preset
from sojourn_server.policy.views import EntryView, RunningView

NOTHING = (0.0,) * len(POINTS)
NEWCOMER = RunningView(
    "new", 2, -1, 0, context_tokens=152, most_tokens=1000, remaining=(33.0,), of_program=True
)
"""It needs ten blocks of sixteen tokens now, eleven in sixteen steps, twelve in 32, and none in 33."""
ENTRY = EntryView(
    need_blocks=10,
    free_blocks=100,
    pool_blocks=100,
    block_size=16,
    max_context_tokens=10_000,
    anything_running=True,
    earlier=(),
    turns_seen=0,
    mean_growth_tokens=0.0,
    programs_seen=0,
    mean_turns=0.0,
    own=NEWCOMER,
    needed_blocks=NOTHING,
    room_blocks=100,
)
EXACTLY = ForecastFits(reserve=0.0)

needs = st.lists(st.floats(0, 200), min_size=len(POINTS), max_size=len(POINTS)).map(tuple)
newcomers = st.builds(
    NEWCOMER._replace,
    context_tokens=st.integers(0, 2000),
    remaining=st.lists(st.floats(1, 5000), min_size=1, max_size=8).map(sorted).map(tuple),
)


# -- when ----------------------------------------------------------------------------------


def test_nobody_asks_one_that_does_not_look() -> None:
    assert not NoForecast().looks
    assert NoForecast().short_in(DemandView((999.0,) * len(POINTS), 1), 0.0) is None


@given(needed=needs, room=st.integers(0, 200), steps=st.integers(1, 1000))
def test_a_shortage_is_told_as_far_ahead_as_one_looks(
    needed: tuple[float, ...], room: int, steps: int
) -> None:
    policy = ExpectedNeed(steps=steps)
    short_in = policy.short_in(DemandView(needed, room), 0.0)
    assert short_in == shortage_in(needed, room, steps)
    if short_in is not None:
        assert short_in <= steps
        further = ExpectedNeed(steps=steps + 100).short_in(DemandView(needed, room), 0.0)
        assert further == short_in, "one who looks further sees the same first"
        if short_in > 0:
            more_room = policy.short_in(DemandView(needed, room + 50), 0.0)
            assert more_room is None or more_room >= short_in


# -- who -----------------------------------------------------------------------------------


def test_somebody_enters_exactly_where_all_that_it_will_need_fits() -> None:
    # The others need ninety blocks; at its longest the newcomer needs twelve.
    crowded = replace(ENTRY, needed_blocks=(90.0,) * len(POINTS))
    assert EXACTLY.may_enter(replace(crowded, room_blocks=102), 0.0)
    assert not EXACTLY.may_enter(replace(crowded, room_blocks=101), 0.0), "though its prompt would fit"


def test_somebody_enters_where_another_leaves_in_time() -> None:
    leaving = replace(ENTRY, needed_blocks=(89.0, 89.0, *[10.0] * (len(POINTS) - 2)))
    assert EXACTLY.may_enter(leaving, 0.0)
    assert not EXACTLY.may_enter(replace(leaving, needed_blocks=(89.0, 90.0, *NOTHING[2:])), 0.0)


def test_a_share_of_the_room_is_kept_free() -> None:
    crowded = replace(ENTRY, needed_blocks=(78.0,) * len(POINTS))
    assert ForecastFits(reserve=0.1).may_enter(crowded, 0.0)
    assert not ForecastFits(reserve=0.11).may_enter(crowded, 0.0)


def test_what_comes_after_the_horizon_is_another_day() -> None:
    long = NEWCOMER._replace(remaining=(2000.0,))
    later = replace(ENTRY, own=long, needed_blocks=tuple(1000.0 if point > 500 else 0.0 for point in POINTS))
    assert not EXACTLY.may_enter(later, 0.0)
    assert ForecastFits(reserve=0.0, horizon_steps=500.0).may_enter(later, 0.0)


FULL: dict[str, Any] = {"needed_blocks": (1e6,) * len(POINTS), "room_blocks": 1}


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
        "nobody looked",
        "nothing is known",
        "nothing is said",
        "nothing is known of the others",
    ],
)
def test_who_is_first_or_unknown_enters_as_in_the_untouched_engine(unknown: dict[str, Any]) -> None:
    assert not EXACTLY.may_enter(replace(ENTRY, **FULL), 0.0)
    assert EXACTLY.may_enter(replace(ENTRY, **{**FULL, **unknown}), 0.0)


def test_who_is_over_by_then_does_not_wait_for_a_shortage_of_the_others() -> None:
    short_of = replace(ENTRY, needed_blocks=tuple(1000.0 if point > 500 else 50.0 for point in POINTS))
    assert EXACTLY.may_enter(short_of, 0.0), "in 33 steps it needs nothing"
    one_in_sixty = NEWCOMER._replace(remaining=(33.0,) * 59 + (600.0,))
    assert EXACTLY.may_enter(replace(short_of, own=one_in_sixty), 0.0)
    one_in_four = NEWCOMER._replace(remaining=(33.0,) * 3 + (600.0,))
    assert not EXACTLY.may_enter(replace(short_of, own=one_in_four), 0.0)


def test_one_that_outgrows_the_room_waits_for_half_of_it_and_not_until_nobody_runs() -> None:
    giant = NEWCOMER._replace(remaining=(30_000.0,))
    for others, enters in ((50.0, True), (51.0, False)):
        beside = replace(ENTRY, own=giant, needed_blocks=(others,) * len(POINTS))
        assert EXACTLY.may_enter(beside, 0.0) is enters


@given(needed=needs, own=newcomers, room=st.integers(0, 500), horizon=st.floats(1, 40_000))
def test_the_gate_is_the_peak_of_the_sum_while_it_is_there(
    needed: tuple[float, ...], own: RunningView, room: int, horizon: float
) -> None:
    policy = ForecastFits(reserve=0.0, horizon_steps=horizon)
    entry = replace(ENTRY, own=own, needed_blocks=needed, room_blocks=room)
    its = needed_blocks([own], 16)
    together = [sum(at) for at in zip(needed, its, strict=True)]
    entered = policy.may_enter(entry, 0.0)
    if peak(together, horizon) <= room:
        assert entered, "where all fits nobody waits"
    if entered:
        assert policy.may_enter(replace(entry, room_blocks=room + 1), 0.0), "more room never shuts it"
        most = peak(its, horizon)
        if most <= room / 2:
            for point, need, part in zip(POINTS, together, its, strict=True):
                assert need <= room or part < 0.1 * most or point > horizon


# -- in a preset ------------------------------------------------------------------------------


def test_the_preset_of_the_paper_forecasts() -> None:
    preset = load_preset("tetris")
    assert preset.entry == ForecastFits()
    assert preset.forecast == ExpectedNeed()
    assert preset.entry.gates
    assert preset.entry.forecasts
    assert preset.remaining.predicts, "else nobody would tell them what is needed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('forecast = { policy = "expected-need", steps = 0 }', "forecast: steps is 0; expected ≥ 1"),
        ('forecast = { policy = "expected-need", steps = nan }', "steps is nan"),
        ('entry = { policy = "forecast-fits", reserve = 1.0 }', "entry: reserve 1.0"),
        ('entry = { policy = "forecast-fits", reserve = -0.1 }', "reserve -0.1"),
        ('entry = { policy = "forecast-fits", reserve = nan }', "reserve nan"),
        ('entry = { policy = "forecast-fits", horizon_steps = 0 }', "horizon_steps 0"),
        ('entry = { policy = "forecast-fits", horizon_steps = nan }', "horizon_steps nan"),
    ],
)
def test_numbers_out_of_range_are_refused(text: str, message: str) -> None:
    with pytest.raises(PresetError, match=f"x: .*{message}"):
        parse_preset(f'extends = "tetris"\n{text}', source="x")


def test_one_looks_as_far_as_it_is_told() -> None:
    rising = DemandView(tuple(float(point) for point in POINTS), 512)
    assert ExpectedNeed(steps=511).short_in(rising, 0.0) is None
    assert ExpectedNeed(steps=512).short_in(rising, 0.0) == 512
    assert ExpectedNeed(steps=10**9).short_in(rising._replace(room_blocks=10**9), math.inf) is None
