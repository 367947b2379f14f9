"""Scenarios of LangChain, with agents made by ``create_agent`` with tools, and a named chain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from scenario_types import ProgramFact, Scenario, ToolFact
from sojourn.testing import ToolUse

NEEDS = ("langchain", "langchain_openai", "langgraph")
ASK = {"messages": [("user", "hi")]}


class ToolBroke(Exception):
    """Error that a user's tool raises."""


def model_at(base_url: str, model: str, **more: Any) -> Any:
    """A new model with its own HTTP client. LangChain's default client is shared by the process, and a second
    ``asyncio.run`` would find it tied to the first event loop."""
    import openai
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=model, base_url=base_url, api_key="none", max_tokens=64,
        http_async_client=openai.DefaultAsyncHttpxClient(), **more,
    )  # fmt: skip


def tools(*more: Any) -> list[Any]:
    from langchain_core.tools import tool

    @tool
    def upper(text: str) -> str:
        """In capitals."""
        return text.upper()

    @tool
    async def count(text: str) -> str:
        """Its length."""
        await asyncio.sleep(0.002)
        return str(len(text))

    @tool
    def broken(text: str) -> str:
        """Does not work."""
        raise ToolBroke(text)

    return [upper, count, broken, *more]


def agent(base_url: str, model: str, *, extra: tuple[Any, ...] = (), name: str = "agent", **more: Any) -> Any:
    from langchain.agents import create_agent

    return create_agent(model_at(base_url, model), tools(*extra), name=name, **more)


def said(result: Any) -> list[tuple[str, str]]:
    """Kind and text of every message, without random parts."""
    return [(message.type, str(message.content)) for message in result["messages"]]


def sync(base_url: str, model: str) -> Any:
    return said(agent(base_url, model).invoke(ASK))


def in_async(base_url: str, model: str) -> Any:
    return said(asyncio.run(agent(base_url, model).ainvoke(ASK)))


def stream(base_url: str, model: str) -> Any:
    chunks = agent(base_url, model).stream(ASK, stream_mode="messages")
    return "".join(str(message.content) for message, _ in chunks if message.type == "AIMessageChunk")


def async_stream(base_url: str, model: str) -> Any:
    async def run() -> Any:
        updates = agent(base_url, model).astream(ASK, stream_mode="updates")
        return [sorted(update) async for update in updates]

    return asyncio.run(run())


def cancelled(base_url: str, model: str) -> Any:
    from langchain_core.tools import tool

    async def run() -> str:
        begun = asyncio.Event()

        @tool
        async def wait(text: str) -> str:
            """Never comes back."""
            begun.set()
            await asyncio.sleep(60)
            return text

        task = asyncio.create_task(agent(base_url, model, extra=(wait,)).ainvoke(ASK))
        await begun.wait()
        task.cancel()
        await task
        return "never"

    return asyncio.run(run())


def sub_agent(base_url: str, model: str) -> Any:
    from langchain_core.tools import tool

    inner = agent(base_url, model, name="inner")

    @tool
    def ask(text: str) -> str:
        """Ask somebody who knows."""
        return str(inner.invoke(ASK)["messages"][-1].content)

    return said(agent(base_url, model, extra=(ask,), name="outer").invoke(ASK))


def async_sub_agents(base_url: str, model: str) -> Any:
    from langchain_core.tools import tool

    inner = agent(base_url, model, name="inner")

    @tool
    async def ask(text: str) -> str:
        """Ask somebody who knows."""
        return str((await inner.ainvoke(ASK))["messages"][-1].content)

    return said(asyncio.run(agent(base_url, model, extra=(ask,), name="outer").ainvoke(ASK)))


def named_chain(base_url: str, model: str) -> Any:
    from langchain_core.runnables import RunnableLambda

    llm = model_at(base_url, model)

    def loop(question: str) -> str:
        text = question
        for _ in range(2):
            text = str(llm.invoke(text).content)
        return text

    return RunnableLambda(loop).invoke("hi")


def use(name: str, id: str | None = None) -> ToolUse:
    return ToolUse(name, {"text": "one"}, id)


def scenario(
    row: str,
    play: Callable[[str, str], Any],
    script: list[Any],
    *programs: ProgramFact,
    name: str = "",
    raises: str | None = None,
) -> Scenario:
    return Scenario("langchain", row, NEEDS, lambda: list(script), play, programs, raises, name)


MODEL = ("model", "model")
ONE_TOOL = [use("upper"), "done"]
ONE = ProgramFact("agent", nodes=MODEL, tools=(ToolFact("upper"),))
THREE = [[use("upper"), use("count"), use("upper")], "done"]

SCENARIOS = [
    scenario("sync", sync, ONE_TOOL, ONE),
    scenario("async", in_async, [use("count"), "done"], ONE._replace(tools=(ToolFact("count"),))),
    scenario("stream", stream, ONE_TOOL, ONE, name="messages"),
    scenario("stream", async_stream, ONE_TOOL, ONE, name="updates"),
    scenario(
        "error", sync, [use("broken")],
        ProgramFact("agent", "error", nodes=("model",), tools=(ToolFact("broken", "error"),)),
        raises="ToolBroke",
    ),
    scenario("error", sync, [use("unknown"), "done"], ProgramFact("agent", nodes=MODEL), name="no such tool"),
    scenario(
        "cancel", cancelled, [use("wait")],
        ProgramFact("agent", "cancelled", nodes=("model",), tools=(ToolFact("wait", "cancelled"),)),
        raises="CancelledError",
    ),
    scenario(
        "parallel", in_async, THREE,
        ONE._replace(tools=(ToolFact("count"), ToolFact("upper"), ToolFact("upper"))),
    ),
    scenario(
        "parallel", sync, [[use("upper")] * 3, "done"],
        ONE._replace(tools=(ToolFact("upper"),) * 3), name="threads",
    ),
    scenario(
        "sub_agent", sub_agent, [use("ask"), use("upper"), "inner is done", "done"],
        ProgramFact("outer", nodes=MODEL, tools=(ToolFact("ask"),)),
        ONE._replace(key="inner", parent="outer"),
    ),
    scenario(
        "sub_agent", async_sub_agents, [[use("ask")] * 2, "inner", "inner", "done"],
        ProgramFact("outer", nodes=MODEL, tools=(ToolFact("ask"),) * 2),
        ProgramFact("one", nodes=("model",), parent="outer"),
        ProgramFact("two", nodes=("model",), parent="outer"),
        name="two at once",
    ),
    scenario("sync", named_chain, ["one", "two"], ProgramFact("loop", nodes=(None, None)), name="chain"),
    scenario("retry", sync, ONE_TOOL, ONE),
]  # fmt: skip
ABSENT: dict[str, str] = {}
