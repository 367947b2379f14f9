"""Histories against references so plain that they cannot be wrong."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.tool_and_turn_history import SlidingMean, ToolHistory, TurnHistory

SECONDS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
CALLS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12).map(float) | SECONDS), max_size=60)


def naive_union(calls: list[tuple[str, float]], samples: int, tools: int) -> dict[str, list[float]]:
    """What sliding windows and forgetting must leave, computed from the whole past at each step."""
    kept: dict[str, list[float]] = {}
    for key, duration in calls:
        kept[key] = [*kept.pop(key, []), duration][-samples:]
        while len(kept) > tools:
            del kept[next(iter(kept))]
    return kept


@given(CALLS, st.integers(1, 5), st.integers(1, 4))
def test_tool_history_is_the_empirical_distribution(
    calls: list[tuple[str, float]], samples: int, tools: int
) -> None:
    history = ToolHistory(max_samples_per_tool=samples, max_tools=tools)
    for key, duration in calls:
        history.observe(key, duration)
    kept = naive_union(calls, samples, tools)
    everything = [duration for _, duration in calls]
    for key, expected in [*((k, kept.get(k, [])) for k in "abcd"), (None, everything)]:
        assert list(history.durations(key)) == sorted(expected)
        assert history.count(key) == len(expected)


@given(CALLS)
def test_snapshot_survives_json(calls: list[tuple[str, float]]) -> None:
    history = ToolHistory(max_samples_per_tool=7)
    for key, duration in calls:
        history.observe(key, duration)
    restored = ToolHistory.restore(json.loads(json.dumps(history.snapshot())), max_samples_per_tool=7)
    assert restored.snapshot() == history.snapshot()
    assert list(restored.durations()) == list(history.durations())
    for one in (history, restored):
        one.observe("a", 3.5)
    assert restored.snapshot() == history.snapshot()


def test_restore_into_smaller_limits_keeps_the_newest() -> None:
    history = ToolHistory()
    for key, duration in [("old", 1.0), ("new", 2.0), ("new", 3.0), ("new", 4.0)]:
        history.observe(key, duration)
    small = ToolHistory.restore(history.snapshot(), max_samples_per_tool=2, max_tools=1)
    assert small.snapshot()["tools"] == {"new": [3.0, 4.0]}
    assert list(small.durations()) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("bad", [-0.001, math.nan, math.inf])
def test_a_duration_that_is_none_is_refused_and_leaves_no_trace(bad: float) -> None:
    history = ToolHistory()
    with pytest.raises(ValueError, match="expected a finite number ≥ 0"):
        history.observe("bash", bad)
    assert history.snapshot()["tools"] == {}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "expected an object"),
        ({"version": 2, "tools": {}}, "version 2"),
        ({"version": 1}, "'tools' is missing"),
        ({"version": 1, "tools": {"bash": 3}}, "not a list"),
        ({"version": 1, "tools": {"bash": ["x"]}}, "expected a finite number"),
        ({"version": 1, "tools": {"bash": [-1]}}, "expected a finite number"),
    ],
)
def test_restore_names_what_is_wrong(document: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ToolHistory.restore(document)  # type: ignore[arg-type]


def naive_memoryfulness(totals: list[int]) -> float:
    pairs = [(k, n - k) for n in totals for k in range(1, n + 1)]
    if len(pairs) < 2:
        return 1.0
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    spread = math.sqrt(sum((x - mean_x) ** 2 for x, _ in pairs) * sum((y - mean_y) ** 2 for _, y in pairs))
    return -covariance / spread if spread else 1.0


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12))
def test_memoryfulness_is_the_correlation_over_all_pairs(totals: list[int], window: int) -> None:
    history = TurnHistory(max_programs=window)
    for total in totals:
        history.observe(total)
    kept = [total for total in totals if total > 0][-window:]
    assert history.count() == len(kept)
    assert history.memoryfulness() == pytest.approx(naive_memoryfulness(kept), abs=1e-9)


def test_memoryfulness_at_its_two_ends() -> None:
    fixed, long_tail = TurnHistory(), TurnHistory()
    for _ in range(50):
        fixed.observe(10)
    # Half the programs end at once, a few go on for ever: progress then announces more work.
    for total in [1] * 60 + [2] * 20 + [400]:
        long_tail.observe(total)
    assert fixed.memoryfulness() == pytest.approx(1.0)
    assert long_tail.memoryfulness() < fixed.memoryfulness()
    assert TurnHistory().memoryfulness() == 1.0
    assert TurnHistory.restore(json.loads(json.dumps(long_tail.snapshot()))).memoryfulness() == pytest.approx(
        long_tail.memoryfulness()
    )


def test_geometric_programs_are_memoryless() -> None:
    history = TurnHistory(max_programs=100_000)
    # Exactly half of those alive end at each turn: the geometric distribution without sampling noise.
    alive = 2**14
    for total in range(1, 15):
        alive //= 2
        for _ in range(alive):
            history.observe(total)
    assert abs(history.memoryfulness()) < 0.02


def test_turn_history_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="-1 turns"):
        TurnHistory().observe(-1)
    with pytest.raises(ValueError, match="not a number of turns"):
        TurnHistory.restore({"version": 1, "turns": ["7"]})


@given(st.lists(st.floats(-1e12, 1e12), max_size=50), st.integers(1, 9))
def test_sliding_mean_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    mean = SlidingMean(window)
    assert mean.mean() == 0.0
    for index, value in enumerate(values):
        mean.observe(value)
        last = values[max(0, index + 1 - window) : index + 1]
        assert mean.mean() == math.fsum(last) / len(last)
        assert mean.count() == len(last)


def test_sliding_mean_forgets_a_huge_value_without_residue() -> None:
    mean = SlidingMean(2)
    for value in (1e18, 0.1, 0.3):
        mean.observe(value)
    assert mean.mean() == pytest.approx(0.2, rel=1e-12)
