"""A graph is spelt out once, and once more to a server that does not know it."""

from __future__ import annotations

import time

import pytest
import sojourn
from sojourn.aeg import Aeg
from sojourn.testing import FakeServer
from sojourn.wire_codec import Outcome, decode_context, decode_event
from sojourn.wire_events import AegReport
from waiting import wait_until

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


def test_a_restarted_server_learns_it_from_the_running_program(online: FakeServer, graphs: Graphs) -> None:
    with sojourn.program(id="a", aeg=GRAPH):
        reports(online, 1)
        graphs.known.clear()
        with sojourn.program(id="b", aeg=GRAPH):
            assert reports(online, 3) == [("a", True), ("b", False), ("b", True)]
        with sojourn.program(id="c", aeg=GRAPH):
            assert reports(online, 4)[3:] == [("c", False)]


def test_where_the_program_is_over_the_next_one_says_it(online: FakeServer, graphs: Graphs) -> None:
    with sojourn.program(id="a", aeg=GRAPH):
        reports(online, 1)
    graphs.known.clear()
    with sojourn.program(id="b", aeg=GRAPH, heartbeat=False):
        reports(online, 2)
    with sojourn.program(id="c", aeg=GRAPH):
        assert reports(online, 3) == [("a", True), ("b", False), ("c", True)]


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
