"""Graphs by hash: believed only where the hash is the content's, and never more than the bounds allow."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.aeg import END, START, Aeg
from sojourn.wire_codec import MAX_GRAPH_BYTES
from sojourn.wire_events import AegEdge, AegGraph, AegNode
from sojourn_server.programs.declared_graphs import GraphError, GraphStore, steps_after

LOOP = Aeg({"plan": (), "act": ("bash", "edit")}, [(START, "plan"), ("plan", "act"), ("act", "plan", 0.9)])


@cache
def numbered(number: int) -> Aeg:
    return Aeg([f"node {number}"])


def graph(nodes: Any = ("a", "b"), edges: Any = (), complete: bool = True) -> AegGraph:
    """A graph as a stranger may send it, without the client's checks."""
    return AegGraph(
        nodes=[AegNode(id=n) if isinstance(n, str) else AegNode(id=n[0], tools=list(n[1])) for n in nodes],
        edges=[AegEdge(source=e[0], target=e[1], probability=e[2] if len(e) > 2 else None) for e in edges],
        complete=complete,
    )


def test_a_graph_is_spelt_out_once_and_then_known_by_its_hash() -> None:
    store = GraphStore()
    assert not store.follow(LOOP.hash, None), "nobody has told it yet"
    assert store.follow(LOOP.hash, LOOP.wire())
    assert store.follow(LOOP.hash, None)
    known = store.get(LOOP.hash)
    assert known is not None
    assert known == LOOP
    assert known.successors("act") == ("plan",)


@pytest.mark.parametrize("complete", [True, False])
def test_a_graph_says_how_many_steps_follow_where_that_is_sure(complete: bool) -> None:
    """After a router a short or a long path follows. A review may send back to the long path's last step."""
    long = [f"long {number}" for number in range(20)]
    edges = [
        (START, "route"), ("route", "short", 0.5), ("route", long[0], 0.5), ("short", END),
        *pairwise(long), (long[-1], "review"), ("review", long[-1], 0.2), ("review", END, 0.8),
        (START, "chat"), ("chat", "chat"),
    ]  # fmt: skip
    known = steps_after(Aeg(["route", "short", "review", "chat", *long], edges, complete=complete))
    assert bool(known) == complete
    if known:
        assert not {"route", "chat"} & {*known}
        assert known["short"] == 0.0
        assert known[long[0]] == pytest.approx(20.5, rel=0.02)


BAD: dict[str, tuple[AegGraph, str]] = {
    "a dangling edge": (graph(edges=[("a", "c")]), "'c' is not a node"),
    "p no number": (graph(edges=[("a", "b", float("nan"))]), "expected 0 to 1"),
    "a node without a name": (graph(nodes=["a", ""]), "expected a string"),
    "a node's name too long": (graph(nodes=["é" * 129]), "hash of this graph"),
    "a name UTF-8 cannot say": (graph(nodes=["a\ud800"]), "hash of this graph"),
    "too many nodes": (graph(nodes=[str(i) for i in range(100_000)]), "100000 nodes; at most 1024"),
    "too many bytes": (graph(nodes=[f"{i:0256}" for i in range(1000)]), f"at most {MAX_GRAPH_BYTES}"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_graph_that_is_none_changes_nothing_and_says_why(bad: AegGraph, reason: str) -> None:
    store = GraphStore()
    store.follow(LOOP.hash, LOOP.wire())
    with pytest.raises(GraphError) as caught:
        store.follow("h", bad)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert store.get("h") is None


NAMES = st.text(max_size=6) | st.sampled_from([START, END, "a", "b", "x" * 257])
PROBABILITIES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
GRAPHS = st.builds(
    AegGraph,
    nodes=st.lists(st.builds(AegNode, id=NAMES, tools=st.lists(NAMES, max_size=3)), max_size=5),
    edges=st.lists(st.builds(AegEdge, source=NAMES, target=NAMES, probability=PROBABILITIES), max_size=5),
    complete=st.booleans(),
)
REPORTS = st.tuples(st.integers(0, 40), st.sampled_from(["spelt", "named", "forged"]), GRAPHS)


@settings(max_examples=200, deadline=None)
@given(st.lists(REPORTS, max_size=60))
def test_those_that_were_used_last_are_known_and_no_other_graph_takes_their_place(
    reports: list[tuple[int, str, AegGraph]],
) -> None:
    store, newest = GraphStore(max_graphs=8), list[str]()
    for number, how, any_graph in reports:
        known = numbered(number)
        body = {"spelt": known.wire(), "named": None, "forged": any_graph}[how]
        try:
            taken = store.follow(known.hash, body)
        except GraphError:
            assert how == "forged"
            taken = False
        # Of a hash that is held, a forged graph is not even read.
        assert taken == (how == "spelt" or known.hash in newest)
        if taken:
            newest = [*(one for one in newest if one != known.hash), known.hash][-8:]
        held = {graph.hash: graph for graph in map(numbered, range(41)) if store.get(graph.hash)}
        assert set(held) == set(newest)
        assert all(store.get(graph_hash) == graph for graph_hash, graph in held.items())
        newest = list(held)  # each was used
