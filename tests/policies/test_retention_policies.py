"""What surrounds the TTL rule: no tool, hints, bounds and the reason that is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
from finished_turns import finished_turn, tool_history
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.retention_policies import MAX_TTL_S, ContinuumRetention, best_ttl_s

NOT_WORTH_IT = DecisionReason.NOT_WORTH_IT
SHORT, LONG = tool_history(bash=[3.0] * 101), tool_history(bash=[30.0] * 101)
BEYOND = tool_history(bash=[1.0, MAX_TTL_S, *[400.0] * 99])


@pytest.mark.parametrize(
    ("changes", "ttl_s", "reason"),
    [
        ({}, math.log(20.0), DecisionReason.COLD_START),
        ({"history": tool_history(bash=[3.0] * 100)}, math.log(20.0), DecisionReason.COLD_START),
        ({"history": SHORT}, 3.0, DecisionReason.THIS_TOOL),
        ({"history": SHORT, "tool": "web"}, 3.0, DecisionReason.ALL_TOOLS),
        ({"history": tool_history(bash=[2.0] * 100, web=[3.0] * 101)}, 3.0, DecisionReason.ALL_TOOLS),
        ({"history": LONG}, 0.0, NOT_WORTH_IT),
        ({"history": LONG, "mean_evicted_wait_s": 40.0}, 30.0, DecisionReason.THIS_TOOL),
        ({"history": LONG, "mean_evicted_wait_s": 40.0, "memoryfulness": 0.2}, 0.0, NOT_WORTH_IT),
        ({"history": LONG, "mean_evicted_wait_s": 99.0, "memoryfulness": -1.0}, 0.0, NOT_WORTH_IT),
        ({"reload_s": 0.0}, 0.0, NOT_WORTH_IT),
        ({"tool": None}, 0.0, DecisionReason.NO_TOOL_CALL),
        ({"tool": None, "hinted_ttl_s": 40.0}, 40.0, DecisionReason.HINTED),
        ({"hinted_ttl_s": 0.0, "history": SHORT}, 0.0, DecisionReason.HINTED),
        ({"hinted_ttl_s": 9000.0}, 300.0, DecisionReason.HINTED),
        ({"mean_evicted_wait_s": 1e300}, 300.0, DecisionReason.COLD_START),
        ({"history": BEYOND, "mean_evicted_wait_s": 1e9}, 300.0, DecisionReason.THIS_TOOL),
    ],
)
def test_continuum(changes: dict[str, Any], ttl_s: float, reason: DecisionReason) -> None:
    view = finished_turn(**{"reload_s": 20.0, **changes})
    assert ContinuumRetention().keep(view, 5.0) == RetentionDecision(ttl_s, reason)


# -- the TTL that Continuum chooses ----------------------------------------------------------------


# Durations are eighths and their number a power of two, so that the objective is exact in floating
# point and ties are ties: a property of the rule then cannot fail by rounding.
EIGHTHS = st.integers(0, 80).map(lambda n: n / 8)
SAMPLES = st.lists(EIGHTHS, min_size=16, max_size=16)
WHOLE = st.integers(0, 40).map(float)


def brute_force(durations: list[float], benefit_s: float, max_ttl_s: float) -> float:
    def value(tau: float) -> float:
        return sum(d <= tau for d in durations) / len(durations) * benefit_s - tau

    candidates = sorted({0.0, *(d for d in durations if d <= max_ttl_s)})
    return max(candidates, key=lambda tau: (value(tau), -tau))


@given(SAMPLES, WHOLE, WHOLE, st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]))
def test_the_ttl_is_the_argmax(durations: list[float], reload_s: float, wait_s: float, eta: float) -> None:
    turn = finished_turn(
        history=tool_history(bash=durations), reload_s=reload_s, mean_evicted_wait_s=wait_s, memoryfulness=eta
    )
    choice = ContinuumRetention(min_samples=0).keep(turn, 0.0)
    expected = brute_force(durations, wait_s * eta + reload_s, MAX_TTL_S)
    assert choice == (expected, DecisionReason.THIS_TOOL if expected else NOT_WORTH_IT)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(-1, 1))
def test_cold_start_is_the_optimum_for_unit_exponential_tools(
    wait_s: float, reload_s: float, eta: float
) -> None:
    turn = finished_turn(reload_s=reload_s, mean_evicted_wait_s=wait_s, memoryfulness=eta)
    choice = ContinuumRetention().keep(turn, 0.0)
    benefit_s = wait_s + reload_s

    def value(tau: float) -> float:
        return (1 - math.exp(-tau)) * benefit_s - tau

    assert choice.reason is (DecisionReason.COLD_START if choice.ttl_s > 0.0 else NOT_WORTH_IT)
    for step in range(200):
        assert value(choice.ttl_s) >= value(step * 0.05) - 1e-9


def test_of_a_long_history_a_bounded_number_is_tried_and_the_answer_stays_close() -> None:
    class Counting(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counting.reads += isinstance(index, int)
            return super().__getitem__(index)

    durations = Counting(i / 1000 for i in range(50_000))
    best = best_ttl_s(durations, 60.0)
    exact = max((((i + 1) / 50_000) * 60.0 - d, -d) for i, d in enumerate(list(durations)))
    assert (durations.index(best) + 1) / 50_000 * 60.0 - best >= exact[0] - 0.06
    assert 0 < Counting.reads <= 20_000
