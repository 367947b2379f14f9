"""How long answers have been and how far hints were off: windows, back-off, bounds, and their documents."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.output_length_history import HintErrors, OutputLengthHistory

types = st.none() | st.sampled_from(["coder", "critic", ""])
tools = st.none() | st.sampled_from(["bash", "edit", "ls"])
outputs = st.lists(st.tuples(types, tools, st.integers(1, 50)), max_size=60)
KEYS = [
    (kind, tool) for kind in (None, "coder", "critic", "") for tool in (None, "bash", "edit", "ls", "new")
]


def filled(seen: list[tuple[str | None, str | None, int]], **limits: int) -> OutputLengthHistory:
    lengths = OutputLengthHistory(**limits)
    for output in seen:
        lengths.observe(*output)
    return lengths


def answers(lengths: OutputLengthHistory) -> list[list[int]]:
    """All that can be asked of it."""
    return [list(lengths.sorted_lengths(*key, least)) for key in KEYS for least in (1, 2, 5)]


# -- what is known -------------------------------------------------------------------------


@given(seen=outputs, max_samples=st.integers(1, 6), max_keys=st.integers(1, 8))
def test_it_answers_like_one_that_remembers_all_and_cuts_when_asked(
    seen: list[tuple[str | None, str | None, int]], max_samples: int, max_keys: int
) -> None:
    windows: dict[tuple[str | None, str | None], list[int]] = {}
    for kind, tool, tokens in seen:
        for key in dict.fromkeys([(kind, tool), (kind, None)]):
            if key != (None, None):
                # Taken out and put in again: a dict is ordered by when its keys came.
                windows[key] = [*windows.pop(key, []), tokens]
                while len(windows) > max_keys:
                    del windows[next(iter(windows))]
    everything = [tokens for _, _, tokens in seen]

    def known(kind: str | None, tool: str | None, least: int) -> list[int]:
        for samples in (windows.get((kind, tool), []), windows.get((kind, None), []), everything):
            if len(samples[-max_samples:]) >= least:
                return sorted(samples[-max_samples:])
        return []

    lengths = filled(seen, max_samples=max_samples, max_keys=max_keys)
    assert lengths.count() == min(len(seen), max_samples)
    assert answers(lengths) == [known(*key, least) for key in KEYS for least in (1, 2, 5)]


def test_the_narrowest_kind_that_is_known_well_enough_is_taken() -> None:
    lengths = filled(
        [("coder", "bash", 10)] * 3 + [("coder", "edit", 200)] * 4 + [("critic", None, 3000)] * 5
    )
    assert lengths.sorted_lengths("coder", "bash", 3) == [10, 10, 10]
    assert lengths.sorted_lengths("coder", "bash", 4) == [10] * 3 + [200] * 4, (
        "too few after this tool: all of its type"
    )
    assert lengths.sorted_lengths("coder", "never", 3) == [10] * 3 + [200] * 4
    assert lengths.sorted_lengths("coder", "bash", 8) == [10] * 3 + [200] * 4 + [3000] * 5, (
        "too few of its type: all"
    )
    assert lengths.sorted_lengths("stranger", "bash", 8) == lengths.sorted_lengths(None, None, 8)
    assert lengths.sorted_lengths("coder", "bash", 13) == (), "too few at all"


def test_what_an_agent_writes_after_a_tool_is_told_apart_from_what_it_writes_unasked() -> None:
    lengths = filled([("coder", "bash", 10), ("coder", None, 500)])
    assert lengths.sorted_lengths("coder", "bash", 1) == [10]
    assert lengths.sorted_lengths("coder", None, 1) == [10, 500], "no tool: whatever it writes"


def test_a_tool_counts_where_nobody_said_who_calls_it() -> None:
    lengths = filled([(None, "bash", 10), ("coder", "bash", 20), (None, None, 30)])
    assert lengths.sorted_lengths(None, "bash", 1) == [10]
    assert lengths.sorted_lengths(None, None, 1) == [10, 20, 30]


def test_habits_that_change_are_believed_within_a_window() -> None:
    lengths = OutputLengthHistory(max_samples=500)
    for _ in range(5000):
        lengths.observe("coder", "bash", 1000)
    for number in range(1, 501):
        lengths.observe("coder", "bash", 10)
        expected = 10 if number > 250 else 1000
        if number != 250:
            assert median(lengths.sorted_lengths("coder", "bash", 1)) == expected, (
                "more than half are of the new kind"
            )
    assert (
        set(lengths.sorted_lengths("coder", "bash", 1)) == set(lengths.sorted_lengths(None, None, 1)) == {10}
    )


# -- documents ---------------------------------------------------------------------------------


@given(seen=outputs, later=outputs, max_samples=st.integers(1, 6), max_keys=st.integers(1, 8))
def test_it_comes_back_from_its_document_and_goes_on_as_if_it_had_stayed(
    seen: list[tuple[str | None, str | None, int]],
    later: list[tuple[str | None, str | None, int]],
    max_samples: int,
    max_keys: int,
) -> None:
    lengths = filled(seen, max_samples=max_samples, max_keys=max_keys)
    document = json.loads(json.dumps(lengths.snapshot()))
    back = OutputLengthHistory.restore(document, max_samples, max_keys)
    assert back.snapshot() == lengths.snapshot() == document
    for output in later:
        lengths.observe(*output)
        back.observe(*output)
    assert answers(back) == answers(lengths)
    assert back.snapshot() == lengths.snapshot()


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "text",
        {},
        {"version": 2, "keys": [], "newest": []},
        {"version": 1, "keys": []},
        {"version": 1, "newest": []},
        {"version": 1, "keys": {}, "newest": []},
        {"version": 1, "keys": [], "newest": 5},
        {"version": 1, "keys": [], "newest": ["5"]},
        {"version": 1, "keys": [], "newest": [5.0]},
        {"version": 1, "keys": [], "newest": [0]},
        {"version": 1, "keys": [], "newest": [True]},
        {"version": 1, "keys": [], "newest": [10**400]},
        {"version": 1, "keys": [5], "newest": []},
        {"version": 1, "keys": ["abc"], "newest": []},
        {"version": 1, "keys": [["coder", "bash"]], "newest": []},
        {"version": 1, "keys": [["coder", "bash", [5], [5]]], "newest": []},
        {"version": 1, "keys": [[5, "bash", [5]]], "newest": []},
        {"version": 1, "keys": [["coder", ["bash"], [5]]], "newest": []},
        {"version": 1, "keys": [["coder", "bash", None]], "newest": []},
        {"version": 1, "keys": [["coder", "bash", [-5]]], "newest": []},
        # Of nobody in particular is what ``newest`` is for: a second window of all would hide it.
        {"version": 1, "keys": [[None, None, [5]]], "newest": []},
    ],
)
def test_nonsense_is_refused_and_the_reason_told(document: Any) -> None:
    with pytest.raises(ValueError, match=r"output lengths: |an output of .* tokens; expected"):
        OutputLengthHistory.restore(document)


# -- how far hints were off ------------------------------------------------------------------


def test_hints_are_judged_by_the_newest_of_their_type_and_not_by_few() -> None:
    errors = HintErrors(window=4)
    for off in (9.0, 9.0, 0.1, 0.2, 0.3, 0.4):
        errors.observe("coder", off)
    errors.observe("critic", 2.0)
    assert errors.mean("coder", 4) == pytest.approx(0.25)
    assert errors.mean("coder", 5) is None
    assert errors.mean("critic", 1) == 2.0
    assert errors.mean("stranger", 0) is None


@given(
    seen=st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 50)), max_size=40),
    window=st.integers(1, 5),
    max_types=st.integers(1, 5),
)
def test_hint_errors_come_back_from_their_document(
    seen: list[tuple[str, float]], window: int, max_types: int
) -> None:
    errors = HintErrors(window, max_types)
    for agent_type, off in seen:
        errors.observe(agent_type, off)
    document = json.loads(json.dumps(errors.snapshot()))
    back = HintErrors.restore(document, window, max_types)
    for agent_type in "abcd":
        assert back.mean(agent_type, 1) == errors.mean(agent_type, 1)
    assert list(back.snapshot().items()) == list(errors.snapshot().items())
