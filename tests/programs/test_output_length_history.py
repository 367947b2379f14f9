"""How long answers have been and how far hints were off: windows, back-off, bounds, and their documents."""

from __future__ import annotations

import json
import math
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


@pytest.mark.parametrize("tokens", [0, -1, 1.0, True, None, "5", math.nan, 2**53 + 1, 10**400])
def test_what_is_no_length_is_refused_and_forgotten(tokens: Any) -> None:
    lengths = OutputLengthHistory()
    with pytest.raises(ValueError, match="expected a whole number from 1 to"):
        lengths.observe("coder", "bash", tokens)
    assert lengths.count() == 0
    assert lengths.snapshot() == OutputLengthHistory().snapshot()


# -- bounded memory --------------------------------------------------------------------------


def test_invented_names_cost_bounded_memory_and_spoil_nothing_that_is_still_used() -> None:
    lengths = OutputLengthHistory(max_samples=20, max_keys=50)
    for number in range(10_000):
        lengths.observe(f"invented{number}", f"tool{number}", 7)
        if number % 10 == 0:
            lengths.observe("coder", "bash", 1000)
        assert len(lengths._windows) <= 50
    kept = lengths.snapshot()
    assert len(kept["keys"]) == 50
    assert len(json.dumps(kept)) < 5000
    assert lengths.sorted_lengths("coder", "bash", 20) == [1000] * 20
    assert lengths.sorted_lengths("invented0", "tool0", 1) == lengths.sorted_lengths(None, None, 1), (
        "those are forgotten"
    )


def test_a_type_outlives_the_tools_that_are_invented_for_it() -> None:
    lengths = OutputLengthHistory(max_keys=4)
    for number in range(100):
        lengths.observe("coder", f"tool{number}", 30)
        lengths.observe(None, f"other{number}", 90)
    assert set(lengths.sorted_lengths("coder", "never", 100)) == {30}


def test_which_of_two_keys_is_older_depends_on_no_hash() -> None:
    """Strings hash differently in every process: an engine and its replay would forget different keys."""
    for number in range(50):
        kind, tool = f"type{number}", f"tool{number}"
        keys = [key[:2] for key in filled([(kind, tool, 5)]).snapshot()["keys"]]
        assert keys == [[kind, tool], [kind, None]]


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


@given(seen=outputs, max_samples=st.integers(1, 6), max_keys=st.integers(1, 8))
def test_a_document_is_cut_to_smaller_limits_oldest_out(
    seen: list[tuple[str | None, str | None, int]], max_samples: int, max_keys: int
) -> None:
    document = filled(seen).snapshot()
    cut = OutputLengthHistory.restore(document, max_samples, max_keys).snapshot()
    assert cut["newest"] == document["newest"][-max_samples:]
    assert cut["keys"] == [
        [kind, tool, samples[-max_samples:]] for kind, tool, samples in document["keys"][-max_keys:]
    ]


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


@pytest.mark.parametrize("off", [math.inf, math.nan, -0.1])
def test_an_impossible_error_of_a_hint_leaves_no_trace(off: float) -> None:
    errors = HintErrors(max_types=1)
    errors.observe("coder", 0.5)
    with pytest.raises(ValueError, match="expected a finite number ≥ 0"):
        errors.observe("critic", off)
    assert errors.snapshot() == {"coder": [0.5]}


def test_invented_types_push_out_those_that_were_not_heard_of_longest() -> None:
    errors = HintErrors(max_types=10)
    for number in range(1000):
        errors.observe("coder", 0.5)
        errors.observe(f"invented{number}", 1.0)
    assert len(errors.snapshot()) == 10
    assert errors.mean("coder", 64) == 0.5
    assert errors.mean("invented0", 1) is None


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


@pytest.mark.parametrize("off", [math.nan, math.inf, -0.1, -math.inf])
def test_an_error_is_finite_and_not_negative(off: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        HintErrors().observe("coder", off)


@pytest.mark.parametrize(
    "document", [None, [], "abc", 5, {"a": 5}, {"a": "123"}, {"a": [None]}, {"a": ["1"]}, {"a": [True]},
                 {"a": [-1.0]}, {"a": [math.nan]}, {5: [1.0]}]
)  # fmt: skip
def test_nonsense_about_hints_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|is not a list of errors"):
        HintErrors.restore(document)
