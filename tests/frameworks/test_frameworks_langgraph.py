"""LangGraph: its graphs, threads, interrupts and breakpoints, sub-graphs and streams broken off."""

from __future__ import annotations

import asyncio
import gc
import operator
import sys
import time
from typing import Annotated, Any, Literal, TypedDict

import pytest
import sojourn
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command, Send, interrupt
from recorded_programs import problems, recorded_programs
from scenarios_langchain import ASK, ToolBroke, model_at, said, tools, use
from scenarios_langgraph import HI, SCRIPT, State, async_speaker, planner, speaker, tool_graph
from sojourn.listeners import ProgramListener, add_listener, remove_listener
from sojourn.testing import FakeServer
from sojourn.valid_ids_and_names import process_name
from sojourn.wire_events import AegReport, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_integrations import langchain, langgraph
from sojourn_integrations.langchain import (
    callback_handler,
    interrupted_programs,
    run_tree,
    thread_program_ids,
)
from sojourn_integrations.langchain.run_names import node_path
from sojourn_integrations.langchain.thread_program_ids import thread_program_id
from sojourn_integrations.langgraph import graph_reader, graph_runs


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Every test ends with an empty tree."""
    yield
    sojourn.shutdown()
    assert len(callback_handler.tree) == 0


def init(server: FakeServer, *script: object) -> None:
    server.script = list(script)
    sojourn.init(server.url, probe_timeout_s=5)


def recorded(server: FakeServer, *allowed: str):
    """What arrived, checked for all that must hold but for sentences with one of ``allowed`` in them."""
    assert sojourn.flush(60)
    assert sojourn.stats()["internal_error"] == 0
    assert sojourn.stats()["resolver_error"] == 0
    programs = recorded_programs(server)
    found = [each for each in problems(server, programs, []) if not any(text in each for text in allowed)]
    assert found == []
    return programs


def thread(id: str = "1") -> dict[str, Any]:
    return {"configurable": {"thread_id": id}}


def ids(server: FakeServer) -> list[str]:
    """Program of each request."""
    return [request.context.program_id for request in server.requests]


def nodes(server: FakeServer) -> list[str | None]:
    return [request.context.sojourn.node for request in server.requests]


# ---- graphs


class Plain(TypedDict):
    """A state."""

    x: int


def step(state: Plain) -> dict[str, int]:
    return {"x": 1}


def untyped(state: Plain):
    return "b"


def typed(state: Plain) -> Literal["b", "c"]:
    return "b"


def builder(*names: str) -> StateGraph:
    graph = StateGraph(Plain)
    for name in names:
        graph.add_node(name, step)
    graph.add_edge(START, names[0])
    return graph


def aeg(graph: Any) -> tuple[dict[str, tuple[str, ...]], set[tuple[str, str]], bool]:
    found = langgraph.graph_of(graph)
    assert found is not None
    return dict(found.nodes), set(found.edges), found.complete


def test_a_typed_router_is_exact() -> None:
    graph = builder("a", "b", "c")
    graph.add_conditional_edges("a", typed)
    graph.add_edge("b", "a")
    graph.add_edge("c", END)
    edges = {(START, "a"), ("a", "b"), ("a", "c"), ("b", "a"), ("c", END)}
    assert aeg(graph.compile()) == ({"a": (), "b": (), "c": ()}, edges, True)


def test_a_router_with_a_map_is_exact() -> None:
    graph = builder("a", "b")
    graph.add_conditional_edges("a", untyped, {"go": "b", "stop": END})
    graph.add_edge("b", END)
    assert aeg(graph.compile())[1:] == ({(START, "a"), ("a", "b"), ("a", END), ("b", END)}, True)


def test_an_untyped_router_is_incomplete_and_its_guessed_edge_is_gone() -> None:
    graph = builder("a", "b", "c")
    graph.add_conditional_edges("a", untyped)
    graph.add_edge("b", END)
    graph.add_edge("c", END)
    assert aeg(graph.compile()) == (
        {"a": (), "b": (), "c": ()},
        {(START, "a"), ("b", END), ("c", END)},
        False,
    )


def test_an_untyped_router_is_incomplete_though_all_nodes_can_be_reached() -> None:
    graph = builder("a", "b")
    graph.add_edge(START, "b")
    graph.add_conditional_edges("a", untyped)
    graph.add_edge("b", END)
    found = langgraph.graph_of(graph.compile())
    assert not found.unreachable() - {"b"}
    assert not found.complete
    assert ("a", END) not in found.edges


def test_a_declared_edge_to_the_end_stays_beside_an_untyped_router() -> None:
    graph = builder("a", "b")
    graph.add_conditional_edges("a", untyped)
    graph.add_edge("a", END)
    graph.add_edge("b", END)
    assert ("a", END) in aeg(graph.compile())[1]


def test_commands_typed_and_not() -> None:
    def exact(state: Plain) -> Command[Literal["b"]]:
        return Command(goto="b")

    def vague(state: Plain):
        return Command(goto="b")

    for node, complete in ((exact, True), (vague, False)):
        graph = StateGraph(Plain)
        graph.add_node("a", node)
        graph.add_node("b", step)
        graph.add_edge(START, "a")
        graph.add_edge("b", END)
        _, edges, whole = aeg(graph.compile())
        assert whole is complete
        assert (("a", "b") in edges) is complete


def test_sub_graphs_are_opened_up_and_as_vague_as_their_parts() -> None:
    inner = builder("a", "b")
    inner.add_conditional_edges("a", untyped)
    inner.add_edge("b", END)
    graph = StateGraph(Plain)
    graph.add_node("sub", inner.compile())
    graph.add_node("z", step)
    graph.add_edge(START, "sub")
    graph.add_edge("sub", "z")
    graph.add_edge("z", END)
    found, edges, complete = aeg(graph.compile())
    assert set(found) == {"sub:a", "sub:b", "z"}
    assert not complete
    assert {(START, "sub:a"), ("sub:b", "z"), ("z", END)} <= edges


def test_the_tools_of_a_node() -> None:
    made = create_agent(model_at("http://127.0.0.1:1/v1", "m"), tools())
    assert aeg(made) == (
        {"model": (), "tools": ("broken", "count", "upper")},
        {(START, "model"), ("model", "tools"), ("model", END), ("tools", "model")},
        True,
    )


def test_what_was_declared_is_what_langgraph_draws_where_that_is_exact() -> None:
    inner = builder("a", "b", "c")
    inner.add_conditional_edges("a", typed)
    inner.add_edge("b", "c")
    inner.add_edge("c", END)
    graph = builder("x", "y")
    graph.add_node("sub", inner.compile())
    graph.add_edge("x", "sub")
    graph.add_edge(["x", "sub"], "y")
    graph.add_edge("y", END)
    compiled = graph.compile()
    drawing = compiled.get_graph(xray=True)
    found, edges, complete = aeg(compiled)
    assert complete
    assert {START, END, *found} == set(drawing.nodes)
    assert edges == {(edge.source, edge.target) for edge in drawing.edges}


def test_a_sub_graph_that_begins_in_a_loop_has_no_marks_in_it() -> None:
    inner = builder("a", "b")
    inner.add_conditional_edges("a", untyped, {"on": "b", "out": END})
    inner.add_edge("b", "a")
    graph = builder("x")
    graph.add_node("sub", inner.compile())
    graph.add_edge("x", "sub")
    graph.add_edge("sub", "x")
    found, edges, complete = aeg(graph.compile())
    assert (set(found), complete) == ({"x", "sub:a", "sub:b"}, True)
    assert edges == {(START, "x"), ("x", "sub:a"), ("sub:a", "sub:b"), ("sub:b", "sub:a"), ("sub:a", "x")}


def test_the_functional_api_declares_nothing() -> None:
    @entrypoint()
    def work(x: int) -> int:
        return x

    assert not langgraph.graph_of(work).complete


def test_a_graph_that_cannot_be_drawn(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    init(server, *SCRIPT)

    def broken(*args: object, **kwargs: object) -> None:
        raise ToolBroke

    monkeypatch.setattr(graph_reader, "_read", broken)
    planner(speaker(model_at(server.base_url, "m"))).invoke(HI)
    (program,) = recorded(server).values()
    assert program.nodes == ("plan", "work", "plan")
    assert not [event for event in server.program_events() if isinstance(event, AegReport)]


def test_a_graph_is_drawn_once_and_forgotten_with_its_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = graph_reader._read

    def counting(graph: Any) -> Any:
        read.append(1)
        return original(graph)

    monkeypatch.setattr(graph_reader, "_read", counting)
    graph = builder("a").compile()
    gc.collect()
    before = len(graph_reader._graphs)
    first = langgraph.graph_of(graph)
    assert langgraph.graph_of(graph.with_config(tags=["copy"])) is first
    assert len(read) == 1
    del graph
    gc.collect()
    assert len(graph_reader._graphs) <= before


def test_the_graph_is_reported_with_the_program(server: FakeServer) -> None:
    init(server, *SCRIPT * 2)
    graph = planner(speaker(model_at(server.base_url, "m")))
    graph.invoke(HI)
    own = sojourn.Aeg(["mine"])
    with sojourn.program("explicit"):
        graph.invoke(HI)
    with sojourn.program("with its own", aeg=own):
        pass
    recorded(server)
    reports = [event for event in server.program_events() if isinstance(event, AegReport)]
    expected = langgraph.graph_of(graph)
    assert [each.graph_hash for each in reports] == [expected.hash, expected.hash, own.hash]
    assert [each.graph is not None for each in reports] == [True, False, True]
    assert reports[0].agent_type == "planner"


def test_the_users_own_graph_stays(server: FakeServer) -> None:
    init(server, *SCRIPT)
    own = sojourn.Aeg(["plan", "work"])
    with sojourn.program("mine", aeg=own) as mine:
        planner(speaker(model_at(server.base_url, "m"))).invoke(HI)
        assert mine.aeg is own
    recorded(server)


# ---- nodes


class Nodes(ProgramListener):
    """Remembers what a listener is told."""

    def __init__(self) -> None:
        self.facts: list[str] = []

    def node_entered(self, program: Any, node: str) -> None:
        self.facts.append(f"enter {node}")

    def request_started(self, request: Any) -> None:
        self.facts.append(f"ask at {request.node}")

    def tool_started(self, call: Any) -> None:
        self.facts.append(f"tool {call.tool}")


def listened(play: Any) -> list[str]:
    listener = Nodes()
    add_listener(listener)
    try:
        play()
    finally:
        remove_listener(listener)
    return listener.facts


def test_nodes_are_reported_in_order_with_requests_and_tools(server: FakeServer) -> None:
    init(server, use("upper"), "done")
    graph = tool_graph(server.base_url, "m")
    assert listened(lambda: graph.invoke(ASK)) == [
        "enter think", "ask at think", "enter tools", "tool upper", "enter think", "ask at think",
    ]  # fmt: skip
    recorded(server)


def test_a_sub_graph_is_no_step_of_its_own(server: FakeServer) -> None:
    init(server, "DONE", "DONE")
    speak = speaker(model_at(server.base_url, "m"))
    inner = planner(speak)
    graph = StateGraph(State)
    graph.add_node("team", inner)
    graph.add_node("second", lambda state: inner.invoke(state))
    graph.add_edge(START, "team")
    graph.add_edge("team", "second")
    graph.add_edge("second", END)
    compiled = graph.compile()
    facts = listened(lambda: compiled.invoke(HI))
    assert facts[:2] == ["enter team:plan", "ask at team:plan"]
    assert facts[-2:] == ["enter second:plan", "ask at second:plan"]
    recorded(server)


def test_parallel_branches_of_sub_graphs(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "DONE"
    inner = planner(speaker(model_at(server.base_url, "m")))
    graph = StateGraph(State)
    graph.add_node("part", inner)
    graph.add_conditional_edges(START, lambda state: [Send("part", HI) for _ in range(6)], ["part"])
    graph.add_edge("part", END)
    graph.compile(name="fan").invoke(HI)
    (program,) = recorded(server).values()
    assert program.nodes == ("part:plan",) * 6


def test_the_functional_api(server: FakeServer) -> None:
    init(server, "one", "two")
    llm = model_at(server.base_url, "m")

    @task
    def ask(x: str) -> str:
        return str(llm.invoke(x).content)

    @entrypoint()
    def work(x: str) -> str:
        return ask(x).result() + ask(x).result()

    assert work.invoke("hi") == "onetwo"
    (program,) = recorded(server).values()
    assert program.start.name in ("work", process_name(), "LangGraph")
    assert len(program.nodes) == 2
    assert len(set(program.nodes)) == 1


def test_agents_without_a_name_are_told_apart_by_their_script(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server learns sizes and tools per agent type, and LangGraph names all of them alike."""
    monkeypatch.setattr(sys, "argv", ["agents/support.py"])
    init(server, "one", "two", "three")
    model = model_at(server.base_url, "m")
    create_agent(model, []).invoke(ASK)
    create_agent(model, [], name="reviewer").invoke(ASK)
    create_agent(model, []).invoke(ASK, {"run_name": "ticket 7"})
    starts = [program.start for program in recorded(server).values()]
    assert [(start.name, start.agent_type) for start in starts] == [
        ("support.py", "support.py"),
        ("reviewer", "reviewer"),
        ("ticket 7", "support.py"),
    ]


def test_node_paths() -> None:
    assert node_path("sub:u1|model:u2") == "sub:model"
    assert node_path("tools:u1|model:u2", "tools:u1") == "model"
    assert node_path("fn:u1|1|model:u2") == "fn:model"
    assert node_path("tools:u9|model:u2", "tools:u1") == "tools:model"
    assert node_path("") is None
    assert len(node_path("x" * 9000 + ":u").encode()) <= 1024


# ---- interrupts and threads


def asks(llm: Any) -> Any:
    speak = speaker(llm)

    def node(state: State) -> dict[str, Any]:
        if len(state["said"]) == 2:
            return {"said": [interrupt("may I?")]}
        return speak(state)

    return node


def test_a_run_that_waits_goes_on_as_the_same_program(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    graph.invoke(HI, thread())
    assert sojourn.flush(60)
    events = [type(event).__name__ for event in server.program_events()]
    assert events == ["ProgramStart", "AegReport", "ToolStart"]
    assert not sojourn.runtime.session().heartbeats._open  # a person may take days
    time.sleep(0.02)
    graph.invoke(Command(resume="yes"), thread())
    ((id, program),) = recorded(server).items()
    assert program.nodes == ("plan", "plan")
    (stop,) = program.tool_stops
    assert (program.tool_starts[0].tool, program.tool_starts[0].tool_class) == ("human", "human")
    assert stop.duration_s >= 0.02
    assert program.status == "ok"
    assert set(ids(server)) == {id}
    assert len(callback_handler.tree.waiting) == 0


def test_async_and_streamed_runs_wait_too(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())

    async def run() -> None:
        first = [chunk async for chunk in graph.astream(HI, thread())]
        assert "__interrupt__" in first[-1]
        await graph.ainvoke(Command(resume="yes"), thread())

    asyncio.run(run())
    (program,) = recorded(server).values()
    assert program.nodes == ("plan", "plan")


@pytest.mark.parametrize("when", ["interrupt_before", "interrupt_after"])
@pytest.mark.parametrize("compiled", [True, False])
def test_breakpoints(server: FakeServer, when: str, compiled: bool) -> None:
    init(server, *SCRIPT)
    where = {when: ["work"]}
    node = speaker(model_at(server.base_url, "m"))
    graph = planner(node, checkpointer=InMemorySaver(), **(where if compiled else {}))
    graph.invoke(HI, thread(), **({} if compiled else where))
    assert len(callback_handler.tree.waiting) == 1
    graph.invoke(None, thread())
    (program,) = recorded(server).values()
    assert program.nodes == ("plan", "work", "plan")
    assert [fact.tool for fact in program.tools] == ["human"]


def test_a_new_question_ends_the_wait_as_well(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    graph.invoke(HI, thread())
    graph.invoke({"said": ["forget it"]}, thread())
    (program,) = recorded(server).values()
    assert program.status == "ok"
    assert len(program.tool_stops) == 1


def test_an_interrupt_in_a_tool_stops_the_call_until_it_runs_again(server: FakeServer) -> None:
    init(server, use("approve", "call-5"), "done")

    @tool
    def approve(text: str) -> str:
        """Asks a person."""
        return str(interrupt("may I?"))

    made = create_agent(model_at(server.base_url, "m"), [approve], name="agent", checkpointer=InMemorySaver())
    made.invoke(ASK, thread())
    result = made.invoke(Command(resume="yes"), thread())
    assert said(result)[-2:] == [("tool", "yes"), ("ai", "done")]
    (program,) = recorded(server, "call-5 started 2").values()
    calls = [(start.tool, start.call_id) for start in program.tool_starts]
    assert [tool for tool, _ in calls] == ["approve", "human", "approve"]
    assert calls[0] == calls[2] == ("approve", "call-5")
    assert [stop.status for stop in program.tool_stops] == ["cancelled", "ok", "ok"]


def test_a_graph_in_a_tool_waits_with_the_one_around_it(server: FakeServer) -> None:
    init(server, use("delegate"), "go on", "DONE", "done")
    inner = planner(asks(model_at(server.base_url, "m")))

    @tool
    def delegate(text: str) -> str:
        """Somebody else does it."""
        return str(inner.invoke(HI)["said"][-1])

    outer = create_agent(
        model_at(server.base_url, "m"), [delegate], name="outer", checkpointer=InMemorySaver()
    )
    outer.invoke(ASK, thread())
    result = outer.invoke(Command(resume="yes"), thread())
    assert said(result)[-1] == ("ai", "done")
    programs = recorded(server, "started 2 and stopped 2")
    assert {each.start.name: each.nodes for each in programs.values()} == {
        "outer": ("model", "model"),
        "planner": ("plan", "plan"),
    }


def test_a_thread_bears_one_id_over_many_runs(server: FakeServer) -> None:
    init(server, "DONE", "DONE", "DONE")
    graph = planner(speaker(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    for id in ("1", "1", "2"):
        graph.invoke(HI, thread(id))
    recorded(server, "2 times", "a second start", "after its end")
    first, again, other = ids(server)
    assert first == again != other
    assert sum(isinstance(event, ProgramEnd) for event in server.program_events()) == 3


def test_without_checkpointer_a_thread_id_means_nothing(server: FakeServer) -> None:
    init(server, "DONE", "DONE")
    graph = planner(speaker(model_at(server.base_url, "m")))
    graph.invoke(HI, thread())
    graph.invoke(HI, thread())
    assert len(set(ids(server))) == 2
    recorded(server)


def test_two_users_of_one_thread_id_never_meet(server: FakeServer) -> None:
    init(server, "DONE", "DONE")
    node = speaker(model_at(server.base_url, "m"))
    for _ in range(2):
        planner(node, checkpointer=InMemorySaver()).invoke(HI, thread())
    assert len(set(ids(server))) == 2


def test_a_named_process_finds_its_threads_again(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    node = speaker(model_at(server.base_url, "m"))

    def once(name: str) -> str:
        monkeypatch.setenv("SOJOURN_PROGRAM_ID", name)
        init(server, "DONE")
        planner(node, checkpointer=InMemorySaver()).invoke(HI, thread())
        sojourn.shutdown()
        return ids(server)[-1]

    assert once("service-a") == once("service-a") != once("service-b")


def test_a_forked_copy_of_a_checkpointer_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = InMemorySaver()
    here = thread_program_id("g", saver, "1", "")
    assert thread_program_id("g", saver, "1", "") == here
    assert (
        len({here, *(thread_program_id(*key) for key in (("h", saver, "1", ""), ("g", saver, "1", "n")))})
        == 3
    )
    other = thread_program_id("g", 5, "1", "")  # takes no weak reference
    assert other == thread_program_id("g", 5, "1", "") != here
    monkeypatch.setattr(thread_program_ids.os, "getpid", lambda: -1)
    assert thread_program_id("g", saver, "1", "") != here
    assert thread_program_id("g", 5, "1", "") != other
    assert thread_program_id("\ud800", saver, "\ud800", "")


def test_a_handler_alone_knows_threads_by_their_metadata(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    sojourn.uninstrument("langchain", "langgraph")
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    graph = graph.with_config({"callbacks": [langchain.Handler()]})
    graph.invoke(HI, thread())
    graph.invoke(Command(resume="yes"), thread())
    (program,) = recorded(server).values()
    assert (program.nodes, program.status) == (("plan", "plan"), "ok")
    assert [fact.tool for fact in program.tools] == ["human"]


def test_a_checkpointer_given_with_the_run(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asks(model_at(server.base_url, "m")))
    config = {"configurable": {"thread_id": "1", "__pregel_checkpointer": InMemorySaver()}}
    graph.invoke(HI, config)
    graph.invoke(Command(resume="yes"), config)
    (program,) = recorded(server).values()
    assert (program.nodes, program.status) == (("plan", "plan"), "ok")


def test_two_runs_of_a_thread_at_once_are_two_programs(server: FakeServer) -> None:
    init(server, "DONE", "DONE")
    server.reply_delay_s = 0.1
    graph = planner(async_speaker(model_at(server.base_url, "m")), checkpointer=InMemorySaver())

    async def run() -> None:
        await asyncio.gather(graph.ainvoke(HI, thread()), graph.ainvoke(HI, thread()))

    asyncio.run(run())
    assert len(set(ids(server))) == 2
    recorded(server)


def test_those_that_wait_are_bounded(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted_programs, "MAX_INTERRUPTED", 3)
    init(server)
    server.script = lambda request: "go on"
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    for number in range(5):
        graph.invoke(HI, thread(str(number)))
    assert len(callback_handler.tree.waiting) == 3
    assert sojourn.flush(60)
    ends = [event for event in server.program_events() if isinstance(event, ProgramEnd)]
    assert [event.status for event in ends] == ["cancelled", "cancelled"]
    stops = [event for event in server.program_events() if isinstance(event, ToolStop)]
    assert [event.status for event in stops] == ["cancelled", "cancelled"]


def test_another_session_begins_the_program_anew(server: FakeServer) -> None:
    init(server, "go on")
    saver = InMemorySaver()
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=saver)
    graph.invoke(HI, thread())
    sojourn.shutdown()
    server.forget()
    init(server, "DONE")
    graph.invoke(Command(resume="yes"), thread())
    (program,) = recorded(server).values()
    assert program.nodes == ("plan",)
    assert isinstance(server.program_events()[0], ProgramStart)


def test_an_interrupt_under_a_program_of_the_users_leaves_it_to_them(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    with sojourn.program("mine"):
        graph.invoke(HI, thread())
        graph.invoke(Command(resume="yes"), thread())
    (program,) = recorded(server).values()
    assert (program.start.name, program.nodes, program.tools) == ("mine", ("plan", "plan"), ())


# ---- batches, wrapping, streams


def test_each_of_a_batch_under_a_program_is_a_child(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "DONE"
    graph = planner(speaker(model_at(server.base_url, "m")))
    with sojourn.program("mine"):
        graph.batch([HI, HI, HI])
    with sojourn.program("async"):
        asyncio.run(planner(async_speaker(model_at(server.base_url, "m"))).abatch([HI, HI]))
    programs = recorded(server)
    mine, other = (id for id, each in programs.items() if each.start.name in ("mine", "async"))
    parents = [each.start.parent_program_id for each in programs.values() if each.start.name == "planner"]
    assert sorted(parents) == sorted([mine] * 3 + [other] * 2)
    assert all(each.nodes == ("plan",) for each in programs.values() if each.start.name == "planner")


def test_a_batch_inside_a_node_makes_children_once(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "DONE"
    inner = planner(speaker(model_at(server.base_url, "m")))
    graph = StateGraph(State)
    graph.add_node("spread", lambda state: {"said": [str(len(inner.batch([HI, HI])))]})
    graph.add_edge(START, "spread")
    graph.add_edge("spread", END)
    graph.compile(name="outer").invoke(HI)
    names = sorted((each.start.name, each.nodes) for each in recorded(server).values())
    assert names == [("outer", ()), ("planner", ("plan",)), ("planner", ("plan",))]


def test_wrap_reports_one_graph_without_patching(server: FakeServer) -> None:
    init(server, *SCRIPT, "DONE", "go on", "DONE")
    sojourn.uninstrument("langchain", "langgraph")
    originals = [vars(Pregel).get(name) for name in ("stream", "astream", "batch", "abatch")]
    plain = planner(speaker(model_at(server.base_url, "m")))
    graph = sojourn.wrap(plain)
    assert type(graph).__name__ == type(plain).__name__
    assert isinstance(graph, type(plain))
    graph.invoke(HI)
    plain.invoke(HI)
    assert [vars(Pregel).get(name) for name in ("stream", "astream", "batch", "abatch")] == originals
    assert server.requests[3].context.sojourn.implicit
    waiting_one = sojourn.wrap(planner(asks(model_at(server.base_url, "m")), checkpointer=InMemorySaver()))
    waiting_one.invoke(HI, thread())
    waiting_one.invoke(Command(resume="yes"), thread())
    assert sojourn.flush(60)
    programs = [each for each in recorded_programs(server).values() if each.start.name == "planner"]
    assert [each.nodes for each in programs] == [("plan", "work", "plan"), ("plan", "plan")]
    assert all(each.status == "ok" for each in programs)
    assert sum(isinstance(event, AegReport) for event in server.program_events()) == 2


def test_wrap_beside_init_reports_everything_once(server: FakeServer) -> None:
    init(server, *SCRIPT)
    sojourn.wrap(planner(speaker(model_at(server.base_url, "m")))).invoke(HI)
    (program,) = recorded(server).values()
    assert program.nodes == ("plan", "work", "plan")


def test_a_broken_off_async_stream_ends_its_program(server: FakeServer) -> None:
    init(server, *SCRIPT)

    async def run() -> None:
        graph = planner(async_speaker(model_at(server.base_url, "m")))
        async for _ in graph.astream(HI):
            break
        await asyncio.sleep(0.05)  # the loop's own hook finalises the generator
        assert len(callback_handler.tree) == 0

    asyncio.run(run())
    (program,) = recorded(server).values()
    assert (program.status, program.nodes) == ("cancelled", ("plan",))


def test_closing_a_stream_ends_its_program(server: FakeServer) -> None:
    init(server, *SCRIPT * 2)
    stream = planner(speaker(model_at(server.base_url, "m"))).stream(HI)
    next(stream)
    stream.close()

    async def run() -> None:
        chunks = planner(async_speaker(model_at(server.base_url, "m"))).astream(HI)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(run())
    assert [each.status for each in recorded(server).values()] == ["cancelled", "cancelled"]


def test_two_streams_taken_in_turn_keep_their_programs(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "go on" if len(server.requests) < 5 else "DONE"
    one, two = (planner(speaker(model_at(server.base_url, "m"))).stream(HI) for _ in range(2))
    for _ in range(2):
        next(one)
        next(two)
    for _ in one:
        pass
    for _ in two:
        pass
    assert [each.status for each in recorded(server).values()] == ["ok", "ok"]
    first, second = dict.fromkeys(ids(server))
    assert ids(server)[:4] == [first, second, first, second]


def test_a_request_between_two_chunks_is_not_the_graphs(server: FakeServer) -> None:
    init(server, *SCRIPT[:1], "mine", *SCRIPT[1:])
    llm = model_at(server.base_url, "m")
    for number, _ in enumerate(planner(speaker(llm)).stream(HI)):
        if number == 0:
            llm.invoke("between")
    contexts = [request.context for request in server.requests]
    assert [each.sojourn.implicit for each in contexts] == [False, True, False, False]


def test_events_of_astream_events(server: FakeServer) -> None:
    init(server, *SCRIPT)

    async def run() -> list[str]:
        graph = planner(async_speaker(model_at(server.base_url, "m")))
        return [event["event"] async for event in graph.astream_events(HI, version="v2")]

    assert "on_chain_end" in asyncio.run(run())
    (program,) = recorded(server).values()
    assert program.nodes == ("plan", "work", "plan")


def test_a_graph_that_never_ends_by_itself(server: FakeServer) -> None:
    from langgraph.errors import GraphRecursionError

    init(server)
    server.script = lambda request: "go on"
    with pytest.raises(GraphRecursionError):
        planner(speaker(model_at(server.base_url, "m"))).invoke(HI, {"recursion_limit": 4})
    (program,) = recorded(server).values()
    assert program.status == "error"


def test_a_step_that_takes_too_long(server: FakeServer) -> None:
    init(server)

    @tool
    async def wait(text: str) -> str:
        """Waits."""
        await asyncio.sleep(60)
        return text

    graph = tool_graph(server.base_url, "m", wait)

    def answer(request: object) -> object:
        # The limit holds from the next step on: a slow machine must not break off the model's step.
        graph.step_timeout = 2
        return use("wait")

    server.script = answer
    with pytest.raises(TimeoutError):
        asyncio.run(graph.ainvoke(ASK))
    (program,) = recorded(server).values()
    assert program.status == "error"
    assert [(fact.tool, fact.status) for fact in program.tools] == [("wait", "cancelled")]


def test_one_tool_fails_beside_two_others(server: FakeServer) -> None:
    init(server, [use("count", "c1"), use("broken", "c2"), use("wait", "c3")])

    @tool
    async def wait(text: str) -> str:
        """Waits."""
        await asyncio.sleep(60)
        return text

    with pytest.raises(ToolBroke):
        asyncio.run(tool_graph(server.base_url, "m", wait).ainvoke(ASK))
    (program,) = recorded(server).values()
    assert program.status == "error"
    status = {stop.call_id: stop.status for stop in program.tool_stops}
    assert status["c2"] == "error"
    assert status["c3"] == "cancelled"


def test_a_tool_node_by_itself(server: FakeServer) -> None:
    from langchain_core.messages import AIMessage

    init(server)
    calls = [
        {"name": "upper", "args": {"text": str(n)}, "id": f"c{n}", "type": "tool_call"} for n in range(3)
    ]
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode(tools()))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    graph.compile(name="only").invoke({"messages": [AIMessage("", tool_calls=calls)]})
    (program,) = recorded(server).values()
    assert sorted(start.call_id for start in program.tool_starts) == ["c0", "c1", "c2"]


def test_uninstrument_puts_langgraphs_own_functions_back(server: FakeServer) -> None:
    names = ("stream", "astream", "batch", "abatch")
    before = [vars(Pregel).get(name) for name in names]
    init(server)
    assert all(vars(Pregel)[name].__wrapped__ is not None for name in names)
    sojourn.uninstrument("langgraph")
    assert [vars(Pregel).get(name) for name in names] == before
    assert "langgraph" not in sojourn.stats().instrumented


def test_a_later_patch_is_left_and_the_adapter_becomes_idle(server: FakeServer, monkeypatch: Any) -> None:
    init(server, "DONE")
    ours = Pregel.stream
    seen = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ours(self, *args, **kwargs)

    Pregel.stream = theirs
    try:
        sojourn.uninstrument("langgraph", "langchain")
        assert Pregel.stream is theirs
        planner(speaker(model_at(server.base_url, "m"))).invoke(HI)
        assert seen
        assert server.requests[0].context.sojourn.implicit
    finally:
        Pregel.stream = ours
        langgraph.unpatch()
    assert not hasattr(Pregel.stream, "__wrapped__")


def test_an_unfamiliar_langgraph_is_left_alone(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runs, "_AROUND", {**graph_runs._AROUND, "no_such_method": None})
    init(server)
    assert "langgraph" not in sojourn.stats().instrumented
    assert "langchain" in sojourn.stats().instrumented
    assert not hasattr(Pregel.stream, "__wrapped__")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(graph_runs, "GraphStart"), (callback_handler, "current_run_id"), (graph_runs, "graph_of")],
)
def test_internal_errors_never_reach_the_user(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    init(server)
    server.script = lambda request: "DONE"
    graph = planner(
        speaker(model_at(server.base_url, "m")), checkpointer=InMemorySaver(), interrupt_before=["work"]
    )
    plain = graph.invoke(HI, thread("a"))
    monkeypatch.setattr(owner, name, lambda *args: 1 / 0)
    assert graph.invoke(HI, thread("b")) == plain
    assert graph.batch([HI], thread("c")) == [plain]
    assert sojourn.stats()["internal_error"] + sojourn.stats()["resolver_error"] > 0
    monkeypatch.undo()
    for run in list(callback_handler.tree._runs.values()):
        callback_handler.tree._close(run)


def test_odd_chunks_are_no_fault(server: FakeServer) -> None:
    class Odd(dict):
        def get(self, *args: Any) -> Any:
            raise ToolBroke

    init(server)
    for chunk in (None, (), ("updates", None), {"type": "updates"}, ((), "values", 5)):
        graph_runs._mark_interrupt(graph_runs.GraphStart(None, None, lambda: None, None), chunk)
    assert sojourn.stats()["internal_error"] == 0
    graph_runs._mark_interrupt(graph_runs.GraphStart(None, None, lambda: None, None), Odd())
    assert sojourn.stats()["internal_error"] == 1


def test_adding_reducers_do_not_matter() -> None:
    class Odd(TypedDict):
        x: Annotated[list[int], operator.add]

    graph = StateGraph(Odd)
    graph.add_node("prüfen_检查", lambda state: {"x": [1]})
    graph.add_edge(START, "prüfen_检查")
    graph.add_edge("prüfen_检查", END)
    assert aeg(graph.compile())[0] == {"prüfen_检查": ()}


def test_names_of_ten_thousand_bytes(server: FakeServer) -> None:
    init(server, "one")
    speak = speaker(model_at(server.base_url, "m"))
    long = "n" * 10_000
    graph = StateGraph(State)
    graph.add_node(long, speak)
    graph.add_edge(START, long)
    graph.add_edge(long, END)
    graph.compile(name="g" * 10_000).invoke(HI)
    (program,) = recorded(server).values()
    assert long.startswith(program.nodes[0])
    assert nodes(server)[0] in langgraph.graph_of(graph.compile()).nodes


def test_tool_starts_are_never_lost_on_a_thousand_parallel_nodes(server: FakeServer) -> None:
    init(server)

    async def work(state: Plain) -> dict[str, int]:
        await asyncio.sleep(0)
        return {}

    graph = StateGraph(Plain)
    graph.add_node("part", work)
    graph.add_conditional_edges(START, lambda state: [Send("part", {"x": n}) for n in range(1000)], ["part"])
    graph.add_edge("part", END)
    entered = listened(lambda: asyncio.run(graph.compile(name="fan").ainvoke({"x": 1})))
    assert entered == ["enter part"] * 1000
    recorded(server)
    assert not [event for event in server.program_events() if isinstance(event, ToolStart)]


# ---- below Python 3.11, where asyncio passes no context to an async node


@pytest.fixture
def without_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async nodes and chains run without LangChain's context variable, as below Python 3.11."""
    monkeypatch.setattr("langgraph._internal._runnable.ASYNCIO_ACCEPTS_CONTEXT", False)
    monkeypatch.setattr("langchain_core.runnables.utils.asyncio_accepts_context", lambda: False)
    monkeypatch.setattr(run_tree, "ASYNC_RUNS_LACK_CONFIG", True)


def test_async_nodes_without_a_config_belong_to_their_run(server: FakeServer, without_config: None) -> None:
    init(server, *["no", "no", "DONE"] * 2)
    graph = planner(async_speaker(model_at(server.base_url, "m")))

    async def main() -> list[Any]:
        one = await graph.ainvoke(HI)
        assert sojourn.current_program() is None
        chunks = []
        async for chunk in graph.astream(HI):
            assert sojourn.current_program() is None, "the consumer is outside"
            chunks.append(chunk)
        return [one, chunks]

    asyncio.run(main())
    one, other = recorded(server)
    assert ids(server) == [one] * 3 + [other] * 3
    assert nodes(server) == ["plan", "work", "plan"] * 2
    assert sojourn.stats()["context_reset_failed"] == 0


def test_runs_at_the_same_time_without_a_config_keep_apart(server: FakeServer, without_config: None) -> None:
    init(server, *["DONE"] * 6)
    graph = planner(async_speaker(model_at(server.base_url, "m")), checkpointer=InMemorySaver())

    async def one(n: int) -> str:
        with sojourn.program(f"p{n}") as p:
            await graph.ainvoke(HI, thread(f"in {n}"))
        return p.id

    async def main() -> tuple[list[str], list[Any]]:
        runs = (graph.ainvoke(HI, thread(f"alone {n}")) for n in range(3))
        return await asyncio.gather(asyncio.gather(*map(one, range(3))), asyncio.gather(*runs))

    opened, _ = asyncio.run(main())
    assert len(recorded(server)) == 6
    assert len(set(ids(server))) == 6
    assert set(opened) < set(ids(server))
    assert not any(request.context.sojourn.implicit for request in server.requests)


def test_an_agent_without_a_config_has_its_requests_and_tools(
    server: FakeServer, without_config: None
) -> None:
    init(server, use("count", "c1"), "DONE")
    asyncio.run(create_agent(model_at(server.base_url, "m"), tools()).ainvoke(ASK))
    (program,) = recorded(server)
    assert ids(server) == [program] * 2
    assert nodes(server) == ["model", "model"]


def test_a_sub_graph_and_a_broken_off_stream_without_a_config(
    server: FakeServer, without_config: None
) -> None:
    init(server, *["DONE"] * 4)
    inner = planner(async_speaker(model_at(server.base_url, "m")))
    outer = StateGraph(State)
    outer.add_node("sub", inner)
    outer.add_edge(START, "sub")
    graph = outer.compile(name="outer")

    async def main() -> None:
        await graph.ainvoke(HI)
        async for _ in graph.astream(HI, stream_mode="debug"):
            break
        gc.collect()
        assert sojourn.current_program() is None

    asyncio.run(main())
    first, _ = recorded(server)
    assert ids(server)[0] == first
    assert nodes(server)[0] == "sub:plan"


@pytest.mark.parametrize("old", [True, False], ids=["old langchain-core", "new langchain-core"])
def test_async_chains_without_a_config_are_warned_of_once(
    server: FakeServer,
    without_config: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    old: bool,
) -> None:
    def started(coroutine: Any, context: Any, *, create_task: bool = False) -> Any:
        return coroutine if old else context.run(asyncio.create_task, coroutine)

    for module in ("base", "utils"):
        monkeypatch.setattr(f"langchain_core.runnables.{module}.coro_with_context", started)
    monkeypatch.setattr(callback_handler, "_chains_checked", False)
    init(server, "a", "b", "c")
    model = model_at(server.base_url, "m")

    async def ask(text: str) -> Any:
        return await model.ainvoke(text)

    chain = RunnableLambda(ask).with_config(run_name="mychain")
    synchronous = RunnableLambda(lambda text: text).with_config(run_name="synchronous")
    synchronous.invoke("x")

    async def main() -> str:
        synchronous.invoke("x")  # in a running loop, as in a notebook
        with sojourn.program() as p:
            await chain.ainvoke("x")
        assert not caplog.records
        await chain.ainvoke("x")
        await chain.ainvoke("x")
        return p.id

    inside = asyncio.run(main())
    assert ids(server)[0] == inside
    assert [request.context.sojourn.implicit for request in server.requests] == [False, old, old]
    warnings = [record.getMessage() for record in caplog.records if "langchain-core" in record.getMessage()]
    assert len(warnings) == int(old)
