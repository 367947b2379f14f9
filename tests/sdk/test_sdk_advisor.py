"""What agents did comes back as advice: expected durations, turns left, corrected graphs."""

from __future__ import annotations

import contextvars
import gc
import os
import pickle
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import sojourn
import stochastic_agent
from sojourn import runtime
from sojourn.aeg import END, START, Aeg
from sojourn.learning.advisor import MAX_FACTS, Advisor
from sojourn.learning.history_store import DurationSample, HistoryStore
from sojourn.learning.run_trace import ProgramRun
from sojourn.learning.transitions import MAX_ENTRIES, Transitions
from sojourn.listeners import add_listener, remove_listener
from sojourn.request_tracker import LogicalRequest
from sojourn.stats import Counters
from sojourn.testing import FakeServer
from sojourn.wire_codec import decode_context
from sojourn.wire_events import AegReport, ToolStart
from waiting import wait_until

ROUTER = Aeg(["a", "b"], [(START, "a"), ("a", END), ("b", END)])


@pytest.fixture
def advisor(online: FakeServer) -> Advisor:
    """The session's."""
    found = runtime.session().advisor
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


def turn(node: str | None = None) -> float | None:
    """One LLM request of the current program; the turns it expects to follow."""
    session = runtime.session()
    program = sojourn.current_program()
    assert program is not None
    request = LogicalRequest(session.counters, program, node=program.node if node is None else node)
    text = sojourn.request_fields()["vllm_xargs"]["agentic_context"]
    request.end()
    ours = decode_context(text).sojourn
    assert ours is not None
    return ours.expected_steps_left


def run_agent(*nodes: str, kind: str = "coder", aeg: Aeg | None = None) -> list[float | None]:
    left = []
    with sojourn.program(agent_type=kind, aeg=aeg) as program:
        for node in nodes:
            program.enter_node(node)
            left.append(turn())
    return left


def run_tools(count: int, tool: str = "bash", tool_class: str | None = None, **kwargs) -> None:
    for _ in range(count):
        with sojourn.tool_call(tool, tool_class=tool_class, **kwargs):
            pass


def starts(server: FakeServer) -> list[ToolStart]:
    assert sojourn.flush(60)
    return [event for event in server.program_events() if isinstance(event, ToolStart)]


def reports(server: FakeServer) -> list[AegReport]:
    assert sojourn.flush(60)
    return [event for event in server.program_events() if isinstance(event, AegReport)]


# ---- durations


def test_the_sixth_call_of_a_tool_says_how_long_it_may_take(online: FakeServer, advisor: Advisor):
    with sojourn.program("p"):
        run_tools(5)
        assert advisor.wait_until_learned()
        run_tools(1)
        run_tools(1, expected_s=7.0)
        run_tools(1, "never seen")
    *first, learned, given, unseen = starts(online)
    assert all(event.expected_s is None for event in first)
    assert learned.expected_s is not None
    assert learned.expected_p95_s is not None
    assert 0 <= learned.expected_s <= learned.expected_p95_s < 1
    assert (given.expected_s, given.expected_p95_s) == (7.0, None)
    assert (unseen.expected_s, unseen.expected_p95_s) == (None, None)


def test_an_estimate_that_makes_no_sense_gives_way_to_what_was_seen(online: FakeServer, advisor: Advisor):
    with sojourn.program("p"):
        run_tools(5)
        assert advisor.wait_until_learned()
        run_tools(1, expected_s=float("nan"))
    assert starts(online)[-1].expected_s is not None
    assert sojourn.stats()["hint_invalid"] == 1


def test_a_call_of_a_new_class_takes_the_estimate_of_its_tool(online: FakeServer, advisor: Advisor):
    with sojourn.program("p"):
        run_tools(5, tool_class="pytest")
        assert advisor.wait_until_learned()
        run_tools(1, tool_class="ls")
    assert starts(online)[-1].expected_s == advisor.estimates["bash", None].median_s


def test_cancelled_calls_are_not_learned_from(online: FakeServer, advisor: Advisor):
    with sojourn.program("p"):
        for _ in range(6):
            sojourn.ToolCall("bash").start().stop("cancelled")
        assert advisor.wait_until_learned()
        run_tools(1)
    assert starts(online)[-1].expected_s is None


# ---- turns and nodes


def test_turns_left_are_sent_after_five_finished_programs(advisor: Advisor):
    for _ in range(5):
        assert run_agent("plan", "act", "act") == [None, None, None]
        assert advisor.wait_until_learned()
    assert run_agent("plan", "act", "act") == [2.0, 1.0, 0.0]
    assert run_agent("plan", kind="other") == [None]


def test_programs_without_nodes_are_counted_by_their_turns(advisor: Advisor):
    for _ in range(6):
        with sojourn.program("loop"):
            left = [turn(), turn(), turn()]
        assert advisor.wait_until_learned()
    assert left == [2.0, 1.0, 0.0]


def test_a_final_turn_and_an_implicit_program_say_nothing(advisor: Advisor):
    for _ in range(6):
        run_agent("a")
    assert advisor.wait_until_learned()
    with sojourn.program(agent_type="coder"), sojourn.step("a", final=True):
        assert turn("a") is None
    fields = sojourn.request_fields()["vllm_xargs"]["agentic_context"]
    assert "expected_steps_left" not in fields


@pytest.mark.parametrize("way", ["pickled", "resumed"])
def test_no_prediction_for_a_program_that_began_elsewhere(advisor: Advisor, tmp_path: Path, way: str):
    """Its turns so far are not known here, so neither are those left, nor where it began."""
    for _ in range(6):
        run_agent("plan", "act", "act")
    assert advisor.wait_until_learned()
    if way == "pickled":
        with sojourn.program(agent_type="coder") as program:
            assert turn("plan") == 2.0
            with pickle.loads(pickle.dumps(program)).here():
                assert turn("act") is None
    else:
        path = tmp_path / "run.id"
        with suppress(LookupError), sojourn.program(agent_type="coder", resume=path):
            assert turn("plan") == 2.0
            raise LookupError
        with sojourn.program(agent_type="coder", resume=path):
            assert turn("act") is None
    assert advisor.wait_until_learned()
    assert (START, "act") not in advisor.transitions.edges("coder")


def test_a_childs_nodes_are_its_own(advisor: Advisor):
    for _ in range(5):
        with sojourn.program(agent_type="parent") as parent:
            parent.enter_node("ask")
            with sojourn.tool_call("sub"):
                run_agent("look", kind="child")
            parent.enter_node("answer")
    assert advisor.wait_until_learned()
    assert set(advisor.transitions.edges("parent")) == {(START, "ask"), ("ask", "answer"), ("answer", END)}
    assert set(advisor.transitions.edges("child")) == {(START, "look"), ("look", END)}


def test_steps_are_nodes_too(advisor: Advisor):
    for _ in range(3):
        with sojourn.program(agent_type="coder"):
            for node in ("plan", "act", "act"):
                with sojourn.step(node):
                    turn(node)
    assert advisor.wait_until_learned()
    assert [node for node, _ in advisor.transitions.predict("coder", ["plan", "act"])] == ["act", END]


def test_programs_in_threads_of_their_own_do_not_get_mixed_up(advisor: Advisor):
    ways = [[f"{name}{number}" for number in range(30)] for name in "abcd"]

    def work(way: list[str]) -> None:
        for _ in range(5):
            run_agent(*way, kind="many")

    threads = [threading.Thread(target=work, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert advisor.wait_until_learned()
    expected = {edge for way in ways for edge in zip([START, *way], [*way, END], strict=True)}
    assert set(advisor.transitions.edges("many")) == expected


def test_predictions_from_live_programs_are_as_good_as_from_recorded_ones(advisor: Advisor):
    random = Random(3)
    for _ in range(30):
        run_agent(*(state.node for state in stochastic_agent.states(random)[1:-1]))
    assert advisor.wait_until_learned()
    hits = []
    for _ in range(30):
        run = stochastic_agent.states(random)
        for number in range(len(run) - 1):
            history = [state.node for state in run[1 : number + 1]]
            hits.append(advisor.transitions.predict("coder", history)[0][0] == run[number + 1].node)
    assert sum(hits) / len(hits) >= 0.87


# ---- graphs


def test_a_wrong_graph_is_corrected_and_reported_again(online: FakeServer, advisor: Advisor):
    for _ in range(40):
        run_agent("a", "b", aeg=ROUTER)
        assert advisor.wait_until_learned()
    told = reports(online)
    assert len(told) == 40
    assert told[0].graph == ROUTER.wire()
    spelt_out = [event for event in told if event.graph is not None]
    assert 3 <= len(spelt_out) <= 7  # at 1, 2, 4, 8 and 16 runs, and no more where nothing moves
    last = {(edge.source, edge.target): edge.probability for edge in spelt_out[-1].graph.edges}
    assert last["a", "b"] is not None
    assert last["a", "b"] > 0.95
    assert ("a", END) not in last
    for event in told:  # each hash was spelt out before it was only named
        assert event.graph_hash in {each.graph_hash for each in spelt_out}


def test_a_program_keeps_the_graph_that_was_declared(advisor: Advisor):
    for _ in range(3):
        run_agent("a", "b", aeg=ROUTER)
        assert advisor.wait_until_learned()
    with sojourn.program(agent_type="coder", aeg=ROUTER) as program:
        assert program.aeg is ROUTER
        assert advisor.graph(program) != ROUTER


def test_a_graph_that_becomes_known_late_is_corrected_as_well(online: FakeServer, advisor: Advisor):
    for _ in range(5):
        with sojourn.program(agent_type="coder") as program:
            program.set_graph(ROUTER)
            for node in ("a", "b"):
                program.enter_node(node)
                turn()
        assert advisor.wait_until_learned()
    told = reports(online)
    assert told[0].graph == ROUTER.wire()
    assert told[-1].graph_hash != ROUTER.hash


def test_without_a_declared_graph_the_observed_one_is_reported_after_five_runs(
    online: FakeServer, advisor: Advisor
):
    for _ in range(6):
        run_agent("a", "b")
        assert advisor.wait_until_learned()
    (told,) = reports(online)
    assert told.graph is not None
    assert not told.graph.complete
    assert [(edge.source, edge.target) for edge in told.graph.edges] == [
        (START, "a"), ("a", "b"), ("b", END)
    ]  # fmt: skip


def test_random_nodes_cannot_flood_the_server_with_graphs(online: FakeServer, advisor: Advisor):
    for number in range(60):
        run_agent(*(f"lie-{number}-{turn_}" for turn_ in range(5)), aeg=ROUTER)
        assert advisor.wait_until_learned()
    spelt_out = [event for event in reports(online) if event.graph is not None]
    assert len(spelt_out) <= 1 + 5 + 60 // 4
    assert all(len(event.graph.nodes) <= 2 + 256 for event in spelt_out)


def test_a_graph_too_large_to_send_is_not_rebuilt_each_second(advisor: Advisor):
    nodes = [f"{number} ".ljust(250, "x") for number in range(250)]
    for _ in range(16):
        run_agent(*nodes)
        assert advisor.wait_until_learned()
    assert 1 <= advisor._counters["graph_too_large"] <= 5  # after 5, 8 and 16 runs at most, or for a new edge


def test_two_graphs_of_one_kind_are_corrected_each_for_itself(advisor: Advisor):
    other = Aeg(["a", "b"], [(START, "a"), ("a", "b"), ("b", "a"), ("b", END)])
    for _ in range(8):
        run_agent("a", "b", aeg=ROUTER)
        run_agent("a", "b", aeg=other)
        assert advisor.wait_until_learned()
    with sojourn.program(agent_type="coder", aeg=other) as program:
        assert advisor.graph(program).complete
    with sojourn.program(agent_type="coder", aeg=ROUTER) as program:
        assert not advisor.graph(program).complete


# ---- the file


def test_the_next_process_knows_from_its_first_call(path: Path):
    with FakeServer() as server:
        sojourn.init(server.url, history=path)
        with sojourn.program("p"):
            run_tools(6, tool_class="pytest")
        for _ in range(6):
            run_agent("plan", "act")
        sojourn.shutdown()
        server.forget()
        sojourn.init(server.url, history=str(path))
        advisor = runtime.session().advisor
        assert advisor is not None
        assert advisor.wait_until_learned()
        with sojourn.program("p"):
            run_tools(1, tool_class="pytest")
        assert run_agent("plan", "act") == [1.0, 0.0]
        assert starts(server)[0].expected_s is not None


def test_a_graph_declared_for_a_kind_known_from_the_file_is_corrected_at_once(path: Path):
    HistoryStore(path, Counters()).save([], [("coder", ProgramRun(path=(("a",), ("b",))))] * 10)
    with FakeServer() as server:
        sojourn.init(server.url, history=path)
        advisor = runtime.session().advisor
        assert advisor is not None
        assert advisor.wait_until_learned()
        with sojourn.program(agent_type="coder", aeg=ROUTER) as program:
            assert advisor.wait_until_learned()
            corrected = advisor.graph(program)
        assert corrected is not None
        assert corrected.edges["a", "b"] > 0.9


def test_nothing_but_names_and_numbers_is_written(path: Path):
    with FakeServer() as server:
        sojourn.init(server.url, history=path)
        with sojourn.program("p", id="secret-id", tenant="secret-tenant") as program:
            program.enter_node("plan")
            turn()

            @sojourn.tool
            def search(query: str) -> str:
                return query + "secret-output"

            search("secret-argument")
        sojourn.shutdown()
    dump = path.read_bytes()
    assert b"search" in dump
    assert b"plan" in dump
    assert b"secret" not in dump


ONE_TOOL_CALL = """
import sojourn
from sojourn.testing import FakeServer
with FakeServer() as server:
    sojourn.init(server.url)
    with sojourn.program("p"), sojourn.tool_call("t"):
        pass
"""


def test_without_a_file_nothing_is_written_anywhere(python: Callable, tmp_path: Path):
    python(ONE_TOOL_CALL, env={"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")})
    assert not list(tmp_path.iterdir())


def test_the_platforms_usual_place_is_the_default(python: Callable, tmp_path: Path):
    python(ONE_TOOL_CALL, env={"XDG_DATA_HOME": str(tmp_path), "SOJOURN_HISTORY": ""})
    recorded = HistoryStore(tmp_path / "sojourn" / "history.sqlite3", Counters()).load()
    assert recorded is not None
    assert [row.tool for row in recorded.durations] == ["t"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
def test_a_forked_worker_saves_what_it_saw_and_nothing_twice(python: Callable, path: Path, way: str):
    python(
        f"""
        import multiprocessing, os, sys, sojourn
        from sojourn.testing import FakeServer

        def work(tool):
            with sojourn.program("p"), sojourn.tool_call(tool):
                pass

        with FakeServer() as server:
            sojourn.init(server.url, history={str(path)!r})
            work("before")
            if {way!r} == "os.fork":
                pid = os.fork()
                if pid == 0:
                    work("child")
                    sojourn.runtime.session().close()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            else:
                worker = multiprocessing.get_context("fork").Process(target=work, args=("child",))
                worker.start()
                worker.join()
                assert worker.exitcode == 0
            work("after")
        """
    )
    recorded = HistoryStore(path, Counters()).load()
    assert recorded is not None
    assert sorted(row.tool for row in recorded.durations) == ["after", "before", "child"]
    assert len(recorded.runs) == 0  # neither turns nor nodes


def test_a_locked_file_does_not_hold_up_the_end(path: Path):
    HistoryStore(path, Counters()).save([DurationSample("t", None, 1.0, "ok")], [])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with FakeServer() as server:
        sojourn.init(server.url, history=path)
        with sojourn.program("p"):
            run_tools(3)
        started_s = time.monotonic()
        sojourn.shutdown()
        assert time.monotonic() - started_s < 2
    other.close()


def test_a_file_that_cannot_be_used_costs_an_agent_nothing(path: Path, caplog):
    path.mkdir()
    with FakeServer() as server:
        sojourn.init(server.url, history=path)
        advisor = runtime.session().advisor
        assert advisor is not None
        with sojourn.program("p"):
            run_tools(5)
            assert advisor.wait_until_learned()
            run_tools(1)
        assert starts(server)[-1].expected_s is not None  # learned in memory
        session = runtime.session()
        sojourn.shutdown()
        assert session.counters["history_error"] == 1
    assert len(caplog.records) == 1


def test_saving_waits_for_company(path: Path):
    now = [0.0]
    counters = Counters()
    advisor = Advisor(counters, HistoryStore(path, counters), clock=lambda: now[0])
    call = sojourn.ToolCall("t")
    advisor.tool_over(call, 1.0, "ok")
    assert advisor.wait_until_learned()
    assert not path.exists()
    now[0] = 6.0
    advisor.tool_over(call, 2.0, "ok")
    assert advisor.wait_until_learned()
    advisor.close(5)
    recorded = HistoryStore(path, counters).load()
    assert recorded is not None
    assert [row.duration_s for row in recorded.durations] == [1.0, 2.0]


def test_rows_wait_for_a_locked_file_and_are_bounded(path: Path, monkeypatch):
    monkeypatch.setattr("sojourn.learning.history_store.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("sojourn.learning.advisor.MAX_UNSAVED", 3)
    counters = Counters()
    HistoryStore(path, counters).save([DurationSample("t", None, 0.0, "ok")], [])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    advisor = Advisor(counters, HistoryStore(path, counters), save_every_s=0.0)
    for number in range(1, 11):
        advisor.tool_over(sojourn.ToolCall("t"), float(number), "ok")
    assert advisor.wait_until_learned()
    wait_until(lambda: counters["history_dropped"])
    other.execute("ROLLBACK")
    other.close()
    advisor.close(5)
    assert counters["history_dropped"] == 7
    recorded = HistoryStore(path, counters).load()
    assert recorded is not None
    assert [row.duration_s for row in recorded.durations] == [0.0, 8.0, 9.0, 10.0]
    assert ("t", None) in advisor.estimates


def test_an_advisor_that_closes_stops_reading_and_saves_what_it_saw(path: Path, monkeypatch):
    """Else a process that is shorter than the reading ends late and saves nothing."""
    counters, learned = Counters(), []
    HistoryStore(path, counters).save([], [("k", ProgramRun(path=(("a",),)))] * 50)
    advisor = Advisor(counters, HistoryStore(path, counters))

    def learn(self: Transitions, kind: str, run: ProgramRun) -> None:
        learned.append(kind)
        if len(learned) == 3:
            advisor.begin_shutdown()

    monkeypatch.setattr(Transitions, "learn", learn)
    advisor.tool_over(sojourn.ToolCall("t"), 1.0, "ok")
    wait_until(lambda: advisor._closed)
    advisor.close(60)
    assert learned == ["k"] * 3
    recorded = HistoryStore(path, counters).load()
    assert recorded is not None
    assert [row.tool for row in recorded.durations] == ["t"]
    assert len(recorded.runs) == 50


def test_an_advisor_that_closes_saves_without_reading(path: Path, monkeypatch):
    counters, reads = Counters(), []
    history = HistoryStore(path, counters)
    monkeypatch.setattr(history, "load", lambda stopped: reads.append(stopped()))  # as for a locked file
    advisor = Advisor(counters, history, save_every_s=3600.0)
    advisor.tool_over(sojourn.ToolCall("t"), 1.0, "ok")
    assert advisor.wait_until_learned()
    advisor.close(60)
    assert reads == [False]
    recorded = HistoryStore(path, counters).load()
    assert recorded is not None
    assert [row.tool for row in recorded.durations] == ["t"]


# ---- bounds, threads, failures


def test_what_is_heard_and_not_yet_learned_is_bounded(monkeypatch):
    counters = Counters()
    advisor = Advisor(counters)
    monkeypatch.setattr(advisor, "start", lambda: None)
    call = sojourn.ToolCall("t")
    for _ in range(MAX_FACTS + 10):
        advisor.tool_over(call, 1.0, "ok")
    assert counters["history_dropped"] == 10
    assert len(advisor._facts) == MAX_FACTS


def test_a_program_of_which_something_was_missed_teaches_nothing(advisor: Advisor, monkeypatch):
    with sojourn.program(agent_type="coder") as program:
        program.enter_node("a")
        monkeypatch.setattr("sojourn.learning.advisor.MAX_FACTS", 0)
        program.enter_node("b")
        monkeypatch.undo()
        program.enter_node("c")
    assert advisor.wait_until_learned()
    assert advisor.transitions.edges("coder") == {}
    assert sojourn.stats()["history_dropped"] == 1


def test_a_process_that_has_no_more_threads_goes_on_without(monkeypatch):
    counters = Counters()
    advisor = Advisor(counters)

    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    for _ in range(3):
        advisor.tool_over(sojourn.ToolCall("t"), 1.0, "ok")
    assert counters["thread_start_failed"] == 1
    assert len(advisor._facts) == 1
    advisor.close(1)


def test_a_fault_in_learning_is_counted_and_the_rest_is_learned(monkeypatch):
    counters = Counters()
    advisor = Advisor(counters)
    learn = advisor.durations.add
    monkeypatch.setattr(advisor.durations, "add", lambda *args: 1 / 0 if args[2] == 3.0 else learn(*args))
    for number in range(6):
        advisor.tool_over(sojourn.ToolCall("t"), float(number), "ok")
    assert advisor.wait_until_learned()
    assert counters["internal_error"] == 1
    assert ("t", None) in advisor.estimates
    advisor.close(5)


def test_a_row_that_cannot_be_learned_from_costs_that_row(path: Path, monkeypatch):
    """Whatever the file holds, the thread goes on: without it, what is heard would pile up."""
    counters = Counters()
    assert HistoryStore(path, counters).save(
        [], [(kind, ProgramRun((("a",),), ("a",), 1)) for kind in ("bad", "good")]
    )
    learn = Transitions.learn

    def picky(self: Transitions, kind: str, run: ProgramRun) -> None:
        if kind == "bad":
            raise OverflowError
        learn(self, kind, run)

    monkeypatch.setattr(Transitions, "learn", picky)
    advisor = Advisor(counters, HistoryStore(path, counters))
    assert advisor.wait_until_learned(5)
    assert (advisor.transitions.runs("bad"), advisor.transitions.runs("good")) == (0, 1)
    assert counters["internal_error"] == 1
    advisor.close(1)


def test_a_session_that_is_over_hears_no_more(online: FakeServer, advisor: Advisor):
    sojourn.shutdown()
    with sojourn.program("p"):
        run_tools(3)
    assert not advisor.wait_until_learned(0.05)
    assert sojourn.runtime.session().advisor is None
    assert [thread.name for thread in threading.enumerate() if thread.name == "sojourn-history"] == []


def test_programs_ended_by_a_garbage_collection_inside_the_queue_cause_no_deadlock(advisor: Advisor):
    def broken_off() -> Iterator[int]:
        with sojourn.program("abandoned"):
            yield 1

    def run_agents() -> None:
        for _ in range(300):
            generator = broken_off()
            next(generator)
            cycle = [generator]
            cycle.append(cycle)
            del generator, cycle
            run_agent("a", "b")

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        # Generators that are collected in another order than they began leave an ended program behind as
        # the current one. In a context of its own, the next test does not see it.
        contextvars.copy_context().run(run_agents)
    finally:
        gc.set_threshold(*threshold)
    assert advisor.wait_until_learned()
    assert advisor.transitions.runs("coder") == 300


def test_a_hundred_thousand_nodes_of_one_program_are_forgotten(advisor: Advisor):
    with sojourn.program(agent_type="liar") as program:
        for number in range(100_000):
            program.enter_node(f"node number {number}")
            if number % 10_000 == 0:
                assert advisor.wait_until_learned(60)
    assert advisor.wait_until_learned(60)
    assert len(advisor.transitions.edges("liar")) <= MAX_ENTRIES
    assert not advisor._unsaved_runs
    tracemalloc.start()
    try:
        with sojourn.program(agent_type="liar") as program:
            for number in range(15_000):
                program.enter_node(f"node number {-number}")
        assert advisor.wait_until_learned(60)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_turn_costs_an_agent_little(online: FakeServer, advisor: Advisor):
    """Measured 2.5 µs, and 7 µs with what is sent in addition; asked for are 15. A busy machine is no
    finding, so the bound here is what a lock, a file or a computation on this path would break."""
    listener = advisor
    program = sojourn.program(agent_type="coder").make().start()
    call = sojourn.ToolCall("bash", program=program)
    request = LogicalRequest(runtime.session().counters, program, node="a")
    run_trace = program.run_trace
    assert run_trace is not None
    remove_listener(listener)
    best_s = float("inf")
    for _ in range(20):
        started_s = time.perf_counter()
        for _ in range(100):
            listener.node_entered(program, "a")
            listener.request_begins(request)
            listener.turns_left(program, "a")
            listener.request_over(run_trace, "a")
            listener.tool_begins(run_trace, "bash")
            listener.estimates.get(("bash", None))
            listener.tool_over(call, 1.0, "ok")
        best_s = min(best_s, (time.perf_counter() - started_s) / 100)
    add_listener(listener)
    program.end()
    assert best_s < 100e-6


def test_learning_loads_no_database_where_none_is_kept(python: Callable):
    result = python(
        """
        import sys, sojourn
        from sojourn.testing import FakeServer
        with FakeServer() as server:
            sojourn.init(server.url)
            with sojourn.program("p"):
                pass
            sojourn.shutdown()
        print("sqlite3" in sys.modules)
        """
    )
    assert result.stdout.strip() == "False"
