"""Scenarios of LangGraph: a planner and a worker, parallel branches, sub-graphs, interrupts, batches."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import sojourn
from scenario_types import RETRY, ToolFact, cancel_once, fact, scenarios_of
from scenarios_langchain import ASK, ToolBroke, model_at, said, tools, use


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

        return await cancel_once(begun, planner(node).ainvoke(HI))

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


def asking(llm: Any) -> Callable[[State], dict[str, Any]]:
    """A speaker that stops to ask a person before it speaks a second time."""
    from langgraph.types import interrupt

    speak = speaker(llm)

    def node(state: State) -> dict[str, Any]:
        return {"said": [interrupt("may I?")]} if len(state["said"]) == 2 else speak(state)

    return node


def thread(id: str = "1") -> dict[str, Any]:
    return {"configurable": {"thread_id": id}}


def resumed(base_url: str, model: str) -> Any:
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    graph = planner(asking(model_at(base_url, model)), checkpointer=InMemorySaver())
    before = graph.invoke(HI, thread())
    assert [each.value for each in before.pop("__interrupt__")] == ["may I?"]
    return before, graph.invoke(Command(resume="yes"), thread())


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


scenario = scenarios_of("langgraph", "langgraph", "langchain", "langchain_openai")
SCRIPT = ["go on", "worked", "DONE"]
ONE_TOOL = [use("upper"), "done"]
PLANNED = fact("planner", "plan work plan")
CUT = fact("planner", "plan work")
LOOP = fact("loop", "think think", "upper")
BROKEN = fact("loop", "think", ToolFact("broken", "error"), status="error")
RESUMED = fact("planner", "plan plan work plan", ToolFact("human", tool_class="human"))
SUB_GRAPHS = fact("outer", "team:plan team:work team:plan judge call:plan")
OWN = fact("all", "", "plan"), fact("mine", "-"), fact("planner", "plan plan", parent="all")

SCENARIOS = [
    scenario("sync", sync, SCRIPT, PLANNED),
    scenario("sync", tool_loop, ONE_TOOL, LOOP, name="tools"),
    # Every other step of such a loop is a turn.
    scenario("sync", limited_tool_loop, ONE_TOOL, LOOP.limited(3), name="limit"),
    scenario(
        "error",
        partial(limited_tool_loop, steps=3),
        [use("upper")] * 2,
        LOOP._replace(status="error").limited(2),
        name="limit",
        raises="GraphRecursionError",
    ),
    scenario("sync", limited_planner, SCRIPT, PLANNED, name="limit of steps that are no turns"),
    scenario("sync", resumed, ["go on", "more", "worked", "DONE"], RESUMED, name="interrupt"),
    scenario("async", in_async, SCRIPT, PLANNED),
    scenario("stream", stream, SCRIPT, PLANNED),
    scenario("stream", broken_off, SCRIPT, fact("planner", "plan", status="cancelled"), name="broken off"),
    scenario("error", failing_node, ["go on", "bad"], CUT._replace(status="error"), raises="ToolBroke"),
    scenario("error", tool_loop, [use("broken")], BROKEN, raises="ToolBroke", name="in a tool"),
    scenario("cancel", cancelled, SCRIPT[:2], CUT._replace(status="cancelled"), raises="CancelledError"),
    scenario("parallel", branches, ["said"] * 4, fact("fan", "a b c join")),
    scenario(
        "parallel",
        tool_loop,
        [[use("upper")] * 3, "done"],
        fact("loop", "think think", *["upper"] * 3),
        name="tools",
    ),
    scenario("parallel", batch, ["DONE"] * 3, *[fact(key, "plan") for key in "abc"], name="batch"),
    scenario(
        "sub_agent",
        graph_in_tool,
        [use("delegate"), *SCRIPT, "done"],
        fact("loop", "think think", "delegate"),
        PLANNED._replace(parent="loop"),
    ),
    scenario("sub_agent", sub_graph, [*SCRIPT, "judged", "DONE"], SUB_GRAPHS, name="sub-graphs"),
    scenario("sub_agent", own_program, ["before", "in it", "DONE"], *OWN, name="opened by hand"),
    scenario(RETRY, sync, SCRIPT, PLANNED),
]
