"""Scenarios of the OpenAI Agents SDK, as its users write it: over chat completions and over Responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sojourn
from openai_agents_fixtures import SUM, OpenAIAgents, add, fails, waiting
from scenario_types import ProgramFact, Scenario, StreamPiece, ToolFact, cancel_once, fact, scenarios_of
from sojourn.testing import Reply, ToolUse


def in_loop(play: Callable[[OpenAIAgents], Awaitable[Any]], **options: Any) -> Callable[[str, str], Any]:
    """Return a play that runs ``play`` in its own event loop."""

    async def main(base_url: str, model: str) -> Any:
        factory = OpenAIAgents(base_url, model, **options)
        async with factory.client:
            return await play(factory)

    return lambda base_url, model: asyncio.run(main(base_url, model))


def outputs(result: Any) -> tuple[Any, list[str]]:
    """Final output of a run, and the kinds of its items and the outputs of its tools."""
    items = [
        f"{item.type}: {item.output}" if item.type == "tool_call_output_item" else item.type
        for item in result.new_items
    ]
    return result.final_output, items


def play_sync(*, responses: bool) -> Callable[[str, str], Any]:
    def play(base_url: str, model: str) -> Any:
        from agents import Runner

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            factory = OpenAIAgents(base_url, model, responses=responses)
            result = Runner.run_sync(factory.agent("clerk", add()), "How much is 2 and 3?")
            loop.run_until_complete(factory.client.close())
            return outputs(result)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    return play


async def handed_over(factory: OpenAIAgents) -> Any:
    from agents import Runner

    expert = factory.agent("expert", add())
    return outputs(await Runner.run(factory.agent("desk", handoffs=[expert]), "How much is 2 and 3?"))


def _kind(event: Any) -> str | StreamPiece:
    """Text of a stream's text event, else the kind of the event. Other content depends on where the stream
    was cut."""
    if event.type != "raw_response_event":
        return event.type
    delta = getattr(event.data, "delta", None)
    return StreamPiece(event.type, delta if isinstance(delta, str) else "")


async def streamed(factory: OpenAIAgents) -> Any:
    from agents import Runner

    result = Runner.run_streamed(factory.agent("clerk", add()), "How much is 2 and 3?")
    return outputs(result), [_kind(event) async for event in result.stream_events()]


async def raising(factory: OpenAIAgents) -> Any:
    from agents import Runner

    return outputs(await Runner.run(factory.agent("clerk", fails(failure_error_function=None)), "Try."))


async def too_many_turns(factory: OpenAIAgents) -> Any:
    from agents import Runner

    return outputs(await Runner.run(factory.agent("clerk", add()), "Count.", max_turns=2))


async def guarded(factory: OpenAIAgents) -> Any:
    from agents import GuardrailFunctionOutput, Runner, output_guardrail

    @output_guardrail
    async def no_secrets(context: Any, agent: Any, output: Any) -> Any:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered="secret" in output)

    return outputs(await Runner.run(factory.agent("clerk", output_guardrails=[no_secrets]), "Tell."))


async def cancelled_in_tool(factory: OpenAIAgents) -> Any:
    from agents import Runner

    wait, begun = waiting()
    return outputs(await cancel_once(begun, Runner.run(factory.agent("clerk", wait), "Wait.")))


async def stream_cancelled(factory: OpenAIAgents) -> Any:
    from agents import Runner

    wait, begun = waiting()
    result = Runner.run_streamed(factory.agent("clerk", wait), "Wait.")
    loop = getattr(result, "run_loop_task", None) or result._run_impl_task
    await begun.wait()
    result.cancel()
    await asyncio.wait([loop])
    return result.final_output


async def in_parallel(factory: OpenAIAgents) -> Any:
    from agents import Runner, function_tool

    @function_tool
    async def look(place: str) -> str:
        """What is there."""
        await asyncio.sleep(0.01)
        return f"{place} is empty"

    return outputs(await Runner.run(factory.agent("clerk", look), "Look everywhere."))


async def as_tool(factory: OpenAIAgents) -> Any:
    from agents import Runner

    expert = factory.agent("expert", add())
    ask = expert.as_tool(tool_name="ask", tool_description="Asks the expert.")
    return outputs(await Runner.run(factory.agent("desk", ask), "How much is 2 and 3?"))


async def own_program(factory: OpenAIAgents) -> Any:
    """The code of a tool opens a program, less deep than the run's, and asks before, in and after it."""
    from agents import Runner, function_tool

    async def ask() -> str:
        answer = await factory.client.chat.completions.create(model=factory.model.model, messages=[])
        return str(answer.choices[0].message.content)

    @function_tool
    async def look() -> str:
        """Looks."""
        before = await ask()
        with sojourn.program("mine", parent=None):
            inside = await ask()
        return " ".join((before, inside, await ask()))

    with sojourn.program("all"), sojourn.tool_call("clerk"):
        return outputs(await Runner.run(factory.agent("clerk", look), "Look."))


def scenario(row: str, play: Any, script: Sequence[Reply], *programs: ProgramFact, **more: Any) -> Scenario:
    """Return a scenario of this framework, whose runs have a limit of ten turns if nothing else is said."""
    limited = (each if each.steps_left else each.limited(10) for each in programs)
    run = in_loop(play) if asyncio.iscoroutinefunction(play) else play
    return scenarios_of("openai_agents", "agents")(row, run, script, *limited, **more)


CLERK = fact("clerk", "clerk clerk", "add")
WAITED = fact("clerk", "clerk", ToolFact("wait", "cancelled"), status="cancelled")
TURNS = fact("clerk", "clerk clerk", "add", "add", status="error", limit=2)
PLACES = [ToolUse("look", {"place": place}) for place in ("attic", "barn", "cellar")]
DELEGATED = [ToolUse("ask", {"input": "2 and 3"}), SUM, "5", "it is 5"]
BROKEN = fact("clerk", "clerk", ToolFact("fails", "error"), status="error")
TRIPPED = fact("clerk", "clerk", status="error")
HANDED = fact("desk", "desk expert expert", "add")
DESK = fact("desk", "desk desk", "ask"), fact("expert", "expert expert", "add", parent="desk")
OWN = (
    fact("all", "", "clerk"),
    fact("clerk", "clerk clerk clerk clerk", "look", limit=10, parent="all"),
    fact("mine", "-"),
)
TRIPWIRE = "OutputGuardrailTripwireTriggered"

SCENARIOS = [
    scenario("sync", play_sync(responses=False), [SUM, "5"], CLERK),
    scenario("sync", play_sync(responses=True), [SUM, "5"], CLERK, name="responses"),
    scenario("async", handed_over, [ToolUse("transfer_to_expert"), SUM, "5"], HANDED, name="handoff"),
    scenario("stream", streamed, [SUM, "that is 5"], CLERK),
    scenario("stream", in_loop(streamed, responses=True), [SUM, "that is 5"], CLERK, name="responses"),
    scenario("error", raising, [ToolUse("fails")], BROKEN, name="tool", raises="UserError"),
    scenario("error", too_many_turns, [SUM] * 3, TURNS, name="turns", raises="MaxTurnsExceeded"),
    scenario("error", guarded, ["a secret"], TRIPPED, name="guardrail", raises=TRIPWIRE),
    scenario("cancel", cancelled_in_tool, [ToolUse("wait")], WAITED, name="tool", raises="CancelledError"),
    scenario("cancel", stream_cancelled, [ToolUse("wait")], WAITED, name="stream"),
    scenario("parallel", in_parallel, [PLACES, "nothing"], fact("clerk", "clerk clerk", *["look"] * 3)),
    scenario("sub_agent", as_tool, DELEGATED, *DESK),
    scenario(
        "sub_agent", own_program, [ToolUse("look"), "before", "in it", "after", "done"], name="opened by hand"
    )._replace(programs=OWN),
]
