"""Agent Execution Graphs: declaration, hashes, and correction by observed runs."""

from __future__ import annotations

import math
import time
from random import Random

import pytest
import sojourn
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn import ArgumentError
from sojourn.aeg import END, START, Aeg
from sojourn.testing import FakeServer
from sojourn.wire_codec import MAX_GRAPH_EDGES, MAX_GRAPH_NODES, Outcome, decode_context, decode_event, encode
from sojourn.wire_events import AegReport
from waiting import wait_until

# ---- declared


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
any_graph = st.lists(node_names, min_size=1, max_size=12, unique_by=lambda name: name).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.lists(st.tuples(st.sampled_from([START, *nodes]), st.sampled_from([END, *nodes])), unique=True),
        st.dictionaries(st.sampled_from(nodes), st.lists(node_names, max_size=4)),
    )
)


@settings(max_examples=30)
@given(any_graph, st.randoms(use_true_random=False), st.booleans())
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
    sent = AegReport(program_id="p", seq=0, graph_hash=graph.hash, graph=graph.wire())
    assert decode_event(encode(sent)) == sent


def test_what_follows_sums_to_one_and_the_undeclared_share_the_rest():
    graph = Aeg(("a", "b", "c"), [("a", "b", 0.5), ("a", "c"), ("a", END), ("b", "a", 0.2), ("c", "a", 0.0)])
    assert graph.following("a") == {"b": 0.5, "c": 0.25, END: 0.25}
    assert graph.following("b") == {"a": 1.0}
    assert graph.following("c") == graph.following("nobody") == {}


# -- A graph is spelt out once, and once more to a server that does not know it


GRAPH = Aeg({"plan": (), "act": ("bash",)}, [("plan", "act")])


class Graphs:
    """The verdicts of a server that keeps graphs until it is told to forget them."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def __call__(self, event: object) -> Outcome:
        if isinstance(event, AegReport):
            if event.graph is not None:
                self.known.add(event.graph_hash)
            elif event.graph_hash not in self.known:
                return Outcome.MISSING
        return Outcome.APPLIED


@pytest.fixture
def graphs(online: FakeServer) -> Graphs:
    online.verdict = graphs = Graphs()
    return graphs


def reports(server: FakeServer, count: int) -> list[tuple[str, bool]]:
    """(program, spelt out) of each report, once there are ``count``, and a moment later."""

    def found() -> list[AegReport]:
        assert sojourn.flush(30)
        return [e for e in server.events() if isinstance(e, AegReport)]

    wait_until(lambda: len(found()) >= count, lambda: f"{len(found())} of {count} reports")
    time.sleep(0.05)
    assert len(found()) == count
    return [(e.program_id, e.graph is not None) for e in found()]


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_restarted_server_learns_it_from_the_running_program_or_the_next_one(
    online: FakeServer, graphs: Graphs, heartbeat: bool
) -> None:
    """A program without heartbeats is not looked for."""
    with sojourn.program(id="a", aeg=GRAPH):
        reports(online, 1)
    graphs.known.clear()
    with sojourn.program(id="b", aeg=GRAPH, heartbeat=heartbeat):
        reports(online, 2 + heartbeat)
    with sojourn.program(id="c", aeg=GRAPH):
        again = ("b", True) if heartbeat else ("c", True)
        last = [("c", False)] if heartbeat else []
        assert reports(online, 3 + heartbeat) == [("a", True), ("b", False), again, *last]


def test_after_a_batch_was_lost_it_is_spelt_out_again(online: FakeServer, graphs: Graphs) -> None:
    """The server may have been restarted since, and nobody answers a report that rides on a request."""
    sender = sojourn.runtime.session().event_sender
    assert sender is not None
    with sojourn.program(id="a", aeg=GRAPH):
        reports(online, 1)
    online.mode = "500"
    with sojourn.program(id="lost"):
        assert not sojourn.flush(5)
    online.mode = "ok"
    sender._linger_s = 5.0
    for name, spelt_out in (("b", True), ("c", False)):
        with sojourn.program(id=name, aeg=GRAPH):
            body, _ = sojourn.request_parts()
        context = decode_context(body["vllm_xargs"]["agentic_context"])
        assert context.sojourn is not None
        riding = [decode_event(raw) for raw in context.sojourn.events]
        assert [e.graph is not None for e in riding if isinstance(e, AegReport)] == [spelt_out]


def test_reports_to_a_server_that_keeps_missing_the_graph_are_bounded(online: FakeServer) -> None:
    def never(event: object) -> Outcome:
        return Outcome.MISSING if isinstance(event, AegReport) else Outcome.APPLIED

    online.verdict = never
    with sojourn.program(id="a", aeg=GRAPH):
        assert reports(online, 1) == [("a", True)]
    with sojourn.program(id="b", aeg=GRAPH):
        assert reports(online, 2) == [("a", True), ("b", True)]
    assert sojourn.stats()["outcome_missing"] == 2
    assert sojourn.stats()["internal_error"] == 0
