"""Admission: a program waits until earlier ones can still grow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from admission_views import admission_view
from sojourn_server.policies.admission_policies import AdmissionPolicy, ExpectedGrowthAdmission
from sojourn_server.policies.forecasting import (
    MIN_PROGRAMS_SEEN,
    MIN_TURNS_SEEN,
    expected_growth_tokens,
)
from sojourn_server.policies.policy_views import GrowthStatistics, ProgramGrowthView

LONGEST = 100_000
NEWCOMER = admission_view(20, free_blocks=100, pool_blocks=1_000, block_size=10, max_context_tokens=LONGEST)
YOUNG = ProgramGrowthView(turns=1, first_prompt_tokens=100, context_tokens=100)


def test_the_first_program_always_enters() -> None:
    assert ExpectedGrowthAdmission().may_admit(replace(NEWCOMER, need_blocks=10_000), 0.0)


def test_an_idle_engine_admits_the_first_program() -> None:
    crowded = replace(NEWCOMER, free_blocks=20, earlier=(YOUNG,) * 9)
    assert not ExpectedGrowthAdmission().may_admit(crowded, 0.0)
    assert ExpectedGrowthAdmission().may_admit(replace(crowded, anything_running=False), 0.0)


def test_no_context_is_expected_to_grow_beyond_its_limit_and_all_not_beyond_the_pool() -> None:
    policy = ExpectedGrowthAdmission(reserve=1.0)
    full = ProgramGrowthView(turns=1, first_prompt_tokens=100, context_tokens=95)
    assert expected_growth_tokens(full, GrowthStatistics(), 100) == 5
    giants = (ProgramGrowthView(turns=0, first_prompt_tokens=50_000, context_tokens=10),) * 3
    assert policy.may_admit(replace(NEWCOMER, free_blocks=1_020, earlier=giants), 0.0)


def test_everyone_enters_where_the_engine_decides() -> None:
    assert AdmissionPolicy().may_admit(replace(NEWCOMER, free_blocks=0, earlier=(YOUNG,) * 9), 0.0)


def test_priors_hold_until_growth_was_seen() -> None:
    assert expected_growth_tokens(YOUNG, GrowthStatistics(), LONGEST) == pytest.approx(10 * 30)
    seen = GrowthStatistics(MIN_TURNS_SEEN, 7.0, MIN_PROGRAMS_SEEN, 5.0)
    assert expected_growth_tokens(YOUNG, seen, LONGEST) == pytest.approx(4 * 7)
    few = GrowthStatistics(MIN_TURNS_SEEN - 1, 7.0, MIN_PROGRAMS_SEEN - 1, 5.0)
    assert expected_growth_tokens(YOUNG, few, LONGEST) == pytest.approx(10 * 30)


def test_a_program_older_than_expected_still_grows_by_a_turn() -> None:
    old = GrowthStatistics(MIN_TURNS_SEEN, 50.0)
    aged = ProgramGrowthView(turns=99, first_prompt_tokens=10, context_tokens=900)
    assert expected_growth_tokens(aged, old, LONGEST) == pytest.approx(50.0)


def test_the_gate_shuts_exactly_where_the_growth_no_longer_fits() -> None:
    policy = ExpectedGrowthAdmission(reserve=1.0)
    # Two earlier programs will each grow by 300 tokens: 60 blocks of 10 are to stay free.
    entry = replace(NEWCOMER, earlier=(YOUNG, YOUNG))
    assert policy.may_admit(replace(entry, free_blocks=80), 0.0)
    assert not policy.may_admit(replace(entry, free_blocks=79), 0.0)
    assert ExpectedGrowthAdmission(reserve=0.5).may_admit(replace(entry, free_blocks=50), 0.0)


def test_nothing_is_reserved_until_kv_was_lost_and_long_after() -> None:
    policy = ExpectedGrowthAdmission(reserve=1.0)
    # 60 blocks are reserved right after a loss, 30 half of the time later.
    entry = replace(NEWCOMER, earlier=(YOUNG, YOUNG), free_blocks=50)
    assert not policy.may_admit(replace(entry, since_shortage_s=0.0), 0.0)
    assert not policy.may_admit(replace(entry, since_shortage_s=299.0), 0.0)
    assert policy.may_admit(replace(entry, since_shortage_s=301.0), 0.0)
    assert policy.may_admit(replace(entry, since_shortage_s=math.inf, free_blocks=20), 0.0)
    assert not policy.may_admit(replace(entry, since_shortage_s=math.inf, free_blocks=19), 0.0)


def test_admission_is_monotonic_in_free_blocks_and_programs() -> None:
    policy = ExpectedGrowthAdmission()
    opened = [
        policy.may_admit(replace(NEWCOMER, free_blocks=free, earlier=(YOUNG,) * 3), 0.0)
        for free in range(0, 400, 5)
    ]
    assert opened == sorted(opened)
    kept_out = [
        not policy.may_admit(replace(NEWCOMER, free_blocks=150, earlier=(YOUNG,) * number), 0.0)
        for number in range(12)
    ]
    assert kept_out == sorted(kept_out)


def test_a_context_that_was_longer_before_is_expected_to_be_so_again() -> None:
    seen = GrowthStatistics(MIN_TURNS_SEEN, 5.0)
    shrunk = ProgramGrowthView(turns=99, first_prompt_tokens=10, context_tokens=300, peak_tokens=700)
    assert expected_growth_tokens(shrunk, seen, 9_000) == pytest.approx(400)
    assert expected_growth_tokens(shrunk._replace(context_tokens=700), seen, 9_000) == pytest.approx(5)
