"""What is learned from the steps that programs took: predictions, decay, bounds, and what is saved."""

from __future__ import annotations

import json
from random import Random
from statistics import mean

import pytest
import stochastic_agent
from hypothesis import given
from hypothesis import strategies as st
from sojourn.aeg import END, START
from sojourn_server.programs.workflow_history import (
    HALF_LIFE_RUNS,
    MAX_ENTRIES,
    MAX_TYPES,
    Transitions,
    WorkflowHistory,
)


def learned(*runs: str) -> Transitions:
    transitions = Transitions()
    for run in runs:
        transitions.learn("k", run.split())
    return transitions


def best(transitions: Transitions, *history: str) -> str | None:
    found = transitions.predict("k", history)
    return found[0][0] if found else None


def accuracy(predict, runs: list[list[stochastic_agent.State]]) -> float:
    hits = [
        predict(state, [earlier.node for earlier in run[1 : number + 1]]) == run[number + 1].node
        for run in runs
        for number, state in enumerate(run[:-1])
    ]
    return mean(hits)


def test_after_thirty_programs_the_next_step_is_known_87_times_in_a_hundred():
    """SAGA §9.4 reports 87 %. A first-order chain gets about 0.8 on the same programs, an oracle 0.96."""
    ours, simple = [], []
    for seed in range(10):
        random = Random(seed)
        runs = [stochastic_agent.states(random) for _ in range(60)]
        transitions = Transitions()
        for run in runs[:30]:
            transitions.learn("k", [state.node for state in run[1:-1]])
        chain = stochastic_agent.FirstOrderChain(runs[:30])
        ours.append(accuracy(lambda _, history, of=transitions: best(of, *history), runs[30:]))
        simple.append(accuracy(lambda state, _, chain=chain: chain(state), runs[30:]))
    assert min(ours) >= 0.87
    assert mean(ours) >= 0.91 > 0.85 > mean(simple)


def test_an_unknown_past_falls_back_on_the_present_and_start_and_end_are_part_of_it():
    transitions = learned(*["a b c"] * 6)
    assert best(transitions, "x", "y", "b") == "c"
    assert best(transitions, "x") is None
    assert transitions.predict("k", []) == [("a", pytest.approx(1.0))]
    assert best(transitions, "b", "c") == END
    assert Transitions().predict("k", ["a"]) == []


def test_a_changed_workload_is_relearned_and_old_counts_go():
    transitions = learned("old", *["a b"] * 2000)
    flipped = None
    for number in range(1, 51):
        transitions.learn("k", ["a", "c"])
        if flipped is None and best(transitions, "a") == "c":
            flipped = number
    assert flipped is not None
    assert HALF_LIFE_RUNS / 2 <= flipped <= 25
    assert dict(transitions.predict("k", ["a"]))["c"] > 0.8
    assert best(transitions, "old") is None
    assert transitions.stats("k").weight < 2.0**41


def test_memory_is_bounded_and_an_honest_program_is_learned_after_lies():
    transitions = Transitions()
    for lie in range(200):
        transitions.learn("k", [f"step-{lie}-{number}" for number in range(50)])
        transitions.learn("k", ["hub", f"x{lie}"], ends=False)
        transitions.learn(f"kind-{lie}", ["a"])
    assert len(transitions.types) == MAX_TYPES
    assert sum(map(len, transitions.types["k"].contexts.values())) <= MAX_ENTRIES
    assert transitions.stats("kind-0").runs == 0
    for honest in range(30):
        transitions.learn("k", ["a", "b"])
        assert honest < 1 or best(transitions, "a") == "b"


names = st.one_of(st.text(max_size=8), st.sampled_from([START, END, "a", "b", "ä" * 200, "\ud800"]))


@given(st.lists(st.tuples(st.lists(names, max_size=6), st.booleans(), st.booleans()), max_size=20))
def test_whatever_is_heard_probabilities_are_probabilities(runs):
    transitions = Transitions()
    for steps, begins, ends in runs:
        transitions.learn("k", steps, begins=begins, ends=ends)
    assert transitions.stats("k").finished == sum(ends for _, _, ends in runs)
    for steps, _, _ in runs:
        predicted = transitions.predict("k", steps)
        assert not predicted or sum(p for _, p in predicted) == pytest.approx(1.0)
        assert [p for _, p in predicted] == sorted((p for _, p in predicted), reverse=True)


@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), min_size=1, max_size=30))
def test_what_was_saved_predicts_as_before_and_learns_on(runs: list[list[str]]):
    saved, restored = WorkflowHistory(), WorkflowHistory()
    transitions = saved.transitions = learned(*map(" ".join, runs))
    restored.restore(json.loads(json.dumps(saved.snapshot())))
    loaded = restored.transitions
    for _ in range(2):
        for history in ([], ["a"], ["b", "a"], ["c", "b", "a"]):
            assert loaded.predict("k", history) == transitions.predict("k", history)
        assert loaded.stats("k").finished == transitions.stats("k").finished
        for each in (loaded, transitions):
            each.learn("k", ["d", "a"])
