"""Hand-written agent loops over a chat-completions function, for openai and litellm, and what they report.

``complete`` is ``openai.OpenAI().chat.completions.create`` or ``litellm.completion`` with all arguments but
the messages, the tools and ``stream``; ``acomplete`` is the asynchronous one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import sojourn
from scenario_types import Scenario, ToolFact, cancel_once, fact, scenarios_of
from sojourn.testing import ToolUse

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("upper", "count", "ask")
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK = {"messages": [{"role": "user", "content": "hi"}]}

Complete = Callable[..., Any]
SHOWN_BY_OPENAI = dict.fromkeys(
    ("error", "cancel", "parallel", "sub_agent"),
    "what the user's loop does around its requests is the same for each client; scenarios_openai shows it",
)
"""``ABSENT`` of the other clients."""


class ToolBroke(Exception):
    """Error that the tool of ``failing_tool`` raises."""


def run_tool(name: str, text: str) -> str:
    return text.upper() if name == "upper" else str(len(text))


def tool_message(call: Any) -> dict[str, Any]:
    """Run a tool call of an answer, report it to sojourn, and return its message."""
    with sojourn.tool_call(call.function.name, call.id):
        result = run_tool(call.function.name, **json.loads(call.function.arguments))
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
                    result = run_tool(call.name, **json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def tools_in_threads(complete: Complete) -> Any:
    """Two tools of one answer, each in a thread."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with sojourn.program("loop"), ThreadPoolExecutor(2) as pool:
        answer = complete(messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        jobs = [pool.submit(copy_context().run, tool_message, call) for call in answer.tool_calls]
        messages += [job.result() for job in jobs]
        last = complete(messages=messages).choices[0].message.content
        return last, [message["content"] for message in messages[2:]]


def stream(complete: Complete) -> str:
    with sojourn.program("stream"):
        return "".join(chunk.choices[0].delta.content or "" for chunk in complete(stream=True, **ASK))


def failing_tool(complete: Complete) -> Any:
    with sojourn.program("loop"):
        (call,) = complete(tools=TOOLS, **ASK).choices[0].message.tool_calls
        with sojourn.tool_call(call.function.name, call.id):
            raise ToolBroke


async def cancelled_tool(acomplete: Complete) -> None:
    """A program that is cancelled while its tool runs."""
    started = asyncio.Event()

    async def agent() -> None:
        async with sojourn.program("loop"):
            (call,) = (await acomplete(tools=TOOLS, **ASK)).choices[0].message.tool_calls
            async with sojourn.tool_call(call.function.name, call.id):
                started.set()
                await asyncio.sleep(60)

    await cancel_once(started, agent())


def sub_agent(complete: Complete) -> Any:
    """An agent whose tool is an agent itself."""
    with sojourn.program("outer"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        answer = complete(messages=messages, tools=TOOLS).choices[0].message
        (call,) = answer.tool_calls
        with sojourn.tool_call(call.function.name, call.id), sojourn.program("inner"):
            inner = complete(**ASK).choices[0].message.content
        messages += [
            answer.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": inner},
        ]
        return inner, complete(messages=messages).choices[0].message.content


UPPER = ToolUse("upper", {"text": "hi"})
ONE_TOOL = ((UPPER, "done"), fact("loop", "- -", "upper"))
"""The script of a scenario, and the program that it reports. The following constants have the same form."""
RESPONSES = ((UPPER, "done"), fact("loop", "work work", "upper"))
STREAM = (("one two three",), fact("stream", "-"))
FAILED = ((UPPER,), fact("loop", "-", ToolFact("upper", "error"), status="error"))
CANCELLED = ((UPPER,), fact("loop", "-", ToolFact("upper", "cancelled"), status="cancelled"))
TWO_TOOLS = (([UPPER, ToolUse("count", {"text": "four"})], "done"), fact("loop", "- -", "count", "upper"))
SUB_AGENT = (
    (ToolUse("ask", {"text": "inner"}), "inner says", "done"),
    fact("outer", "- -", "ask"),
    fact("inner", "-", parent="outer"),
)


def scenario(framework: str, row: str, play: Any, case: tuple[Any, ...], name: str = "") -> Scenario:
    """Return a scenario of one of the cases above."""
    script, *programs = case
    raises = {"error": "ToolBroke", "cancel": "CancelledError"}.get(row)
    return scenarios_of(framework, framework)(row, play, script, *programs, raises=raises, name=name)
