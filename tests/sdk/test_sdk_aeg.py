"""Agent Execution Graphs: declaration, hashes, and correction by observed runs."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn import Aeg, ArgumentError
from sojourn.aeg import END, START
from sojourn.wire_codec import MAX_GRAPH_EDGES, MAX_GRAPH_NODES, decode_event, encode
from sojourn.wire_events import AegReport

LOOP = [(START, "plan"), ("plan", "act"), ("act", "act", 0.6), ("act", "plan", 0.3), ("act", END, 0.1)]


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


@settings(max_examples=30)
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


@settings(max_examples=30)
@given(graphs)
def test_a_graph_arrives_as_it_was_sent(parts):
    nodes, edges, tools = parts
    graph = Aeg({node: tools.get(node, ()) for node in nodes}, edges)
    sent = AegReport(program_id="p", seq=0, graph_hash=graph.hash, graph=graph.wire())
    assert decode_event(encode(sent)) == sent


def test_what_follows_sums_to_one_and_the_undeclared_share_the_rest():
    graph = Aeg(("a", "b", "c"), [("a", "b", 0.5), ("a", "c"), ("a", END), ("b", "a", 0.2), ("c", "a", 0.0)])
    assert graph.following("a") == {"b": 0.5, "c": 0.25, END: 0.25}
    assert graph.following("b") == {"a": 1.0}
    assert graph.following("c") == graph.following("nobody") == {}
