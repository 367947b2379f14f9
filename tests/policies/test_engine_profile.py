"""The prefill curve recovers the coefficients of its samples; profiles survive a round trip."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.engine_profile import EngineLimits, EngineProfile, PrefillCurve
from sojourn_server.policies.costs.reload_estimate import restore_s
from sojourn_server.policies.costs.step_costs import StepCosts, StepSample
from sojourn_server.profiling.cost_fitting import fit_prefill_curve

LENGTHS = (1000, 2000, 4000, 8000, 16000, 32000, 65536, 131072)
NON_NEGATIVE = st.floats(min_value=0, max_value=1, allow_nan=False)


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 100)), min_size=1, max_size=12),
    st.lists(st.integers(-5, 400_000), min_size=2, max_size=8),
)
def test_any_fit_is_non_negative_and_never_falls(points: list[tuple[int, float]], asked: list[int]) -> None:
    curve = fit_prefill_curve(points)
    seconds = [curve.seconds(tokens) for tokens in sorted(asked)]
    assert all(value >= 0 for value in seconds)
    assert all(a <= b for a, b in itertools.pairwise(seconds))


@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.floats(0.01, 10)), min_size=4, max_size=8),
    st.tuples(NON_NEGATIVE, NON_NEGATIVE, NON_NEGATIVE),
    st.booleans(),
)
def test_no_other_non_negative_curve_fits_better(
    points: list[tuple[int, float]], other: tuple[float, float, float], exact: bool
) -> None:
    """Nor does one on which the points lie."""
    if len({n for n, _ in points}) < 3:
        return
    rival = PrefillCurve(other[0] * 10, other[1] * 1e-3, other[2] * 1e-8)
    if exact:
        points = [(n, rival.seconds(n)) for n, _ in points]
    assert fit_prefill_curve(points).residual(points) <= rival.residual(points) * (1 + 1e-6) + 1e-9


def test_few_points_give_simpler_curves() -> None:
    assert fit_prefill_curve([(1000, 0.5), (1000, 0.7)]).seconds(2000) == pytest.approx(1.2)
    line = fit_prefill_curve([(1000, 1.0), (3000, 2.0)])
    assert line.seconds(5000) == pytest.approx(3.0)
    assert line.c_s_per_token2 == 0.0


PROFILE = EngineProfile(
    model='acme/"llama"\n\x7f-8b',
    hardware="1x Ütopia GPU",
    engine="vllm 0.32.0",
    block_size=16,
    prefill=PrefillCurve(0.01, 1e-4, 3.25e-11),
    points=((1000, 0.11), (2000, 0.21)),
    device_to_host_bytes_per_s=2.5e10,
    host_to_device_bytes_per_s=None,
    decode_points=((1000, 0.02),),
    measured_at="2025-01-02T03:04:05Z",
    versions={"torch": "2.13.0", "vllm.cpu": "0.32.0"},
    limits=EngineLimits(kv_pool_tokens=1600, max_num_seqs=4),
    steps=StepCosts(0.01, 1e-4, 1e-9, 0.0, 1e-6, 0.003),
    step_samples=(StepSample(0.11, 1, 1000, 500500, 1000, 1, 1), StepSample(0.0125, 1, 2, 33.0, 33.5, 2)),
)


def test_a_profile_survives_toml() -> None:
    assert EngineProfile.from_toml(PROFILE.to_toml()) == PROFILE
    bare = EngineProfile("m", "h", "e", 128, PrefillCurve(0, 0, 0), ())
    assert EngineProfile.from_toml(bare.to_toml()) == bare


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("version = 3", "version = 2", "version 2; expected 3: run sojourn profile again"),
        ("version = 3", "version =", "not TOML"),
        ("block_size = 16", "block_size = 0", r"`int` >= 1 - at `\$\.block_size`"),
        ("block_size = 16", 'block_size = "16"', r"got `str` - at `\$\.block_size`"),
        ("hardware = ", "hardwear = ", "missing required field `hardware`"),
        ("[prefill]", "[postfill]", "missing required field `prefill`"),
        ("a_s = 0.01", "a_s = -0.01", "prefill.a_s"),
        ("a_s = 0.01", "a_s = nan", "prefill.a_s"),
        ("[1000, 0.11]", "[1000]", r"length 2, got 1 - at `\$\.points"),
        (
            "device_to_host_bytes_per_s = 25000000000.0",
            "device_to_host_bytes_per_s = 0",
            r"`float` > 0.0 - at `\$\.device_to",
        ),
        ("max_num_seqs = 4", "max_num_seqs = 0", r"`int` >= 1 - at `\$\.limits\.max_num_seqs`"),
        ("1e-06, 0.003]", "-1e-06, 0.003]", r"`float` >= 0.0 - at `\$\.steps\[4\]`"),
        ("0.0, 1e-06, 0.003]", "]", r"length 5 to 6, got 3 - at `\$\.steps`"),
        ("[0.11, 1, ", "[", r"length 6 to 7, got 5 - at `\$\.step_samples"),
    ],
)
def test_a_broken_profile_says_which_field(old: str, new: str, reason: str) -> None:
    text = PROFILE.to_toml()
    assert old in text
    with pytest.raises(ValueError, match=reason):
        EngineProfile.from_toml(text.replace(old, new, 1))


def test_a_context_comes_back_the_faster_way() -> None:
    assert restore_s(1.0, None) == 1.0
    assert restore_s(1.0, 0.1) == 0.1
    assert restore_s(1.0, 10.0) == 1.0
    assert restore_s(0.0, 10.0) == 10.0  # computing was never measured
