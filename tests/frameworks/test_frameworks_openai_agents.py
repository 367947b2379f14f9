"""The OpenAI Agents adapter beyond the table: how runs end, whose program one is, tools, graphs."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import Any

import pytest
import sojourn
from openai_agents_fixtures import (
    SUM,
    add,
    agents_for,
    fails,
    named,
    only,
    recorded,
    run,
)
from sojourn.testing import Answer, FakeServer, LlmRequest, ToolUse
from sojourn.wire_events import AegReport

agents = pytest.importorskip("agents")
adapter = import_module("sojourn_integrations.openai_agents")

pytestmark = pytest.mark.timeout(120)
Runner = agents.Runner


# ---- how runs end


async def test_cancelling_in_the_middle_of_an_answer(server: FakeServer) -> None:
    server.reply_delay_s = 30
    async with agents_for(server) as factory:
        task = asyncio.create_task(Runner.run(factory.agent("clerk"), "Go."))
        while not server.requests:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert only(recorded(server)).status == "cancelled"
    assert sojourn.stats()["requests_cancelled"] == 1


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


async def test_parallel_agents_as_tools_know_their_calls(server: FakeServer) -> None:
    def script(request: LlmRequest) -> Any:
        text = json.dumps(request.body)
        if "You are desk." not in text:
            return "answer"
        return "done" if "call_b" in text else [ToolUse("ask", {"input": str(n)}, f"call_{n}") for n in "abc"]

    server.script = script
    async with agents_for(server) as factory:
        ask = factory.agent("expert").as_tool(tool_name="ask", tool_description="Asks.")
        await Runner.run(factory.agent("desk", ask), "Go.")
    programs = recorded(server)
    desk = named(programs, "desk")
    children = [each for each in programs.values() if each is not desk]
    assert sorted(str(each.start.call_id) for each in children) == ["call_a", "call_b", "call_c"]
    assert {each.start.parent_program_id for each in children} == {desk.start.program_id}
    assert {each.nodes for each in children} == {("expert",)}


async def test_what_a_tool_asks_of_the_model_belongs_to_the_run(server: FakeServer) -> None:
    seen = []

    @agents.function_tool
    async def think() -> str:
        """Asks by itself."""
        program = sojourn.current_program()
        seen.append(program.id if program else None)
        await factory.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "?"}]
        )
        return "so"

    @agents.function_tool
    def sync() -> str:
        """Runs in a thread, or does not."""
        program = sojourn.current_program()
        seen.append(program.id if program else None)
        return "so"

    server.script = [[ToolUse("think"), ToolUse("sync")], "hm", "done"]
    async with agents_for(server) as factory:
        await Runner.run(factory.agent("clerk", think, sync), "Go.")
        assert sojourn.current_program() is None
    program = only(recorded(server))
    assert program.nodes == ("clerk",) * 3
    assert seen == [program.start.program_id] * 2


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


async def test_the_graph_is_reported_once_for_all_runs(server: FakeServer) -> None:
    async with agents_for(server) as factory:
        desk = factory.agent("desk", handoffs=[factory.agent("expert")])
        for _ in range(3):
            await Runner.run(desk, "Go.")
    assert len(recorded(server)) == 3
    graphs = [event for event in server.program_events() if isinstance(event, AegReport)]
    assert [event.graph is not None for event in graphs] == [True, False, False]
