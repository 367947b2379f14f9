"""Hand-written agent loops over a chat-completions function, for openai and litellm, and what they report.

``complete`` is ``openai.OpenAI().chat.completions.create`` or ``litellm.completion`` with all arguments but
the messages, the tools and ``stream``; ``acomplete`` is the asynchronous one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import sojourn
from scenario_types import Scenario, fact, scenarios_of
from sojourn.testing import ToolUse

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "upper", "description": "upper", "parameters": SCHEMA}}]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK = {"messages": [{"role": "user", "content": "hi"}]}

Complete = Callable[..., Any]
ABSENT = dict.fromkeys(
    ("error", "cancel", "parallel", "sub_agent"),
    "a client knows no tools and agents; how sojourn's own scopes end and nest is shown by tests/sdk",
)


def upper(arguments: str) -> str:
    """The only tool."""
    return str(json.loads(arguments)["text"].upper())


def tool_message(call: Any) -> dict[str, Any]:
    """Run a tool call of an answer, report it to sojourn, and return its message."""
    with sojourn.tool_call(call.function.name, call.id):
        result = upper(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def tool_loop(complete: Complete) -> Any:
    """Loop until an answer calls no tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with sojourn.program("loop"):
        while True:
            answer = complete(messages=messages, tools=TOOLS).choices[0].message
            if not answer.tool_calls:
                return answer.content, [m["content"] for m in messages[1:] if m["role"] == "tool"]
            messages += [answer.model_dump(exclude_none=True), *map(tool_message, answer.tool_calls)]


async def async_tool_loop(acomplete: Complete) -> Any:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    async with sojourn.program("loop"):
        message = (await acomplete(messages=messages, tools=TOOLS)).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        (call,) = message.tool_calls
        async with sojourn.tool_call(call.function.name, call.id):
            await asyncio.sleep(0)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "HI"})
        return (await acomplete(messages=messages)).choices[0].message.content


def response_loop(respond: Complete) -> Any:
    """The loop of ``tool_loop`` over the Responses API."""
    items: list[Any] = [{"role": "user", "content": "hi"}]
    with sojourn.program("loop"), sojourn.step("work"):
        while True:
            answer = respond(input=items, tools=FLAT_TOOLS)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output[0].content[0].text
            for call in calls:
                fields = {"type": "function_call", "call_id": call.call_id, "name": call.name}
                items.append({**fields, "arguments": call.arguments})
                with sojourn.tool_call(call.name, call.call_id):
                    result = upper(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def stream(complete: Complete) -> str:
    with sojourn.program("stream"):
        return "".join(chunk.choices[0].delta.content or "" for chunk in complete(stream=True, **ASK))


UPPER = ToolUse("upper", {"text": "hi"})
ONE_TOOL = ((UPPER, "done"), fact("loop", "- -", "upper"))
"""The script of a scenario, and the program that it reports. The following constants have the same form."""
RESPONSES = ((UPPER, "done"), fact("loop", "work work", "upper"))
STREAM = (("one two three",), fact("stream", "-"))


def scenario(framework: str, row: str, play: Any, case: tuple[Any, ...], name: str = "") -> Scenario:
    """Return a scenario of one of the cases above."""
    script, *programs = case
    return scenarios_of(framework, framework)(row, play, script, *programs, name=name)
