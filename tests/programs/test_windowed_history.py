"""Histories against references so plain that they cannot be wrong."""

from __future__ import annotations

import json
import math
from statistics import StatisticsError, correlation
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.windowed_history import (
    BranchReuseRate,
    KeyedHistory,
    OutputLengthHistory,
    SlidingMax,
    SlidingWindow,
    ToolHistory,
    TurnHistory,
)

SECONDS = st.integers(0, 12).map(float) | st.floats(0, 1e6)
CALLS = st.lists(st.tuples(st.sampled_from("abcd"), SECONDS), max_size=60)


def through_json(history: Any, empty: Any) -> Any:
    """The history as a restarted server has it."""
    empty.restore(json.loads(json.dumps(history.snapshot())))
    assert empty.snapshot() == history.snapshot()
    return empty


@given(CALLS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_each_key_has_its_newest_values_and_the_newest_keys_are_kept(
    calls: list[tuple[str, float]], samples: int, keys: int, least: int
) -> None:
    history = ToolHistory(samples, keys)
    kept: dict[str, list[float]] = {}
    for key, duration in calls:
        history.observe(key, duration)
        kept[key] = [*kept.pop(key, []), duration][-samples:]
        assert history.mean(key, 1) == math.fsum(kept[key]) / len(kept[key])
        while len(kept) > keys:
            del kept[next(iter(kept))]
    for one in (history, through_json(history, ToolHistory(samples, keys))):
        for key in "abcd":
            values = kept.get(key, [])
            assert list(one.durations(key)) == sorted(values)
            assert one.count(key) == len(values)
            assert one.mean(key, least) == (math.fsum(values) / len(values) if len(values) >= least else None)
            assert list(one.quantiles(key, 9)) == sorted(values)
            assert one.quantiles(key, 1) == tuple(sorted(values)[-1:])
        assert list(one.durations()) == sorted(duration for _, duration in calls)
        medians = {key: sorted(kept[key])[len(kept[key]) // 2] if key in kept else 0.0 for key in "abcd"}
        assert medians[one.slowest("abcd") or ""] == max(medians.values())
    assert history.slowest([]) is None
    assert SlidingWindow().mean() == 0.0


@pytest.mark.parametrize(
    "document", [None, {}, [], [[]], [[], [-1]], [[], ["x"]], [[], [math.nan]], [["a"], []]]
)
def test_another_document_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="saved history"):
        KeyedHistory().restore(document)
    with pytest.raises(ValueError, match="saved history"):
        OutputLengthHistory().restore([[], [1.5]])


# -- windows of single values ------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_the_maximum_stays_within_its_factor_of_the_true_one(values: list[float], most: int) -> None:
    sliding = SlidingMax(most, factor=1.5)
    for number, value in enumerate(values, start=1):
        sliding.observe(value)
        true = max(values[max(0, number - most) : number])
        assert true <= sliding.value <= true * 1.5 * (1 + 1e-9)


def naive_memoryfulness(totals: list[int]) -> float:
    pairs = [(k, n - k) for n in totals for k in range(1, n + 1)]
    try:
        return -correlation([x for x, _ in pairs], [y for _, y in pairs])
    except StatisticsError:  # fewer than two pairs, or all alike
        return 1.0


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12))
def test_memoryfulness_is_the_correlation_over_all_pairs(totals: list[int], most: int) -> None:
    history = TurnHistory(most)
    for total in totals:
        history.observe(total)
    kept = [total for total in totals if total > 0][-most:]
    for one in (history, through_json(history, TurnHistory(most))):
        assert one.count() == len(kept)
        assert one.memoryfulness() == pytest.approx(naive_memoryfulness(kept), abs=1e-9)


# -- output lengths ----------------------------------------------------------------------

TYPES = st.none() | st.sampled_from(["coder", "critic", ""])
TOOLS = st.none() | st.sampled_from(["bash", "edit", "ls"])
GROUPS = [
    (kind, tool) for kind in (None, "coder", "critic", "") for tool in (None, "bash", "edit", "ls", "new")
]


@given(
    st.lists(st.tuples(TYPES, TOOLS, st.integers(1, 50)), max_size=60),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_output_lengths_are_those_of_the_narrowest_group_that_is_known_well_enough(
    seen: list[tuple[str | None, str | None, int]], samples: int, keys: int, least: int
) -> None:
    windows: dict[tuple[str | None, str | None], list[int]] = {}
    lengths = OutputLengthHistory(samples, keys)
    for kind, tool, tokens in seen:
        lengths.observe_output(kind, tool, tokens)
        for key in dict.fromkeys([(kind, tool), (kind, None)]):
            if key != (None, None):
                # Taken out and put in again: a dict is ordered by when its keys came.
                windows[key] = [*windows.pop(key, []), tokens]
                while len(windows) > keys:
                    del windows[next(iter(windows))]
    everything = [tokens for _, _, tokens in seen]
    for one in (lengths, through_json(lengths, OutputLengthHistory(samples, keys))):
        assert one.count() == min(len(seen), samples)
        for kind, tool in GROUPS:
            groups = (windows.get((kind, tool), []), windows.get((kind, None), []), everything)
            known = [sorted(group[-samples:]) for group in groups if len(group[-samples:]) >= least]
            assert list(one.sorted_lengths(kind, tool, least)) == [*known, []][0]


# -- branches ----------------------------------------------------------------------------


def test_the_reuse_of_branches_begins_undecided_moves_in_strides_and_learns() -> None:
    share = BranchReuseRate()
    for evicted in range(450):
        share.observe(0, evicted)
    assert (share.share, share.changes) == (0.5, 0)
    share.observe(0, 4096)
    assert (share.share, share.changes) == (pytest.approx(2048 / 8192), 1)
    share.observe(8192, 4096)
    assert share.share == pytest.approx(10240 / 16384)


def test_a_changed_habit_is_learned_again_however_much_was_seen() -> None:
    share = BranchReuseRate()
    share.observe(0, 10_000_000)
    assert share.share < 0.05
    for again in range(0, 1_000_000, 10_000):
        share.observe(again, 10_000_000)
    assert share.share > 0.9
