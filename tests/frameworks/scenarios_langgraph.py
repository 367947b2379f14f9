"""Scenarios of LangGraph: a planner and a worker, parallel branches, sub-graphs, interrupts, batches."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import sojourn
from scenario_types import ProgramFact, Scenario, ToolFact
from scenarios_langchain import ASK, ToolBroke, model_at, said, tools, use

NEEDS = ("langgraph", "langchain", "langchain_openai")


class State(TypedDict):
    """State of the graphs whose nodes have no tools."""

    said: Annotated[list[str], operator.add]


HI: State = {"said": ["hi"]}


def speaker(llm: Any) -> Callable[[State], dict[str, Any]]:
    def speak(state: State) -> dict[str, Any]:
        return {"said": [str(llm.invoke(state["said"][-1]).content)]}

    return speak


def async_speaker(llm: Any) -> Callable[[State], Any]:
    async def speak(state: State) -> dict[str, Any]:
        return {"said": [str((await llm.ainvoke(state["said"][-1])).content)]}

    return speak


def enough(state: State) -> Literal["work", "__end__"]:
    return "__end__" if "DONE" in state["said"][-1] else "work"


def planner(node: Callable[[State], Any], **how: Any) -> Any:
    """plan → work → plan → … → end."""
    from langgraph.graph import START, StateGraph

    graph = StateGraph(State)
    graph.add_node("plan", node)
    graph.add_node("work", node)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", enough)
    graph.add_edge("work", "plan")
    return graph.compile(name="planner", **how)


def sync(base_url: str, model: str) -> Any:
    return planner(speaker(model_at(base_url, model))).invoke(HI)


def in_async(base_url: str, model: str) -> Any:
    return asyncio.run(planner(async_speaker(model_at(base_url, model))).ainvoke(HI))


def stream(base_url: str, model: str) -> Any:
    return list(planner(speaker(model_at(base_url, model))).stream(HI))


def broken_off(base_url: str, model: str) -> Any:
    for chunk in planner(speaker(model_at(base_url, model))).stream(HI):
        return chunk


def failing_node(base_url: str, model: str) -> Any:
    speak = speaker(model_at(base_url, model))

    def node(state: State) -> dict[str, Any]:
        result = speak(state)
        if len(state["said"]) > 1:
            raise ToolBroke(result["said"][0])
        return result

    return planner(node).invoke(HI)


def cancelled(base_url: str, model: str) -> Any:
    async def run() -> Any:
        begun = asyncio.Event()
        speak = async_speaker(model_at(base_url, model))

        async def node(state: State) -> dict[str, Any]:
            result = await speak(state)
            if len(state["said"]) > 1:
                begun.set()
                await asyncio.sleep(60)
            return dict(result)

        task = asyncio.create_task(planner(node).ainvoke(HI))
        await begun.wait()
        task.cancel()
        await task

    return asyncio.run(run())


def branches(base_url: str, model: str) -> Any:
    """Three parallel nodes, and one that waits for them."""
    from langgraph.graph import END, START, StateGraph

    speak = speaker(model_at(base_url, model))
    graph = StateGraph(State)
    for name in ("a", "b", "c", "join"):
        graph.add_node(name, speak)
    for name in ("a", "b", "c"):
        graph.add_edge(START, name)
    graph.add_edge(["a", "b", "c"], "join")
    graph.add_edge("join", END)
    return graph.compile(name="fan").invoke(HI)


def tool_graph(base_url: str, model: str, *extra: Any) -> Any:
    """A hand-made loop of a model and its tools."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    known = tools(*extra)
    llm = model_at(base_url, model).bind_tools(known)
    graph = StateGraph(MessagesState)
    graph.add_node("think", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(known, handle_tool_errors=False))  # the oldest version's default differs
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(name="loop")


def tool_loop(base_url: str, model: str) -> Any:
    return said(tool_graph(base_url, model).invoke(ASK))


def limited_tool_loop(base_url: str, model: str, steps: int = 5) -> Any:
    return said(tool_graph(base_url, model).invoke(ASK, {"recursion_limit": steps}))


def limited_planner(base_url: str, model: str) -> Any:
    return planner(speaker(model_at(base_url, model))).invoke(HI, {"recursion_limit": 9})


def sub_graph(base_url: str, model: str) -> Any:
    from langgraph.graph import END, START, StateGraph

    speak = speaker(model_at(base_url, model))
    inner = planner(speak)
    graph = StateGraph(State)
    graph.add_node("team", inner)
    graph.add_node("judge", speak)
    graph.add_node("call", lambda state: {"said": inner.invoke(state)["said"][-1:]})
    graph.add_edge(START, "team")
    graph.add_edge("team", "judge")
    graph.add_edge("judge", "call")
    graph.add_edge("call", END)
    return graph.compile(name="outer").invoke(HI)


def graph_in_tool(base_url: str, model: str) -> Any:
    from langchain_core.tools import tool

    inner = planner(speaker(model_at(base_url, model)))

    @tool
    def delegate(text: str) -> str:
        """Somebody else does it."""
        return str(inner.invoke({"said": [text]})["said"][-1])

    return said(tool_graph(base_url, model, delegate).invoke(ASK))


def resumed(base_url: str, model: str) -> Any:
    """The graph stops to ask a person, and then resumes."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    speak = speaker(model_at(base_url, model))

    def node(state: State) -> dict[str, Any]:
        if len(state["said"]) == 2:
            return {"said": [interrupt("may I?")]}
        return speak(state)

    graph = planner(node, checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    before = graph.invoke(HI, thread)
    assert [each.value for each in before.pop("__interrupt__")] == ["may I?"]
    return before, graph.invoke(Command(resume="yes"), thread)


def own_program(base_url: str, model: str) -> Any:
    """The code of a node opens a program, less deep than the graph's, and asks before, in and after it."""
    speak = speaker(model_at(base_url, model))

    def node(state: State) -> dict[str, Any]:
        speak(state)
        with sojourn.program("mine", parent=None):
            speak(state)
        return speak(state)

    with sojourn.program("all"), sojourn.tool_call("plan"):
        return planner(node).invoke(HI)


def batch(base_url: str, model: str) -> Any:
    return planner(speaker(model_at(base_url, model))).batch([HI, HI, HI])


def scenario(
    row: str,
    play: Callable[[str, str], Any],
    script: list[Any],
    *programs: ProgramFact,
    name: str = "",
    raises: str | None = None,
) -> Scenario:
    return Scenario("langgraph", row, NEEDS, lambda: list(script), play, programs, raises, name)


SCRIPT = ["go on", "worked", "DONE"]
PLANNED = ProgramFact("planner", nodes=("plan", "work", "plan"))
SHORT = ProgramFact("planner", nodes=("plan",))
LOOP = ProgramFact("loop", nodes=("think", "think"), tools=(ToolFact("upper"),))

SCENARIOS = [
    scenario("sync", sync, SCRIPT, PLANNED),
    scenario("sync", tool_loop, [use("upper"), "done"], LOOP, name="tools"),
    # Every other step of such a loop is a turn.
    scenario("sync", limited_tool_loop, [use("upper"), "done"], LOOP.limited(3), name="limit"),
    scenario(
        "error", partial(limited_tool_loop, steps=3), [use("upper")] * 2,
        LOOP._replace(status="error", tools=(ToolFact("upper"),)).limited(2),
        name="limit", raises="GraphRecursionError",
    ),
    scenario("sync", limited_planner, SCRIPT, PLANNED, name="limit of steps that are no turns"),
    scenario(
        "sync", resumed, ["go on", "more", "worked", "DONE"],
        ProgramFact("planner", nodes=("plan", "plan", "work", "plan"),
                    tools=(ToolFact("human", tool_class="human"),)),
        name="interrupt",
    ),
    scenario("async", in_async, SCRIPT, PLANNED),
    scenario("stream", stream, SCRIPT, PLANNED),
    scenario(
        "stream", broken_off, SCRIPT, ProgramFact("planner", "cancelled", nodes=("plan",)), name="broken off"
    ),
    scenario(
        "error", failing_node, ["go on", "bad"], ProgramFact("planner", "error", nodes=("plan", "work")),
        raises="ToolBroke",
    ),
    scenario(
        "error", tool_loop, [use("broken")],
        ProgramFact("loop", "error", nodes=("think",), tools=(ToolFact("broken", "error"),)),
        raises="ToolBroke", name="in a tool",
    ),
    scenario(
        "cancel", cancelled, ["go on", "worked"], ProgramFact("planner", "cancelled", nodes=("plan", "work")),
        raises="CancelledError",
    ),
    scenario("parallel", branches, ["said"] * 4, ProgramFact("fan", nodes=("a", "b", "c", "join"))),
    scenario("parallel", tool_loop, [[use("upper")] * 3, "done"],
             LOOP._replace(tools=(ToolFact("upper"),) * 3),
             name="tools"),
    scenario("parallel", batch, ["DONE"] * 3, *[SHORT._replace(key=str(i)) for i in range(3)], name="batch"),
    scenario(
        "sub_agent", graph_in_tool, [use("delegate"), *SCRIPT, "done"],
        LOOP._replace(tools=(ToolFact("delegate"),)), PLANNED._replace(parent="loop"),
    ),
    scenario(
        "sub_agent", sub_graph, ["go on", "worked", "DONE", "judged", "DONE"],
        ProgramFact("outer", nodes=("team:plan", "team:work", "team:plan", "judge", "call:plan")),
        name="sub-graphs",
    ),
    scenario(
        "sub_agent", own_program, ["before", "in it", "DONE"],
        ProgramFact("all", tools=(ToolFact("plan"),)), ProgramFact("mine", nodes=(None,)),
        ProgramFact("planner", parent="all", nodes=("plan", "plan")),
        name="opened by hand",
    ),
    scenario("retry", sync, SCRIPT, PLANNED),
]  # fmt: skip
ABSENT: dict[str, str] = {}
