"""Scenarios of LangChain, with agents made by ``create_agent`` with tools, and a named chain."""

from __future__ import annotations

import asyncio
from typing import Any

from scenario_types import RETRY, ToolFact, cancel_once, fact, scenarios_of
from sojourn.testing import ToolUse

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

    async def run() -> Any:
        begun = asyncio.Event()

        @tool
        async def wait(text: str) -> str:
            """Never comes back."""
            begun.set()
            await asyncio.sleep(60)
            return text

        return await cancel_once(begun, agent(base_url, model, extra=(wait,)).ainvoke(ASK))

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


scenario = scenarios_of("langchain", "langchain", "langchain_openai", "langgraph")
ONE_TOOL = [use("upper"), "done"]
ONE = fact("agent", "model model", "upper")
ASKED = fact("outer", "model model", "ask")
BROKEN = fact("agent", "model", ToolFact("broken", "error"), status="error")
WAITED = fact("agent", "model", ToolFact("wait", "cancelled"), status="cancelled")
TWO = [fact(key, "model", parent="outer") for key in ("one", "two")]

SCENARIOS = [
    scenario("sync", sync, ONE_TOOL, ONE),
    scenario("async", in_async, [use("count"), "done"], fact("agent", "model model", "count")),
    scenario("stream", stream, ONE_TOOL, ONE, name="messages"),
    scenario("stream", async_stream, ONE_TOOL, ONE, name="updates"),
    scenario("error", sync, [use("broken")], BROKEN, raises="ToolBroke"),
    scenario("error", sync, [use("unknown"), "done"], fact("agent", "model model"), name="no such tool"),
    scenario("cancel", cancelled, [use("wait")], WAITED, raises="CancelledError"),
    scenario(
        "parallel",
        in_async,
        [[use("upper"), use("count"), use("upper")], "done"],
        fact("agent", "model model", "count", "upper", "upper"),
    ),
    scenario(
        "sub_agent",
        sub_agent,
        [use("ask"), use("upper"), "inner is done", "done"],
        ASKED,
        ONE._replace(key="inner", parent="outer"),
    ),
    scenario(
        "sub_agent",
        async_sub_agents,
        [[use("ask")] * 2, "inner", "inner", "done"],
        fact("outer", "model model", "ask", "ask"),
        *TWO,
        name="two at once",
    ),
    scenario("sync", named_chain, ["one", "two"], fact("loop", "- -"), name="chain"),
    scenario(RETRY, sync, ONE_TOOL, ONE),
]
