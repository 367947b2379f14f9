"""Scenarios of CrewAI: crews, agents and flows. In release 1.0 the model writes tool calls as text."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from scenario_types import ToolFact, fact, scenarios_of
from sojourn.testing import Reply, ToolUse

ABSENT = {"cancel": "a crew runs its tools in threads, which Python cannot cancel"}


def native() -> bool:
    """Whether tool calls are no text."""
    with suppress(PackageNotFoundError):
        return not version("crewai").startswith("1.0.")
    return True


@cache
def library() -> Any:
    """Import CrewAI so that it neither calls home nor keeps results below the home directory."""
    storage = tempfile.mkdtemp(prefix="sojourn-crewai-")
    atexit.register(shutil.rmtree, storage, ignore_errors=True)
    os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false")
    os.environ.update(CREWAI_TESTING="true", CREWAI_STORAGE_DIR=storage)
    import crewai

    return crewai


def use(name: str) -> Reply:
    """The model's call of a tool."""
    arguments = {"text": "hi"}
    text = f"Thought: a tool\nAction: {name}\nAction Input: {json.dumps(arguments)}"
    return ToolUse(name, arguments) if native() else text


def final(text: str) -> Reply:
    return text if native() else f"Thought: I now know the final answer\nFinal Answer: {text}"


def llm(base_url: str, model: str, **more: Any) -> Any:
    return library().LLM(model=f"openai/{model}", base_url=base_url, api_key="none", max_tokens=64, **more)


def crew(
    model: Any, *roles: str, inner: Any = None, in_thread: bool = False, name: str = "team", **options: Any
) -> Any:
    """A crew with a task for each role. ``inner`` is a crew that the tool ``ask`` runs. ``options`` are of
    the agents."""
    from crewai import Agent, Crew, Task
    from crewai.tools import tool

    @tool
    def upper(text: str) -> str:
        """In capitals."""
        return text.upper()

    @tool
    def count(text: str) -> str:
        """Its length."""
        return str(len(text))

    @tool
    def broken(text: str) -> str:
        """Does not work."""
        raise TimeoutError(text)

    @tool
    def ask(text: str) -> str:
        """Asks another crew."""
        return str(inner.kickoff().raw)

    agents = [
        Agent(role=role, goal="g", backstory="b", llm=model, tools=[upper, count, broken, ask], **options)
        for role in roles or ("writer",)
    ]
    tasks = [
        Task(
            description="say hi",
            expected_output="a word",
            agent=agent,
            async_execution=in_thread and agent is not agents[-1],
        )
        for agent in agents
    ]
    return Crew(name=name, agents=agents, tasks=tasks)


def kickoff(base_url: str, model: str, *roles: str, in_thread: bool = False, **more: Any) -> Any:
    return crew(llm(base_url, model, **more), *roles, in_thread=in_thread).kickoff().raw


def limited(base_url: str, model: str) -> Any:
    return crew(llm(base_url, model), "first", "second", max_iter=4).kickoff().raw


def in_async(base_url: str, model: str) -> Any:
    made = crew(llm(base_url, model))
    return asyncio.run(getattr(made, "akickoff", made.kickoff_async)()).raw


def nested(base_url: str, model: str) -> Any:
    at = llm(base_url, model)
    return crew(at, name="outer", inner=crew(at, "helper", name="inner")).kickoff().raw


def lone_agent(base_url: str, model: str) -> Any:
    agent = library().Agent(role="loner", goal="g", backstory="b", llm=llm(base_url, model))
    return agent.kickoff("say hi").raw


def flow(base_url: str, model: str) -> Any:
    at = llm(base_url, model)
    from crewai.flow.flow import Flow, listen, start

    class Report(Flow):  # type: ignore[type-arg]
        @start()
        def plan(self) -> Any:
            return at.call("plan it")

        @listen(plan)
        def write(self, plan: Any) -> Any:
            return crew(at).kickoff().raw

    return Report().kickoff()


scenario = scenarios_of("crewai", "crewai")
TEAM = fact("team", "writer writer", "upper")
DONE = final("done")
ONE_TOOL = [use("upper"), DONE]
BOTH = [ToolUse("upper", {"text": "hi"}), ToolUse("count", {"text": "hi"})]
"""Two calls in one answer, in threads, where the model may ask so."""
TWO_CALLS = [BOTH, DONE] if native() else [use("upper"), use("count"), DONE]


def in_threads(base_url: str, model: str) -> Any:
    return kickoff(base_url, model, "first", "second", in_thread=True)


# With calls as text CrewAI tries a tool three times, and answers have one call.
TRIES, TURNS = (1, 2) if native() else (3, 3)
BROKEN = fact("team", "writer writer", *[ToolFact("broken", "timeout")] * TRIES)
TWO_TOOLS = fact("team", "writer " * TURNS, "count", "upper")
NESTED = fact("outer", "writer writer", "ask"), fact("inner", "helper", parent="outer")
FLOW = fact("flow", "-"), fact("crew", "writer writer", "upper", parent="flow")

SCENARIOS = [
    scenario(
        "sync",
        limited,
        [*ONE_TOOL, final("two")],
        fact("team", "first first second", "upper", limit=8),
        name="limit",
    ),
    scenario("sync", kickoff, ONE_TOOL, TEAM),
    scenario("async", in_async, ONE_TOOL, TEAM),
    scenario("stream", partial(kickoff, stream=True), ONE_TOOL, TEAM),
    scenario("error", kickoff, [use("broken"), DONE], BROKEN),
    scenario(
        "parallel", in_threads, [final("one"), final("two")], fact("team", "first second"), name="tasks"
    ),
    scenario("sub_agent", nested, [use("ask"), final("inner says"), DONE], *NESTED),
    scenario("sync", lone_agent, [final("hi")], fact("loner", "loner"), name="agent"),
    scenario("sync", flow, ["the plan", *ONE_TOOL], *FLOW, name="flow"),
    scenario("parallel", kickoff, TWO_CALLS, TWO_TOOLS),
]
