"""Graphs by hash: believed only where the hash is the content's, and never more than the bounds allow."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.aeg import END, START, Aeg
from sojourn.wire_codec import MAX_GRAPH_BYTES, encode
from sojourn.wire_events import AegEdge, AegGraph, AegNode
from sojourn_server.programs import declared_graphs
from sojourn_server.programs.declared_graphs import TYPES_PER_GRAPH, GraphError, GraphStore

LOOP = Aeg({"plan": (), "act": ("bash", "edit")}, [(START, "plan"), ("plan", "act"), ("act", "plan", 0.9)])


@cache
def numbered(number: int, nodes: int = 1) -> Aeg:
    return Aeg([f"{number}-{i}" for i in range(nodes)])


def graph(nodes: Any = ("a", "b"), edges: Any = (), complete: bool = True) -> AegGraph:
    """A graph as a stranger may send it, without the client's checks."""
    return AegGraph(
        nodes=[AegNode(id=n) if isinstance(n, str) else AegNode(id=n[0], tools=list(n[1])) for n in nodes],
        edges=[AegEdge(source=e[0], target=e[1], probability=e[2] if len(e) > 2 else None) for e in edges],
        complete=complete,
    )


def state_of(store: GraphStore) -> Any:
    return [known.aeg.hash for known in store], store.bytes, store.forgotten, store.types()


def test_a_graph_is_spelt_out_once_and_then_known_by_its_hash() -> None:
    store = GraphStore()
    assert not store.follow(LOOP.hash, None, "fixer"), "nobody has told it yet"
    assert store.follow(LOOP.hash, LOOP.wire(), "fixer")
    assert store.follow(LOOP.hash, None, "reviewer")
    known = store.get(LOOP.hash)
    assert known is not None
    assert known.aeg == LOOP
    assert known.aeg.successors("act") == ("plan",)
    assert known.size_bytes == store.bytes == len(encode(LOOP.wire()))
    assert store.types() == {LOOP.hash: ["fixer", "reviewer"]}


def test_two_graphs_of_one_agent_type_are_both_kept_and_the_latest_is_current() -> None:
    store = GraphStore()
    first, second = numbered(1), numbered(2)
    store.follow(first.hash, first.wire(), "fixer")
    store.follow(second.hash, second.wire(), "fixer")
    assert [known.aeg for known in store] == [first, second]
    assert store.types() == {second.hash: ["fixer"]}
    store.follow(first.hash, None, "fixer")
    assert store.types() == {first.hash: ["fixer"]}


def test_declared_in_another_order_it_is_the_same_graph() -> None:
    store = GraphStore()
    sent = LOOP.wire()
    turned = AegGraph(nodes=sent.nodes[::-1], edges=sent.edges[::-1], complete=sent.complete)
    assert store.follow(LOOP.hash, turned)


def test_cycles_and_any_script_are_fine() -> None:
    store = GraphStore()
    names = ["plän", "计划", "\u202egnp", "x" * 256, "🤖" * 64]
    edges = [*pairwise(names), (names[-1], names[0]), ("plän", "plän", 0.5)]
    ring = Aeg({n: ("täglich",) for n in names}, edges)
    assert store.follow(ring.hash, msgspec.json.decode(encode(ring.wire()), type=AegGraph))


BAD: dict[str, tuple[AegGraph, str]] = {
    "a dangling edge": (graph(edges=[("a", "c")]), "'c' is not a node"),
    "an edge to the start": (graph(edges=[("a", START)]), "is not a node"),
    "an edge from the end": (graph(edges=[(END, "a")]), "is not a node"),
    "p above 1": (graph(edges=[("a", "b", 1.5)]), "expected 0 to 1"),
    "p below 0": (graph(edges=[("a", "b", -0.1)]), "expected 0 to 1"),
    "p no number": (graph(edges=[("a", "b", float("nan"))]), "expected 0 to 1"),
    "p sums to more than 1": (graph(edges=[("a", "a", 0.6), ("a", "b", 0.6)]), "sum to 1.2000"),
    "a node twice": (graph(nodes=["a", "a"]), "node is declared twice"),
    "an edge twice": (graph(edges=[("a", "b", 0.1), ("a", "b", 0.2)]), "edge is declared twice"),
    "a node without a name": (graph(nodes=["a", ""]), "0 bytes"),
    "a node's name too long": (graph(nodes=["é" * 129]), "258 bytes"),
    "a tool's name too long": (graph(nodes=[("a", ["t" * 257])]), "257 bytes"),
    "a name UTF-8 cannot say": (graph(nodes=["a\ud800"]), "hash of this graph"),
    "an edge's name too long": (graph(edges=[("a", "b" * 257)]), "257 bytes"),
    "an end as a node": (graph(nodes=[START]), "not declared as a node"),
    "too many tools": (graph(nodes=[("a", [f"t{i}" for i in range(65)])]), "65 tools at one node"),
    "too many nodes": (graph(nodes=[str(i) for i in range(100_000)]), "100000 nodes; at most 1024"),
    "too many edges": (graph(edges=[("a", "b")] * 100_000), "100000 edges; at most 4096"),
    "too many bytes": (graph(nodes=[f"{i:0256}" for i in range(1000)]), f"at most {MAX_GRAPH_BYTES}"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_graph_that_is_none_changes_nothing_and_says_why(bad: AegGraph, reason: str) -> None:
    store = GraphStore()
    store.follow(LOOP.hash, LOOP.wire(), "fixer")
    before = state_of(store)
    with pytest.raises(GraphError) as caught:
        store.follow("h", bad, "fixer")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert state_of(store) == before


def test_no_other_graph_takes_the_place_of_a_known_one() -> None:
    store = GraphStore()
    forged = Aeg({"plan": (), "act": ("rm",)}, LOOP.edges)
    with pytest.raises(GraphError, match=f"the hash of this graph is {forged.hash}"):
        store.follow(LOOP.hash, forged.wire(), "fixer")
    assert store.types() == {}
    store.follow(LOOP.hash, LOOP.wire())
    assert store.follow(LOOP.hash, forged.wire(), "fixer"), "the hash names what is held, and it alone counts"
    assert store.types() == {LOOP.hash: ["fixer"]}
    assert [known.aeg for known in store] == [LOOP]


def test_a_known_graph_spelt_out_again_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GraphStore()
    store.follow(LOOP.hash, LOOP.wire())
    monkeypatch.delattr(declared_graphs, "Aeg")
    assert store.follow(LOOP.hash, LOOP.wire(), "fixer"), "every process spells it out once"


def test_forgetting_does_not_look_at_every_type() -> None:
    """Each report is a part of an engine's step: a thousand in one batch must not cost a thousand scans."""

    def seconds(types: int) -> float:
        store = GraphStore(max_graphs=10_000)
        for number in range(10_000):
            store.follow(known[number].hash, known[number].wire())
        for number in range(types):
            store.follow(known[9_999].hash, None, f"type {number}")
        began_s = time.thread_time()  # of this thread alone, whatever else the machine does
        for number in range(10_000, 10_300):
            store.follow(known[number].hash, known[number].wire())
        assert store.forgotten == 300
        return time.thread_time() - began_s

    known = [numbered(number) for number in range(10_300)]
    assert seconds(types=40_000) < 10 * seconds(types=0)


def test_ten_thousand_graphs_leave_the_latest_and_those_in_use() -> None:
    store = GraphStore(max_graphs=256)
    store.follow(LOOP.hash, LOOP.wire(), "fixer")
    for number in range(10_000):
        other = numbered(number)
        store.follow(other.hash, other.wire(), f"type {number}")
        if not number % 100:
            assert store.follow(LOOP.hash, None, "fixer"), "in use, so never the oldest"
    assert len(store) == 256
    assert store.forgotten == 10_001 - 256
    assert store.bytes == sum(known.size_bytes for known in store)
    assert store.get(numbered(9_999).hash) is not None
    assert not store.follow(numbered(0).hash, None), "forgotten: it must be told again"
    assert len(store.types()) == 256
    assert ["type 0"] not in store.types().values()


def test_looking_is_no_use() -> None:
    store = GraphStore(max_graphs=2)
    first, second, third = (numbered(n) for n in range(3))
    for each in (first, second):
        store.follow(each.hash, each.wire(), "t")
    assert store.get(first.hash) is not None
    store.follow(third.hash, third.wire())
    assert store.get(first.hash) is None


def test_one_graph_followed_by_ten_thousand_types_is_bounded() -> None:
    store = GraphStore(max_graphs=2)
    store.follow(LOOP.hash, LOOP.wire(), "0")
    for number in range(10_000):
        store.follow(LOOP.hash, None, f"type {number}")
    assert store.types() == {LOOP.hash: sorted(f"type {n}" for n in range(9_992, 10_000))}


def test_a_few_huge_graphs_fill_it_as_well() -> None:
    store = GraphStore(max_graphs=256, max_bytes=MAX_GRAPH_BYTES)
    for number in range(20):
        huge = numbered(number, nodes=1000)
        assert store.follow(huge.hash, huge.wire())
        assert store.get(huge.hash) is not None, "the newest always has a place"
        assert 0 < store.bytes <= MAX_GRAPH_BYTES
    assert len(store) < 20


@pytest.mark.parametrize("bounds", [(0, MAX_GRAPH_BYTES), (1, MAX_GRAPH_BYTES - 1)])
def test_bounds_that_fit_no_graph_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        GraphStore(*bounds)


NAMES = st.text(max_size=6) | st.sampled_from([START, END, "a", "b", "x" * 257])
PROBABILITIES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
GRAPHS = st.builds(
    AegGraph,
    nodes=st.lists(st.builds(AegNode, id=NAMES, tools=st.lists(NAMES, max_size=3)), max_size=5),
    edges=st.lists(st.builds(AegEdge, source=NAMES, target=NAMES, probability=PROBABILITIES), max_size=5),
    complete=st.booleans(),
)
REPORTS = st.tuples(st.integers(0, 40), st.sampled_from(["spelt", "named", "forged"]), NAMES, GRAPHS)


@settings(max_examples=200, deadline=None)
@given(st.lists(REPORTS, max_size=60))
def test_whatever_is_reported_the_bounds_hold(reports: list[tuple[int, str, str, AegGraph]]) -> None:
    store = GraphStore(max_graphs=8, max_bytes=MAX_GRAPH_BYTES)
    for number, how, agent_type, any_graph in reports:
        known = numbered(number, nodes=1 + 100 * (number % 11))
        body = {"spelt": known.wire(), "named": None, "forged": any_graph}[how]
        before = state_of(store)
        try:
            taken = store.follow(known.hash, body, agent_type)
        except GraphError:
            assert how == "forged"
            taken = False
        else:
            assert taken == (store.get(known.hash) is not None)
        if not taken:
            assert state_of(store) == before
        assert len(store) <= 8
        assert store.bytes == sum(k.size_bytes for k in store) <= MAX_GRAPH_BYTES
        types = store.types()
        assert set(types) <= {k.aeg.hash for k in store}
        assert sum(map(len, types.values())) <= TYPES_PER_GRAPH * 8
