"""Which way a victim's KV takes, and from which length on copying is the shorter one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.preemption_policies import (
    NO_OFFLOAD_S_PER_TOKEN,
    CheaperRecovery,
    PreemptedRequestView,
    RecoveryMethod,
    RecoveryPolicy,
    measured_break_even_tokens,
)

VICTIM = PreemptedRequestView(1000, 2.0, 0.0004, 0.0006)
"""Copied out and in again in one second, computed in two."""
OFFLOAD, RECOMPUTE = RecoveryMethod.OFFLOAD, RecoveryMethod.RECOMPUTE


# -- how long copying takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "offload_s"),
    [
        ({}, 0.4 + 0.6),
        # What is out already only has to come back. More than all of it is all.
        ({"copied_tokens": 500}, 0.2 + 0.6),
        ({"copied_tokens": 1000}, 0.6),
        ({"copied_tokens": 9999}, 0.6),
        # It waits for what the link does before.
        ({"queued_s": 3.0}, 4.0),
        ({"queued_s": 3.0, "loads_queued_s": 2.0}, 4.0),
        ({"queued_s": 3.0, "loads_queued_s": 5.0}, 5.6),
        ({"offload_s_per_token": None}, math.inf),
        ({"load_back_s_per_token": None}, math.inf),
        # Copied blocks need no free memory.
        ({"offload_s_per_token": NO_OFFLOAD_S_PER_TOKEN}, math.inf),
        ({"offload_s_per_token": NO_OFFLOAD_S_PER_TOKEN, "copied_tokens": 999}, math.inf),
        ({"offload_s_per_token": NO_OFFLOAD_S_PER_TOKEN, "copied_tokens": 1000}, 0.6),
    ],
)
def test_copying_is_out_and_back_and_takes_for_ever_where_there_is_no_room(
    changes: dict[str, Any], offload_s: float
) -> None:
    victim = VICTIM._replace(recompute_s=math.inf, **changes)
    assert victim.offload_s == pytest.approx(offload_s)
    way = OFFLOAD if offload_s < math.inf else RECOMPUTE
    assert RecoveryPolicy().recovery(victim, 0.0) is CheaperRecovery().recovery(victim, 0.0) is way


views = st.builds(
    PreemptedRequestView, st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 0.01), st.floats(0, 0.01),
    st.integers(0, 10**6), st.floats(0, 10), st.just(0.0),
)  # fmt: skip


# -- the policies ------------------------------------------------------------------------------------


@given(victim=views)
def test_each_policy_does_what_it_says(victim: PreemptedRequestView) -> None:
    assert RecoveryPolicy().recovery(victim, 0.0) is OFFLOAD
    cheaper = OFFLOAD if victim.offload_s < victim.recompute_s else RECOMPUTE
    assert CheaperRecovery().recovery(victim, 0.0) is cheaper


# -- by what was measured -------------------------------------------------------------------------------

coefficients = st.just(0.0) | st.floats(1e-9, 1.0)


@given(a=coefficients, b=coefficients, c=coefficients, copy=coefficients)
def test_a_measured_break_even_is_the_last_root(a: float, b: float, c: float, copy: float) -> None:
    """Found again by looking for a change of sign from far beyond."""

    def gained_s(tokens: float) -> float:
        return a + b * tokens + c * tokens * tokens - copy * tokens

    found = measured_break_even_tokens(a, b, c, copy)
    if found == math.inf:
        assert c == 0.0
        assert b < copy
        # Exact, because b and copy may differ in the last bit only.
        gained_per_token = Fraction(b) - Fraction(copy)
        beyond = 2 * Fraction(a) / -gained_per_token + 1
        assert a + gained_per_token * beyond < 0, "at any length beyond the fixed costs computing is faster"
        return
    far = 2 * (copy + 1.0) / (c or 1.0) + 1.0
    assert gained_s(far) >= 0
    if found == 0.0:
        lowest = (copy - b) / (2 * c) if c and copy > b else 0.0
        assert gained_s(lowest) >= -1e-9 * copy * lowest, "copying is never slower"
        return
    low, high = (copy - b) / (2 * c), far
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gained_s(middle) < 0 else (low, middle)
    assert found == pytest.approx(high, rel=1e-6)


def test_the_cheaper_way_changes_at_the_measured_length() -> None:
    curve = PrefillCurve(0.01, 1e-5, 1e-8)
    k = int(measured_break_even_tokens(0.01, 1e-5, 1e-8, 2e-4))
    for tokens, way in ((k - 10, RECOMPUTE), (k + 10, OFFLOAD)):
        victim = PreemptedRequestView(tokens, curve.seconds(tokens), 1e-4, 1e-4)
        assert CheaperRecovery().recovery(victim, 0.0) is way
