"""Agent Execution Graphs: declaration, hashes, and correction by observed runs."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn import Aeg, ArgumentError
from sojourn.aeg import END, START
from sojourn.wire_codec import MAX_GRAPH_BYTES, MAX_GRAPH_EDGES, MAX_GRAPH_NODES, decode_event, encode
from sojourn.wire_events import AegReport

LOOP = [(START, "plan"), ("plan", "act"), ("act", "act", 0.6), ("act", "plan", 0.3), ("act", END, 0.1)]


def sums(graph: Aeg) -> dict[str, float]:
    found: dict[str, float] = {}
    for (source, _), p in graph.edges.items():
        found[source] = found.get(source, 0.0) + (p or 0.0)
    return found


# ---- declared


def test_cycles_are_what_agents_do():
    graph = Aeg({"plan": (), "act": ("bash", "edit")}, LOOP)
    assert graph.successors("act") == ("act", "plan", END)
    assert graph.edges["act", "plan"] == 0.3
    assert graph.edges["plan", "act"] is None
    assert graph.complete
    assert not graph.unreachable()


@pytest.mark.parametrize(
    ("edges", "word"),
    [
        ([("plan", "nowhere")], "not a node"),
        ([("nowhere", "plan")], "not a node"),
        ([(END, "plan")], "not a node"),
        ([("plan", START)], "not a node"),
        ([("plan",)], "expected"),
        (["pl"], "not a node"),
        ([("plan", "act", 1.5)], "0 to 1"),
        ([("plan", "act", -0.1)], "0 to 1"),
        ([("plan", "act", math.nan)], "0 to 1"),
        ([("plan", "act", "often")], "0 to 1"),
        ([("plan", "act", 0.7), ("plan", END, 0.4)], "sum to"),
        ([("", "act")], "not a name"),
    ],
)
def test_what_makes_no_sense_is_refused(edges, word):
    with pytest.raises(ArgumentError, match=word):
        Aeg(["plan", "act"], edges)


def test_limits_are_the_wires():
    Aeg([f"n{number}" for number in range(MAX_GRAPH_NODES)])
    with pytest.raises(ArgumentError, match="1025 nodes"):
        Aeg([f"n{number}" for number in range(MAX_GRAPH_NODES + 1)])
    nodes = [f"n{number}" for number in range(100)]
    with pytest.raises(ArgumentError, match="edges"):
        Aeg(nodes, [(a, b) for a in nodes for b in nodes][: MAX_GRAPH_EDGES + 1])
    with pytest.raises(ArgumentError, match="bytes"):
        Aeg([f"{number:04}" + "x" * 250 for number in range(MAX_GRAPH_NODES)])
    with pytest.raises(ArgumentError, match="the string"):
        Aeg({"plan": "bash"})


def test_unreachable_nodes_show_that_a_graph_is_not_the_whole_truth():
    # What LangGraph says of a router without a declared return type: everything seems to end there.
    graph = Aeg(["a", "b", "c"], [(START, "a"), ("a", END), ("b", END), ("c", END)])
    assert graph.unreachable() == {"b", "c"}
    assert not graph.complete
    assert Aeg(["a", "b"], [("a", "b")]).complete  # no start was named: nothing is known of reaching


node_names = st.text(min_size=1, max_size=12).filter(lambda name: name not in (START, END))
graphs = st.lists(node_names, min_size=1, max_size=12, unique_by=lambda name: name).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.lists(st.tuples(st.sampled_from([START, *nodes]), st.sampled_from([END, *nodes])), unique=True),
        st.dictionaries(st.sampled_from(nodes), st.lists(node_names, max_size=4)),
    )
)


@given(graphs, st.randoms(use_true_random=False), st.booleans())
def test_equal_content_is_equal_whatever_the_order(parts, random: Random, complete: bool):
    nodes, edges, tools = parts
    graph = Aeg({node: tools.get(node, ()) for node in nodes}, edges, complete=complete)
    random.shuffle(nodes)
    random.shuffle(edges)
    again = Aeg({node: reversed(tools.get(node, [])) for node in nodes}, edges, complete=complete)
    assert graph == again
    assert graph.hash == again.hash
    assert encode(graph.wire()) == encode(again.wire())
    assert len(graph.hash) == 32
    assert Aeg([*nodes, "one more"], edges).hash != graph.hash or "one more" in nodes


@given(graphs)
def test_a_graph_arrives_as_it_was_sent(parts):
    nodes, edges, tools = parts
    graph = Aeg({node: tools.get(node, ()) for node in nodes}, edges)
    sent = AegReport(program_id="p", seq=0, graph_hash=graph.hash, graph=graph.wire())
    assert decode_event(encode(sent)) == sent


# ---- corrected


ROUTER = Aeg(["a", "b", "c"], [(START, "a"), ("a", END), ("b", END), ("c", END)])
"""An untyped router after ``a``, as the framework draws it."""


def test_where_the_declaration_lies_what_was_seen_wins():
    graph = ROUTER.corrected(
        {(START, "a"): 30, ("a", "b"): 20, ("a", "c"): 10, ("b", END): 20, ("c", END): 10}
    )
    assert ("a", END) not in graph.edges
    assert graph.edges["a", "b"] == pytest.approx(20 / 30.5, abs=0.001)
    assert graph.edges["a", "c"] == pytest.approx(10 / 30.5, abs=0.001)
    assert not graph.unreachable()
    assert not graph.complete  # what was not declared may have more to it


def test_a_fake_edge_fades_step_by_step():
    shares = [
        ROUTER.corrected({("a", "b"): count}).edges.get(("a", END), 0.0) for count in (0.5, 1, 4, 10, 30)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 0.5
    assert shares[-1] == 0.0


def test_an_unused_edge_of_a_complete_graph_keeps_a_small_probability():
    graph = Aeg(["plan", "act"], [(START, "plan"), ("plan", "act"), ("plan", END), ("act", END)])
    seen = graph.corrected({(START, "plan"): 30, ("plan", "act"): 30, ("act", END): 30})
    assert seen.complete
    assert seen.edges["plan", END] == pytest.approx(1 / 32, abs=0.001)
    assert seen.edges["plan", "act"] == pytest.approx(31 / 32, abs=0.001)


def test_declared_probabilities_give_way_slowly():
    graph = Aeg(["a"], [(START, "a"), ("a", "a", 0.9), ("a", END, 0.1)])
    assert graph.corrected({("a", END): 1}).edges["a", "a"] == pytest.approx(1.8 / 3, abs=0.001)
    assert graph.corrected({("a", END): 98}).edges["a", "a"] == pytest.approx(0.018, abs=0.001)


def test_nodes_never_left_keep_what_was_declared_of_them():
    graph = Aeg(["a", "b"], [(START, "a"), ("a", "b"), ("b", "a", 0.25), ("b", END, 0.5)])
    seen = graph.corrected({(START, "a"): 3, ("a", "b"): 3})
    assert seen.edges["b", "a"] == 0.25
    assert seen.edges["b", END] == 0.5


def test_an_edge_that_was_not_declared_ends_completeness():
    graph = Aeg(["a"], [(START, "a"), ("a", END)])
    assert graph.corrected({("a", END): 2}).complete
    assert not graph.corrected({("a", "a"): 2}).complete


def test_tools_seen_at_a_node_join_those_declared():
    graph = Aeg({"a": ("bash",)}, []).corrected({("a", END): 1}, {"a": ["edit"], "unknown": ["x"]})
    assert graph.nodes == {"a": ("bash", "edit")}


def test_nothing_declared_and_everything_seen():
    graph = Aeg((), complete=False).corrected({(START, "a"): 4, ("a", "a"): 8, ("a", END): 4})
    assert graph.nodes.keys() == {"a"}
    assert graph.edges["a", "a"] == pytest.approx(0.666, abs=0.001)
    assert not graph.complete


def test_of_ten_thousand_lies_the_frequent_truth_is_kept():
    seen = {("a", f"lie-{number}"): 0.02 for number in range(10_000)}
    graph = Aeg(["a", "b"], [("a", "b")]).corrected({**seen, ("a", "b"): 500, ("b", "found"): 400})
    assert len(graph.nodes) == 2 + 256
    assert "found" in graph.nodes
    assert graph.edges["a", "b"] > 0.9


def test_what_could_not_be_sent_is_refused_also_when_it_was_seen():
    long = {(f"{number:03}" + "x" * 253, END): 1.0 for number in range(256)}
    with pytest.raises(ArgumentError, match="bytes"):
        Aeg([f"{number:03}" + "y" * 100 for number in range(900)]).corrected(long)


def test_the_number_of_nodes_is_bounded():
    graph = Aeg([f"n{number}" for number in range(MAX_GRAPH_NODES)])
    assert graph.corrected({("n0", "more"): 5}).nodes == graph.nodes


counts = st.dictionaries(
    st.tuples(st.one_of(node_names, st.just(START)), st.one_of(node_names, st.just(END))),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    max_size=12,
)


@given(graphs, counts, st.randoms(use_true_random=False))
def test_whatever_was_seen_the_result_can_be_sent(parts, seen, random: Random):
    nodes, edges, _ = parts
    graph = Aeg(nodes, edges, complete=random.random() < 0.5)
    corrected = graph.corrected(seen)
    assert set(graph.nodes) <= set(corrected.nodes)
    assert all(total <= 1 + 1e-6 for total in sums(corrected).values())
    assert len(encode(corrected.wire())) <= MAX_GRAPH_BYTES
    shuffled = list(seen.items())
    random.shuffle(shuffled)
    assert graph.corrected(dict(shuffled)) == corrected
    assert graph.corrected({}) == graph


def test_what_follows_sums_to_one_and_the_undeclared_share_the_rest():
    graph = Aeg(("a", "b", "c"), [("a", "b", 0.5), ("a", "c"), ("a", END), ("b", "a", 0.2), ("c", "a", 0.0)])
    assert graph.following("a") == {"b": 0.5, "c": 0.25, END: 0.25}
    assert graph.following("b") == {"a": 1.0}
    assert graph.following("c") == graph.following("nobody") == {}
