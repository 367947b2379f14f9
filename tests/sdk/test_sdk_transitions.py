"""What is learned from the ways that programs went: sequences, predictions, turns left, bounds."""

from __future__ import annotations

import json
import sys
from random import Random
from statistics import mean

import pytest
import stochastic_agent
from hypothesis import given
from hypothesis import strategies as st
from sojourn.aeg import END, START, Aeg
from sojourn.learning import transitions as module
from sojourn.learning.run_trace import MAX_PATH, ProgramRun, RunTrace
from sojourn.learning.transitions import HALF_LIFE_RUNS, Transitions


def a_run(*nodes: str, turns: bool = True, ends: bool = True) -> ProgramRun:
    """One after the other, each with one turn."""
    return ProgramRun(
        path=tuple((node,) for node in nodes),
        turn_nodes=nodes if turns and ends else (),
        turns=len(nodes) if turns and ends else 0,
        ends=ends,
    )


def learned(*runs: ProgramRun) -> Transitions:
    transitions = Transitions()
    for run in runs:
        transitions.learn("k", run)
    return transitions


def best(transitions: Transitions, *history: str) -> str | None:
    found = transitions.predict("k", history)
    return found[0][0] if found else None


# ---- a program's way


def walk(run_trace: RunTrace, *facts: str) -> ProgramRun:
    """``a`` enters a node, ``?a`` begins a request there, ``!a`` ends it, ``tool()`` calls a tool."""
    for fact in facts:
        if fact.endswith("()"):
            run_trace.called(fact[:-2])
        elif fact[0] == "?":
            run_trace.requested(fact[1:] or None)
        elif fact[0] == "!":
            run_trace.answered(fact[1:] or None)
        else:
            run_trace.entered(fact)
    return run_trace.ended(broken_off=False)


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ("a b a", "a b a"),
        ("a ?a !a b ?b !b", "a b"),  # a request inside a node is no further visit
        ("?a !a ?b !b", "a b"),  # nobody enters nodes: requests tell
        ("a ?a !a ?a !a", "a a"),  # the next turn is at the same node
        ("a a", "a a"),
        ("a ?a !a a ?a !a", "a a"),
        ("a ?a ?a !a !a", "a"),  # five questions at once are one visit
        ("a ?a a ?a a ?a !a !a !a", "a"),  # copies of one node, each with a request of its own
        ("a ?a b ?b !a !b c", "a+b c"),  # side by side: one's request is under way when the other begins
        ("b ?b a ?a !a !b c", "a+b c"),
        ("? ! ? !", ""),  # turns without a node
        ("a ? ! b", "a b"),
        (f"{START} a {END}", "a"),
    ],
)
def test_visits(facts: str, path: str):
    groups = [tuple(group.split("+")) for group in path.split()]
    assert walk(RunTrace("k"), *facts.split()).path == tuple(groups)


FORK = Aeg(
    ["plan", "a", "b", "join"],
    [(START, "plan"), ("plan", "a"), ("plan", "b"), ("a", "join"), ("b", "join"), ("join", END)],
)


@pytest.mark.parametrize("order", ["plan a b join", "plan b a join"])
def test_branches_that_the_graph_knows_stand_side_by_side_though_neither_asks_the_model(order: str):
    run_trace = RunTrace("k")
    run_trace.graph = FORK
    assert walk(run_trace, *order.split()).path == (("plan",), ("a", "b"), ("join",))


def test_branches_follow_what_preceded_both_and_each_leads_on():
    transitions = learned(*[ProgramRun(path=(("plan",), ("a", "b"), ("join",)))] * 5)
    assert set(transitions.edges("k")) == {
        (START, "plan"), ("plan", "a"), ("plan", "b"), ("a", "join"), ("b", "join"), ("join", END)
    }  # fmt: skip


def test_what_is_declared_one_after_the_other_is_so_though_a_request_was_left_open():
    run_trace = RunTrace("k")
    run_trace.graph = Aeg(["a", "b"], [(START, "a"), ("a", "b"), ("b", END)])
    assert walk(run_trace, "a", "?a", "b").path == (("a",), ("b",))


def test_tools_belong_to_the_node_they_are_called_at():
    run = walk(RunTrace("k"), "a", "?a", "!a", "bash()", "b", "edit()", "edit()")
    assert run.tools == (("a", "bash"), ("b", "edit"))


def test_a_program_broken_off_says_nothing_about_its_end():
    run_trace = RunTrace("k")
    run_trace.entered("a")
    transitions = learned(run_trace.ended(broken_off=True))
    assert transitions.edges("k").keys() == {(START, "a")}
    assert best(transitions, "a") is None


def test_a_long_way_is_learned_in_pieces_and_each_step_counts_once():
    run_trace = RunTrace("k")
    transitions = Transitions()
    pieces = 0
    for number in range(MAX_PATH * 3):
        piece = run_trace.entered("ab"[number % 2])
        if piece is not None:
            pieces += 1
            transitions.learn("k", piece)
            assert not piece.ends
            assert piece.begins == (pieces == 1)
    transitions.learn("k", run_trace.ended(broken_off=False))
    assert pieces == 3
    assert transitions.runs("k") == 1
    assert transitions.edges("k")[START, "a"] == pytest.approx(2 ** (-3 / HALF_LIFE_RUNS))
    assert transitions.edges("k")["b", END] == pytest.approx(1.0)


# ---- prediction


def held_back(seed: int) -> tuple[list[list[stochastic_agent.State]], list[list[stochastic_agent.State]]]:
    random = Random(seed)
    runs = [stochastic_agent.states(random) for _ in range(60)]
    return runs[:30], runs[30:]


def accuracy(predict, runs: list[list[stochastic_agent.State]]) -> float:
    hits = [
        predict(state, [earlier.node for earlier in run[1 : number + 1]]) == run[number + 1].node
        for run in runs
        for number, state in enumerate(run[:-1])
    ]
    return mean(hits)


@pytest.fixture(scope="module")
def accuracies() -> list[tuple[float, float, float]]:
    """Ours, a first-order chain's and an oracle's, for each of ten seeds."""
    found = []
    for seed in range(10):
        seen, unseen = held_back(seed)
        transitions = learned(*(a_run(*(state.node for state in run[1:-1])) for run in seen))
        chain = stochastic_agent.FirstOrderChain(seen)
        found.append(
            (
                accuracy(lambda _, history, of=transitions: best(of, *history), unseen),
                accuracy(lambda state, _, chain=chain: chain(state), unseen),
                accuracy(lambda state, _: stochastic_agent.oracle(state), unseen),
            )
        )
    return found


def test_after_thirty_runs_the_next_node_is_known_87_times_in_a_hundred(accuracies):
    """SAGA §9.4 reports 87 %. Over a hundred seeds: ours 0.93 (worst 0.89), first order 0.81, an oracle that
    also knows what cannot be seen 0.96, the best that can be said from what is seen 0.94."""
    ours = [each[0] for each in accuracies]
    assert min(ours) >= 0.87
    assert mean(ours) >= 0.91


def test_prediction_beats_a_first_order_chain(accuracies):
    assert mean(each[1] for each in accuracies) < 0.85
    assert 0.92 < mean(each[2] for each in accuracies) < 0.99


def test_what_preceded_decides_where_the_node_alone_does_not():
    transitions = learned(*[a_run("act", "check", "fix", "check", "done")] * 6)
    assert best(transitions, "act", "check") == "fix"
    assert best(transitions, "act", "check", "fix", "check") == "done"
    by_node = dict(transitions.predict("k", ["elsewhere", "check"]))
    assert by_node["fix"] == pytest.approx(by_node["done"])


def test_an_unknown_past_falls_back_on_the_present():
    transitions = learned(*[a_run("a", "b", "c")] * 6)
    assert best(transitions, "x", "y", "b") == "c"
    assert best(transitions, "x") is None
    assert Transitions().predict("k", ["a"]) == []


def test_the_start_and_the_end_are_part_of_it():
    transitions = learned(*[a_run("a", "b")] * 3)
    assert transitions.predict("k", []) == [("a", pytest.approx(1.0))]
    assert best(transitions, "a", "b") == END


def test_a_changed_workload_is_relearned_within_fifty_runs():
    transitions = learned(*[a_run("a", "b")] * 500)
    flipped = None
    for number in range(1, 51):
        transitions.learn("k", a_run("a", "c"))
        if flipped is None and best(transitions, "a") == "c":
            flipped = number
    assert flipped is not None
    assert 10 <= flipped <= 25
    assert dict(transitions.predict("k", ["a"]))["c"] > 0.8


def test_old_counts_are_gone_in_the_end_and_large_weights_are_brought_back():
    transitions = learned(a_run("old"), *[a_run("new")] * 2000)
    assert transitions.edges("k").keys() == {(START, "new"), ("new", END)}
    assert transitions._kinds["k"].weight < 2.0**41
    assert transitions.turns_left("k", turns=1, node="new") == 0.0


# ---- turns left


def test_turns_left_are_predicted_after_five_finished_programs():
    runs = [a_run("a", "b", "c")] * 4
    assert learned(*runs).turns_left("k", turns=1) is None
    assert learned(*runs, a_run("a", ends=False)).turns_left("k", turns=1) is None
    transitions = learned(*runs, a_run("a", "b", "c"))
    assert [transitions.turns_left("k", turns=turn) for turn in (1, 2, 3)] == [2.0, 1.0, 0.0]
    assert transitions.turns_left("k", turns=4) is None  # never seen
    assert transitions.turns_left("other", turns=1) is None


def test_a_node_predicts_better_than_a_turn_if_runs_differ_in_length():
    runs = [a_run(*["act"] * number, "sum") for number in (1, 2, 3, 6, 9, 12, 1, 4)]
    transitions = learned(*runs)
    assert transitions.turns_left("k", turns=5, node="sum") == 0.0
    by_turn = transitions.turns_left("k", turns=2)
    assert by_turn is not None
    assert 2 < by_turn < 7


def test_a_run_longer_than_its_list_of_turns_counts_in_full():
    transitions = learned(*[ProgramRun(path=(("a",),), turn_nodes=("a",) * 10, turns=1000)] * 5)
    assert transitions.turns_left("k", turns=1, node="a") == pytest.approx(999)


# ---- bounds


def entries(transitions: Transitions, kind: str = "k") -> int:
    known = transitions._kinds[kind]
    counted = sum(map(len, known.contexts.values()))
    assert counted == known.entries
    return counted


def test_a_program_that_lies_about_its_node_each_turn_takes_no_more_than_its_share():
    transitions = Transitions()
    for lie in range(100_000 // 50):
        transitions.learn("k", a_run(*(f"node-{lie}-{number}" for number in range(50))))
    known = transitions._kinds["k"]
    assert entries(transitions) <= module.MAX_ENTRIES
    assert max(map(len, known.contexts.values())) <= module.MAX_SUCCESSORS
    assert len(known.left) <= module.MAX_LEFT
    assert len(transitions.edges("k")) <= module.MAX_ENTRIES
    for honest in range(30):
        transitions.learn("k", a_run("a", "b"))
        assert honest < 1 or best(transitions, "a") == "b"


def test_a_node_with_ten_thousand_successors_keeps_the_frequent_ones():
    transitions = learned(*[a_run("hub", "home")] * 30)
    for number in range(2_000):
        transitions.learn("k", ProgramRun(path=(("hub",), (f"x{number}",)), ends=False))
        if number % 2 == 0:
            transitions.learn("k", a_run("hub", "home"))
    assert best(transitions, "hub") == "home"
    assert len(transitions._kinds["k"].contexts["hub",]) <= module.MAX_SUCCESSORS


def test_kinds_are_bounded_and_the_one_not_heard_of_for_longest_goes():
    transitions = Transitions()
    for number in range(module.MAX_KINDS * 2):
        transitions.learn("steady", a_run("a"))
        transitions.learn(f"kind-{number}", a_run("a"))
    assert len(transitions.snapshot()["kinds"]) == module.MAX_KINDS
    assert transitions.runs("steady") > 0
    assert transitions.runs("kind-0") == 0


def test_a_trail_is_bounded():
    run_trace = RunTrace("k")
    for number in range(20_000):
        run_trace.entered(f"n{number}")
        run_trace.requested(f"r{number % 7}")
        run_trace.called(f"t{number}")
    run = run_trace.ended(broken_off=False)
    assert len(run.path) <= MAX_PATH
    assert len(run.turn_nodes) <= 512
    assert len(run.tools) <= 64
    assert run.turns == 20_000
    for parallel in range(1000):
        run_trace.requested("p")
        run_trace.entered(f"q{parallel}")
    assert sys.getsizeof(run_trace._group) < 1000


names = st.one_of(st.text(max_size=8), st.sampled_from([START, END, "a", "b", "ä" * 200, "\ud800"]))


@given(st.lists(st.tuples(st.sampled_from("e?!t"), names), max_size=60), st.booleans())
def test_whatever_is_heard_probabilities_are_probabilities(facts, broken_off):
    run_trace = RunTrace("k")
    transitions = Transitions()
    for what, name in facts:
        piece = {
            "e": run_trace.entered, "?": run_trace.requested, "!": run_trace.answered, "t": run_trace.called
        }[what](name)  # fmt: skip
        assert piece is None
    transitions.learn("k", run_trace.ended(broken_off=broken_off))
    assert entries(transitions) <= module.MAX_ENTRIES
    for (source, target), count in transitions.edges("k").items():
        assert source != END
        assert target != START
        assert count > 0
        predicted = transitions.predict("k", [] if source == START else [source])
        assert sum(p for _, p in predicted) == pytest.approx(1.0)
        assert [p for _, p in predicted] == sorted((p for _, p in predicted), reverse=True)


# ---- saved and loaded


@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), min_size=1, max_size=30))
def test_what_was_saved_predicts_as_before_and_learns_on(runs: list[list[str]]):
    transitions = learned(*(a_run(*nodes) for nodes in runs))
    loaded = Transitions.restore(json.loads(json.dumps(transitions.snapshot())))
    for _ in range(2):
        for history in ([], ["a"], ["b", "a"], ["c", "b", "a"]):
            assert loaded.predict("k", history) == transitions.predict("k", history)
            assert loaded.turns_left("k", turns=1, node="a") == transitions.turns_left("k", turns=1, node="a")
        assert loaded.finished("k") == transitions.finished("k")
        for each in (loaded, transitions):
            each.learn("k", a_run("d", "a"))


A_KIND = {"kind": "k", "runs": 1, "finished": 1, "weight": 1.0, "contexts": [], "left": [], "tools": []}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kinds": None},
        {"kinds": [{}]},
        {"kinds": [{**A_KIND, "weight": 0}]},
        {"kinds": [{**A_KIND, "runs": -1}]},
        {"kinds": [{**A_KIND, "contexts": [[["a"], {"b": "much"}]]}]},
    ],
)
def test_a_document_that_makes_no_sense_is_refused_with_a_reason(change: dict[str, object]):
    with pytest.raises(ValueError, match="transitions"):
        Transitions.restore({**learned(a_run("a", "b")).snapshot(), **change})
    with pytest.raises(ValueError, match="transitions"):
        Transitions.restore("text")
