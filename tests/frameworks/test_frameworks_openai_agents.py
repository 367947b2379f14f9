"""The OpenAI Agents adapter beyond the table: how runs end, whose program one is, tools, graphs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sojourn
from openai_agents_fixtures import SUM, OpenAIAgents, add, agents_for, fails, named, only, recorded, run
from recorded_programs import recorded_programs
from sojourn.testing import Answer, FakeServer, LlmRequest, ToolUse

agents = pytest.importorskip("agents")
adapter = import_module("sojourn_integrations.openai_agents")

pytestmark = pytest.mark.timeout(120)
Runner = agents.Runner


# ---- how runs end


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tripwire_is_an_error_and_its_own_run_a_child(server: FakeServer, streamed: bool) -> None:
    def script(request: LlmRequest) -> Answer:
        return Answer("fine" if "clerk" in json.dumps(request.body) else "trip")

    server.script = script
    async with agents_for(server) as factory:
        judge = factory.agent("judge")

        @agents.input_guardrail(run_in_parallel=False)
        async def check(context: Any, agent: Any, given: Any) -> Any:
            verdict = await Runner.run(judge, given)
            return agents.GuardrailFunctionOutput(
                output_info=None, tripwire_triggered=verdict.final_output == "trip"
            )

        clerk = factory.agent("clerk", input_guardrails=[check])
        with pytest.raises(agents.InputGuardrailTripwireTriggered):
            await run(clerk, "Go.", streamed=streamed)
    programs = recorded(server)
    clerk_told, judge_told = named(programs, "clerk"), named(programs, "judge")
    assert (clerk_told.status, judge_told.status) == ("error", "ok")
    assert judge_told.start.parent_program_id == clerk_told.start.program_id
    assert judge_told.start.call_id is None


# ---- whose program


async def test_an_explicit_program_is_the_run(server: FakeServer) -> None:
    server.script = [SUM, "5", "6"]
    async with agents_for(server) as factory:
        with sojourn.program("mine") as program:
            await Runner.run(factory.agent("clerk", add()), "Go.")
            await Runner.run(factory.agent("scribe"), "Go on.")
            assert program.is_open
    mine = only(recorded(server))
    assert (mine.start.name, mine.status, mine.nodes) == ("mine", "ok", ("clerk", "clerk", "scribe"))
    assert [tool.tool for tool in mine.tools] == ["add"]


async def test_a_run_inside_a_tool_call_is_its_child(server: FakeServer) -> None:
    async with agents_for(server) as factory:
        with sojourn.program("mine"), sojourn.tool_call("delegate", "call-9"):
            await Runner.run(factory.agent("clerk"), "Go.")
    programs = recorded(server)
    clerk = named(programs, "clerk")
    assert clerk.start.parent_program_id == named(programs, "mine").start.program_id
    assert clerk.start.call_id == "call-9"


# ---- graphs


def an_agent(name: str, *tools: Any, **fields: Any) -> Any:
    return agents.Agent(name=name, tools=list(tools), **fields)


def test_the_graph_of_handoffs() -> None:
    expert, scribe = an_agent("expert", add(), fails()), an_agent("scribe")
    desk = an_agent("desk", handoffs=[expert, scribe])
    scribe.handoffs.append(desk)
    graph = adapter.graph_of(desk)
    assert dict(graph.nodes) == {"desk": (), "expert": ("add", "fails"), "scribe": ()}
    assert set(graph.edges) == {
        ("__start__", "desk"),
        ("desk", "expert"),
        ("desk", "scribe"),
        ("expert", "expert"),
        ("scribe", "desk"),
        ("desk", "__end__"),
        ("expert", "__end__"),
        ("scribe", "__end__"),
    }
    assert graph.complete
    assert adapter.graph_of(desk) is graph
    desk.tools.append(expert.as_tool(tool_name="ask", tool_description="Asks."))
    again = adapter.graph_of(desk)
    assert again.nodes["desk"] == ("ask",)
    assert ("desk", "desk") in again.edges


# ---- the user's own hooks and runners


HOOKS = ("agent_start", "agent_end", "handoff", "tool_start", "tool_end", "llm_start", "llm_end")


def recording(log: list[Any]) -> Any:
    """The user's hooks, which write down what they get."""

    def hook(name: str) -> Any:
        async def record(self: Any, context: Any, *given: Any, **more: Any) -> None:
            given = *given, *more.values()
            told = [getattr(each, "name", each) for each in given if not hasattr(each, "usage")]
            log.append((name, getattr(context, "tool_call_id", None), *map(str, told)))

        return record

    mine = types.new_class("Mine", (agents.RunHooks,))
    for name in HOOKS:
        setattr(mine, f"on_{name}", hook(name))
    return mine()


async def test_the_users_hooks_see_the_same_calls() -> None:
    async def play(instrumented: bool) -> list[Any]:
        log: list[Any] = []
        use = [ToolUse("transfer_to_expert", {}, "h1"), SUM._replace(id="s1"), "5"]
        with FakeServer(use) as server:
            if instrumented:
                sojourn.init(server.url, probe_timeout_s=5)
            factory = OpenAIAgents(server.base_url, "tiny")
            async with factory.client:
                desk = factory.agent("desk", handoffs=[factory.agent("expert", add())])
                await Runner.run(desk, "Go.", hooks=recording(log))
            if instrumented:
                assert only(recorded(server)).nodes == ("desk", "expert", "expert")
        return log

    plain = await play(instrumented=False)
    assert await play(instrumented=True) == plain
    assert ("handoff", None, "desk", "expert") in plain
    assert {name for name, *_ in plain} == set(HOOKS)


@pytest.mark.parametrize("method", ["on_agent_start", "on_tool_end"])
async def test_what_the_users_hooks_raise_passes_unchanged(server: FakeServer, method: str) -> None:
    class OurError(BaseException):
        pass

    async def raising(*args: Any, **kwargs: Any) -> None:
        raise OurError(method)

    server.script = [SUM, "5"]
    hooks = recording([])
    setattr(hooks, method, raising)
    async with agents_for(server) as factory:
        with pytest.raises(OurError, match=method):
            await Runner.run(factory.agent("clerk", add()), "Go.", hooks=hooks)
        await asyncio.sleep(0)
        program = only(recorded(server))
    assert program.status == "error"
    assert len(program.tool_starts) == len(program.tool_stops)


async def test_the_users_runner_does_the_work_and_comes_back(server: FakeServer) -> None:
    run = import_module("agents.run")
    before = run.get_default_agent_runner()
    calls = []

    class Mine(run.AgentRunner):  # type: ignore[misc, name-defined]
        colour = "blue"

        async def run(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:
            calls.append(starting_agent.name)
            return await super().run(starting_agent, input, **kwargs)

    mine = Mine()
    run.set_default_agent_runner(mine)
    try:
        async with agents_for(server) as factory:
            assert run.get_default_agent_runner().colour == "blue"
            await Runner.run(factory.agent("clerk"), "Go.")
            assert calls == ["clerk"]
            assert only(recorded(server)).nodes == ("clerk",)
            sojourn.uninstrument("openai_agents")
            assert run.get_default_agent_runner() is mine
    finally:
        run.set_default_agent_runner(before)


# ---- without the patch


async def test_only_the_wrapped_agent_is_reported(server: FakeServer) -> None:
    server.script = [ToolUse("ask", {"input": "go"}), "so", "done", "alone"]
    async with agents_for(server) as factory:
        sojourn.uninstrument("openai_agents")
        ask = factory.agent("expert").as_tool(tool_name="ask", tool_description="Asks.")
        desk = sojourn.wrap(factory.agent("desk", ask))
        await Runner.run(desk, "Go.")
        await Runner.run(factory.agent("stranger"), "Go.")
    programs = recorded_programs(server)
    assert sojourn.flush(60)
    starts = {each.start.name for each in recorded_programs(server).values()}
    assert {"desk", "expert"} <= starts
    assert "stranger" not in starts
    assert len(programs) >= 2


# ---- faults


FOREIGN = """
import logging, sys
records = []
class Handler(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
logging.getLogger("sojourn").addHandler(Handler())
import sojourn
sojourn.init("http://127.0.0.1:9", dialect="sojourn")
import agents
assert agents.MINE
stats = sojourn.stats()
print(stats.instrumented, stats["attach_error"], records)
"""


def test_a_user_package_named_agents_is_not_patched(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("MINE = True\n")
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert "openai_agents" not in done.stdout
    assert done.stdout.strip().endswith("0 []"), done.stdout
