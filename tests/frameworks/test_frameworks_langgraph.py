"""LangGraph: its graphs, threads, interrupts and breakpoints, sub-graphs and streams broken off."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any, Literal

import pytest
import sojourn
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import ParentCommand
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, interrupt
from recorded_programs import checked_programs, recorded_programs
from scenarios_langchain import model_at
from scenarios_langgraph import HI, SCRIPT, State, asking, async_speaker, planner, speaker, thread
from sojourn.testing import FakeServer
from sojourn.wire_events import AegReport, ProgramEnd
from sojourn_integrations import langgraph
from sojourn_integrations.langchain import callback_handler
from sojourn_integrations.langchain.run_tree import node_path


def init(server: FakeServer, *script: object) -> None:
    server.script = list(script)
    sojourn.init(server.url, probe_timeout_s=5)


def ids(server: FakeServer) -> list[str]:
    """Program of each request."""
    return [request.context.program_id for request in server.requests]


# ---- graphs


def step(state: State) -> dict[str, list[str]]:
    return {"said": ["hi"]}


def untyped(state: State):
    return "b"


def typed(state: State) -> Literal["b", "c"]:
    return "b"


def exact(state: State) -> Command[Literal["b"]]:
    return Command(goto="b")


def vague(state: State):
    return Command(goto="b")


def built(text: str, router: Any = None, **nodes: Any) -> Pregel:
    """A graph from its edges, such as "a b", one a line. ``router`` leaves the node a."""
    edges = [
        [{"start": START, "end": END}.get(name, name) for name in line.split()] for line in text.split(",")
    ]
    graph = StateGraph(State)
    for name in dict.fromkeys(name for edge in edges for name in edge if name not in (START, END)):
        graph.add_node(name, nodes.get(name, step))
    for one, two in edges:
        graph.add_edge(one, two)
    if router is not None:
        graph.add_conditional_edges("a", router)
    return graph.compile()


ROUTED = "start a, b end, c end"
INNER = built("start a, b end", untyped)


@pytest.mark.parametrize(
    ("graph", "edges", "complete"),
    [
        (built(ROUTED, typed), "start a, b end, c end, a b, a c", True),
        (built(ROUTED, untyped), ROUTED, False),  # the edges that LangGraph guesses are gone
        (built("start a, b end", a=exact), "start a, b end, a b", True),
        (built("start a, b end", a=vague), "start a, b end, a end", False),
        # A sub-graph is opened up, and the whole is as vague as its parts.
        (built("start sub, sub z, z end", sub=INNER), "start sub:a, sub:b z, z end", False),
    ],
)
def test_the_edges_of_a_graph_are_exact_or_it_is_not_complete(
    graph: Pregel, edges: str, complete: bool
) -> None:
    found = langgraph.graph_of(graph)
    assert found is not None
    named = {START: "start", END: "end"}
    assert {f"{named.get(a, a)} {named.get(b, b)}" for a, b in found.edges} == set(edges.split(", "))
    assert found.complete is complete
    assert set(found.nodes) == {name for name in edges.replace(",", "").split() if name not in named.values()}


def test_the_graph_is_reported_with_the_program(server: FakeServer) -> None:
    init(server, *SCRIPT * 2)
    graph = planner(speaker(model_at(server.base_url, "m")))
    graph.invoke(HI)
    own = sojourn.Aeg(["mine"])
    with sojourn.program("explicit"):
        graph.invoke(HI)
    with sojourn.program("with its own", aeg=own):
        pass
    checked_programs(server)
    reports = [event for event in server.program_events() if isinstance(event, AegReport)]
    expected = langgraph.graph_of(graph)
    assert [each.graph_hash for each in reports] == [expected.hash, expected.hash, own.hash]
    assert [each.graph is not None for each in reports] == [True, False, True]
    assert reports[0].agent_type == "planner"


def test_node_paths() -> None:
    assert node_path("sub:u1|model:u2") == "sub:model"
    assert node_path("tools:u1|model:u2", "tools:u1") == "model"
    assert node_path("fn:u1|1|model:u2") == "fn:model"
    assert node_path("tools:u9|model:u2", "tools:u1") == "tools:model"
    assert node_path("") is None
    assert len(node_path("x" * 9000 + ":u").encode()) <= 1024


# ---- interrupts and threads


def test_a_run_that_waits_goes_on_as_the_same_program(server: FakeServer) -> None:
    init(server, "go on", "DONE")
    graph = planner(asking(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    graph.invoke(HI, thread())
    assert sojourn.flush(60)
    events = [type(event).__name__ for event in server.program_events()]
    assert events == ["ProgramStart", "AegReport", "ToolStart"]
    assert not sojourn.runtime.session().heartbeats._open  # a person may take days
    time.sleep(0.02)
    graph.invoke(Command(resume="yes"), thread())
    ((id, program),) = checked_programs(server).items()
    assert program.nodes == ("plan", "plan")
    (stop,) = program.tool_stops
    assert (program.tool_starts[0].tool, program.tool_starts[0].tool_class) == ("human", "human")
    assert stop.duration_s >= 0.02
    assert program.status == "ok"
    assert set(ids(server)) == {id}
    assert len(callback_handler.tree.waiting) == 0


@pytest.mark.parametrize(("when", "compiled"), [("interrupt_before", True), ("interrupt_after", False)])
def test_breakpoints(server: FakeServer, when: str, compiled: bool) -> None:
    init(server, *SCRIPT)
    where = {when: ["work"]}
    node = speaker(model_at(server.base_url, "m"))
    graph = planner(node, checkpointer=InMemorySaver(), **(where if compiled else {}))
    graph.invoke(HI, thread(), **({} if compiled else where))
    assert len(callback_handler.tree.waiting) == 1
    graph.invoke(None, thread())
    (program,) = checked_programs(server).values()
    assert program.nodes == ("plan", "work", "plan")
    assert [fact.tool for fact in program.tools] == ["human"]


def test_an_interrupt_and_a_command_to_the_parent_are_no_errors_of_a_tool(server: FakeServer) -> None:
    init(server)

    @sojourn.tool
    def ask(state: State) -> dict[str, Any]:
        return {"said": [interrupt("may I?")]}

    @sojourn.tool
    def hand_over(state: State) -> None:
        raise ParentCommand(Command(graph=Command.PARENT, goto="other"))

    def graph(node: Any, *more: str) -> Any:
        built = StateGraph(State).add_node("first", node).add_edge(START, "first")
        for name in more:
            built.add_node(name, lambda state: {"said": ["there"]})
        return built.compile(checkpointer=None if more else InMemorySaver())

    asks = graph(ask)
    asks.invoke(HI, thread())
    asks.invoke(Command(resume="yes"), thread())
    inner = StateGraph(State).add_node("hand_over", hand_over).add_edge(START, "hand_over").compile()
    assert graph(inner, "other").invoke(HI)["said"][-1] == "there"
    facts = [
        fact[:2] for each in checked_programs(server).values() for fact in each.tools if fact.tool != "human"
    ]
    assert sorted(facts) == [("ask", "cancelled"), ("ask", "ok"), ("hand_over", "ok")]


def test_a_thread_bears_one_id_over_many_runs(server: FakeServer) -> None:
    init(server, "DONE", "DONE", "DONE")
    graph = planner(speaker(model_at(server.base_url, "m")), checkpointer=InMemorySaver())
    for id in ("1", "1", "2"):
        graph.invoke(HI, thread(id))
    checked_programs(server, "2 times", "a second start", "after its end")
    first, again, other = ids(server)
    assert first == again != other
    assert sum(isinstance(event, ProgramEnd) for event in server.program_events()) == 3


# ---- batches, wrapping, streams


def test_each_of_a_batch_under_a_program_is_a_child(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "DONE"
    graph = planner(speaker(model_at(server.base_url, "m")))
    with sojourn.program("mine"):
        graph.batch([HI, HI, HI])
    with sojourn.program("async"):
        asyncio.run(planner(async_speaker(model_at(server.base_url, "m"))).abatch([HI, HI]))
    programs = checked_programs(server)
    mine, other = (id for id, each in programs.items() if each.start.name in ("mine", "async"))
    parents = [each.start.parent_program_id for each in programs.values() if each.start.name == "planner"]
    assert sorted(parents) == sorted([mine] * 3 + [other] * 2)
    assert all(each.nodes == ("plan",) for each in programs.values() if each.start.name == "planner")


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
    waiting_one = sojourn.wrap(planner(asking(model_at(server.base_url, "m")), checkpointer=InMemorySaver()))
    waiting_one.invoke(HI, thread())
    waiting_one.invoke(Command(resume="yes"), thread())
    assert sojourn.flush(60)
    programs = [each for each in recorded_programs(server).values() if each.start.name == "planner"]
    assert [each.nodes for each in programs] == [("plan", "work", "plan"), ("plan", "plan")]
    assert all(each.status == "ok" for each in programs)
    assert sum(isinstance(event, AegReport) for event in server.program_events()) == 2


# ---- streams whose event loop is gone


@pytest.mark.parametrize(
    ("held", "wrapped", "patched"), [(True, True, True), (False, True, False), (True, False, True)]
)
def test_a_stream_left_at_the_end_of_its_loop_says_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, held: bool, wrapped: bool, patched: bool
) -> None:
    async def hi(state: State) -> dict[str, list[str]]:
        return {"said": ["hi"]}

    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    sojourn.init(server.url, probe_timeout_s=5)
    if not patched:
        sojourn.uninstrument("langgraph", "langchain")
    graph, streams = built("start one, one two, two end", one=hi, two=hi), []
    if wrapped:
        graph = sojourn.wrap(graph)

    async def leave_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        if held:
            streams.append(graph.astream({"said": []}))
            await anext(streams[0])
            return
        async for _ in graph.astream({"said": []}):
            break

    asyncio.run(leave_early())
    streams.clear()
    gc.collect()
    assert said == []
    assert sojourn.flush(60)
    assert [each.status for each in recorded_programs(server).values()] == ["cancelled"] * (
        wrapped or patched
    )
