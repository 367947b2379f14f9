"""What engine steps say of the device: shares of its time, and what one more request costs the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.costs.reload_estimate import StepTimeEstimator
from sojourn_server.policies.preemption_policies import CheaperRecovery, PreemptedRequestView, RecoveryMethod


def decoding(*kv_tokens: int, fixed_s: float, token_s: float, rounds: int = 50) -> StepTimeEstimator:
    """After ``rounds`` decode steps of two requests with contexts of each of these sums of tokens."""
    reload = StepTimeEstimator()
    for _ in range(rounds):
        for tokens in kv_tokens:
            reload.observe_step(2, fixed_s + token_s * tokens, 2, tokens)
    return reload


def test_the_part_of_a_step_that_grows_with_the_contexts_is_learned() -> None:
    # At the mean of 60,000 tokens, 30 of 40 ms are for reading them.
    reload = decoding(20_000, 60_000, 100_000, fixed_s=0.01, token_s=5e-7, rounds=300)
    assert reload.kv_read_share == pytest.approx(0.75, abs=0.03)
    assert decoding(58_000, 60_000, 62_000, fixed_s=0.01, token_s=5e-7, rounds=300).kv_read_share > 0.7
    few = decoding(20_000, 60_000, 100_000, fixed_s=0.01, token_s=5e-7, rounds=3)
    assert few.kv_read_share < 0.25, "nine steps may be chance"
    assert decoding(20_000, 60_000, 100_000, fixed_s=0.04, token_s=0.0).kv_read_share < 1e-9


def test_steps_with_prompts_say_nothing_of_growth() -> None:
    reload = decoding(20_000, 60_000, 100_000, fixed_s=0.01, token_s=5e-7)
    before = reload.kv_read_share
    for tokens in (500, 2000):
        reload.observe_step(tokens, 1.0, 2, 60_000 + tokens)
    assert reload.kv_read_share == before
    assert reload.prefill_share > 0.1


def test_what_was_long_ago_is_forgotten() -> None:
    reload = decoding(20_000, 60_000, 100_000, fixed_s=0.01, token_s=5e-7)
    for _ in range(40_000):
        for tokens in (20_000, 60_000, 100_000):
            reload.observe_step(2, 0.04, 2, tokens)
    assert reload.kv_read_share < 0.05


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 5000),
            st.floats(-1, 100, allow_nan=False),
            st.integers(0, 300),
            st.integers(-1, 10**9),
        ),
        max_size=60,
    )
)
def test_a_share_is_a_share_whatever_the_steps(steps: list[tuple[int, float, int, int]]) -> None:
    reload = StepTimeEstimator()
    for tokens, seconds, requests, kv_tokens in steps:
        reload.observe_step(tokens, seconds, requests, kv_tokens)
        assert 0.0 <= reload.kv_read_share <= 1.0
        assert 0.0 <= reload.prefill_share <= 1.0


@pytest.mark.parametrize("requests", [1, 4])
def test_without_a_curve_the_break_even_length_is_that_of_tetris(requests: int) -> None:
    """Equation 1 with causal attention: S tokens take c · S · (6D + S / 2) seconds, in steps of any size."""
    d, c, copy_s = 1024, 1e-9, 2e-5
    reload = StepTimeEstimator(hidden_size=d)
    for begin in range(0, 32_000, 2_000):
        end = begin + 2_000
        seconds = requests * c * (end * (6 * d + end / 2) - begin * (6 * d + begin / 2))
        reload.observe_step(2_000 * requests, seconds, requests, end * requests)
    assert reload.seconds(20_000) == pytest.approx(c * 20_000 * (6 * d + 10_000))
    k = 2 * (round(copy_s / c) - 6 * d)
    for tokens, way in ((k - 9, RecoveryMethod.RECOMPUTE), (k + 9, RecoveryMethod.OFFLOAD)):
        victim = PreemptedRequestView(tokens, reload.seconds(tokens), copy_s / 2, copy_s / 2)
        assert CheaperRecovery().recovery(victim, 0.0) is way
