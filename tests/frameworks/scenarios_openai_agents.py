"""Scenarios of the OpenAI Agents SDK, as its users write it: over chat completions and over Responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sojourn
from openai_agents_fixtures import SUM, OpenAIAgents, add, fails, waiting
from scenario_types import ProgramFact, Scenario, ToolFact, fact
from sojourn.testing import Reply, ToolUse
from stream_pieces import StreamPiece

ABSENT: dict[str, str] = {}


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
    task = asyncio.create_task(Runner.run(factory.agent("clerk", wait), "Wait."))
    await begun.wait()
    task.cancel()
    return outputs(await task)


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


CLERK = fact("clerk", "clerk clerk", "add")


def scenario(
    row: str,
    name: str,
    script: Sequence[Reply],
    play: Callable[[str, str], Any],
    *programs: ProgramFact,
    raises: str | None = None,
) -> Scenario:
    """Return a scenario of this framework, whose runs have a limit of ten turns if nothing else is said."""
    programs = tuple(each if each.steps_left else each.limited(10) for each in programs)
    return Scenario("openai_agents", row, ("agents",), lambda: script, play, programs, raises, name)


WAITED = fact("clerk", "clerk", ToolFact("wait", "cancelled"), status="cancelled")
TURNS = fact("clerk", "clerk clerk", "add", "add", status="error", limit=2)
PLACES = [ToolUse("look", {"place": place}) for place in ("attic", "barn", "cellar")]
DELEGATED = [ToolUse("ask", {"input": "2 and 3"}), SUM, "5", "it is 5"]
BROKEN = fact("clerk", "clerk", ToolFact("fails", "error"), status="error")
TRIPPED = fact("clerk", "clerk", status="error")

SCENARIOS = [
    scenario("sync", "", [SUM, "5"], play_sync(responses=False), CLERK),
    scenario("sync", "responses", [SUM, "5"], play_sync(responses=True), CLERK),
    scenario(
        "async",
        "handoff",
        [ToolUse("transfer_to_expert"), SUM, "5"],
        in_loop(handed_over),
        fact("desk", "desk expert expert", "add"),
    ),
    scenario("stream", "", [SUM, "that is 5"], in_loop(streamed), CLERK),
    scenario("stream", "responses", [SUM, "that is 5"], in_loop(streamed, responses=True), CLERK),
    scenario("error", "tool", [ToolUse("fails")], in_loop(raising), BROKEN, raises="UserError"),
    scenario("error", "turns", [SUM] * 3, in_loop(too_many_turns), TURNS, raises="MaxTurnsExceeded"),
    scenario(
        "error",
        "guardrail",
        ["a secret"],
        in_loop(guarded),
        TRIPPED,
        raises="OutputGuardrailTripwireTriggered",
    ),
    scenario(
        "cancel", "tool", [ToolUse("wait")], in_loop(cancelled_in_tool), WAITED, raises="CancelledError"
    ),
    scenario("cancel", "stream", [ToolUse("wait")], in_loop(stream_cancelled), WAITED),
    scenario(
        "parallel", "", [PLACES, "nothing"], in_loop(in_parallel), fact("clerk", "clerk clerk", *["look"] * 3)
    ),
    scenario(
        "sub_agent",
        "",
        DELEGATED,
        in_loop(as_tool),
        fact("desk", "desk desk", "ask"),
        fact("expert", "expert expert", "add", parent="desk"),
    ),
    scenario(
        "sub_agent",
        "opened by hand",
        [ToolUse("look"), "before", "in it", "after", "done"],
        in_loop(own_program),
    )._replace(
        programs=(
            fact("all", "", "clerk"),
            fact("clerk", "clerk clerk clerk clerk", "look", limit=10, parent="all"),
            fact("mine", "-"),
        )
    ),
]
