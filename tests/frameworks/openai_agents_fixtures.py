"""Agents and tools of the OpenAI Agents SDK for scenarios and tests, and the programs that they reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import sojourn
from recorded_programs import RecordedProgram, checked_programs
from sojourn.testing import FakeServer, ToolUse

SUM = ToolUse("add", {"a": 2, "b": 3})


class OpenAIAgents:
    """Agents of one model, and their tools. Made inside the event loop that runs them."""

    def __init__(self, base_url: str, model: str, *, responses: bool = False) -> None:
        from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, set_tracing_disabled
        from openai import AsyncOpenAI

        set_tracing_disabled(True)
        self.client = AsyncOpenAI(base_url=base_url, api_key="none", timeout=30)
        kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
        self.model = kind(model, self.client)

    def agent(self, name: str, *tools: Any, **fields: Any) -> Any:
        """An agent."""
        from agents import Agent

        return Agent(
            name=name, instructions=f"You are {name}.", model=self.model, tools=list(tools), **fields
        )


def add() -> Any:
    """A tool."""
    from agents import function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    return add


def fails(**options: Any) -> Any:
    """A tool that raises."""
    from agents import function_tool

    @function_tool(**options)
    def fails() -> str:
        """Of no use."""
        raise LookupError("nothing there")

    return fails


def waiting() -> tuple[Any, asyncio.Event]:
    """A tool that never ends, and an event that is set when it begins."""
    from agents import function_tool

    begun = asyncio.Event()

    @function_tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.sleep(60)
        return "over"

    return wait, begun


@asynccontextmanager
async def agents_for(server: FakeServer, **options: Any) -> AsyncIterator[OpenAIAgents]:
    """Agents of the fake server's model, with sojourn on."""
    sojourn.init(server.url, probe_timeout_s=5)
    factory = OpenAIAgents(server.base_url, "tiny", **options)
    async with factory.client:
        yield factory


def recorded(server: FakeServer, *, ended: bool = True) -> dict[str, RecordedProgram]:
    """All programs, after checking the rules that hold for every program."""
    return checked_programs(server, *(() if ended else ("a start needs one end",)))


async def run(agent: Any, given: Any, *, streamed: bool, **options: Any) -> Any:
    """Run an agent, and read the result to its end."""
    import agents

    if not streamed:
        return await agents.Runner.run(agent, given, **options)
    result = agents.Runner.run_streamed(agent, given, **options)
    async for _ in result.stream_events():
        pass
    return result


def only(programs: dict[str, RecordedProgram]) -> RecordedProgram:
    (program,) = programs.values()
    return program


def named(programs: dict[str, RecordedProgram], name: str) -> RecordedProgram:
    (program,) = (each for each in programs.values() if each.start.name == name)
    return program
