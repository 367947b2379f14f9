"""The raw ``openai`` client: a hand-written loop has nothing to attach to, so it says itself what it runs."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import sojourn
from scenario_types import RETRY, ProgramFact, Scenario, ToolFact
from sojourn.testing import ToolUse

ABSENT: dict[str, str] = {}

CHAT, RESPONSES = "chat", "responses"
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


def run_tool(name: str, text: str) -> str:
    if name == "upper":
        return text.upper()
    return str(len(text))


def client(base_url: str, kind: str = "OpenAI") -> Any:
    import openai

    return getattr(openai, kind)(base_url=base_url, api_key="none", max_retries=2)


def loop(base_url: str, model: str) -> Any:
    """A turn with a tool, and one without."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with client(base_url) as llm, sojourn.program("loop"):
        while True:
            answer = (
                llm.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
            )
            if not answer.tool_calls:
                return answer.content, [m["content"] for m in messages[1:] if m["role"] == "tool"]
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                with sojourn.tool_call(call.function.name, call.id):
                    result = run_tool(call.function.name, **json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses_loop(base_url: str, model: str) -> Any:
    items: list[Any] = [{"role": "user", "content": "hi"}]
    with client(base_url) as llm, sojourn.program("loop"), sojourn.step("work"):
        while True:
            answer = llm.responses.create(model=model, input=items, tools=FLAT_TOOLS)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            for call in calls:
                items.append(call.model_dump(exclude_none=True))
                with sojourn.tool_call(call.name, call.call_id):
                    result = run_tool(call.name, **json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def async_loop(base_url: str, model: str) -> Any:
    async def run() -> Any:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        async with client(base_url, "AsyncOpenAI") as llm, sojourn.program("loop"):
            answer = await llm.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            (call,) = message.tool_calls
            async with sojourn.tool_call(call.function.name, call.id):
                await asyncio.sleep(0.002)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "HI"})
            return (
                (await llm.chat.completions.create(model=model, messages=messages)).choices[0].message.content
            )

    return asyncio.run(run())


def stream(base_url: str, model: str) -> Any:
    with client(base_url) as llm, sojourn.program("stream"):
        chunks = llm.chat.completions.create(model=model, stream=True, **ASK)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def responses_stream(base_url: str, model: str) -> Any:
    async def run() -> Any:
        async with client(base_url, "AsyncOpenAI") as llm, sojourn.program("stream"):
            events = await llm.responses.create(model=model, input="hi", stream=True)
            return "".join([e.delta async for e in events if e.type == "response.output_text.delta"])

    return asyncio.run(run())


def broken_off_stream(base_url: str, model: str) -> Any:
    with client(base_url) as llm, sojourn.program("stream"):
        chunks = llm.chat.completions.create(model=model, stream=True, **ASK)
        with chunks:
            # How much is in the first piece is the network's.
            return next(text for chunk in chunks if (text := chunk.choices[0].delta.content))[:1]


class ToolBroke(Exception):
    """What the tool of ``failing_tool`` raises."""


def failing_tool(base_url: str, model: str) -> Any:
    with client(base_url) as llm, sojourn.program("loop"):
        answer = llm.chat.completions.create(model=model, tools=TOOLS, **ASK).choices[0].message
        (call,) = answer.tool_calls
        with sojourn.tool_call(call.function.name, call.id):
            raise ToolBroke


def cancelled(base_url: str, model: str) -> Any:
    """While its tool runs."""

    async def run() -> Any:
        started = asyncio.Event()

        async def agent() -> None:
            async with client(base_url, "AsyncOpenAI") as llm, sojourn.program("loop"):
                answer = await llm.chat.completions.create(model=model, tools=TOOLS, **ASK)
                (call,) = answer.choices[0].message.tool_calls
                async with sojourn.tool_call(call.function.name, call.id):
                    started.set()
                    await asyncio.sleep(30)

        task = asyncio.create_task(agent())
        await started.wait()
        task.cancel()
        await task

    return asyncio.run(run())


def parallel(base_url: str, model: str) -> Any:
    """Two tools of one answer in threads of their own."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

    def use(call: Any) -> dict[str, Any]:
        with sojourn.tool_call(call.function.name, call.id):
            result = run_tool(call.function.name, **json.loads(call.function.arguments))
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    with client(base_url) as llm, sojourn.program("loop"), ThreadPoolExecutor(2) as pool:
        answer = llm.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        jobs = [pool.submit(copy_context().run, use, call) for call in answer.tool_calls]
        messages += [job.result() for job in jobs]
        last = llm.chat.completions.create(model=model, messages=messages).choices[0].message.content
        return last, [message["content"] for message in messages[2:]]


def parallel_requests(base_url: str, model: str) -> Any:
    async def run() -> Any:
        async with client(base_url, "AsyncOpenAI") as llm, sojourn.program("map"):

            async def ask(node: str) -> str:
                with sojourn.step(node):
                    answer = await llm.chat.completions.create(model=model, **ASK)
                    return answer.choices[0].message.content

            return await asyncio.gather(*map(ask, ("left", "right", "middle")))

    return asyncio.run(run())


def sub_agent(base_url: str, model: str) -> Any:
    """A tool that is an agent itself."""
    with client(base_url) as llm, sojourn.program("outer"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        answer = llm.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        (call,) = answer.tool_calls
        with sojourn.tool_call(call.function.name, call.id), sojourn.program("inner"):
            inner = llm.chat.completions.create(model=model, **ASK).choices[0].message.content
        messages += [
            answer.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": inner},
        ]
        return inner, llm.chat.completions.create(model=model, messages=messages).choices[0].message.content


UPPER = ToolUse("upper", {"text": "hi"})
ONE_TOOL = (ProgramFact("loop", nodes=(None, None), tools=(ToolFact("upper"),)),)
STREAM = (ProgramFact("stream", nodes=(None,)),)


def scenario(row: str, play: Any, script: list[Any], programs: Any, **more: Any) -> Scenario:
    return Scenario("openai", row, ("openai",), lambda: list(script), play, tuple(programs), **more)


SCENARIOS = [
    scenario("sync", loop, [UPPER, "done"], ONE_TOOL),
    scenario(
        "sync",
        responses_loop,
        [UPPER, "done"],
        [ProgramFact("loop", nodes=("work", "work"), tools=(ToolFact("upper"),))],
        name=RESPONSES,
    ),
    scenario("async", async_loop, [UPPER, "done"], ONE_TOOL),
    scenario("stream", stream, ["one two three"], STREAM),
    scenario("stream", responses_stream, ["one two three"], STREAM, name=RESPONSES),
    scenario("stream", broken_off_stream, ["one two three"], STREAM, name="broken off"),
    scenario(
        "error",
        failing_tool,
        [UPPER],
        [ProgramFact("loop", "error", nodes=(None,), tools=(ToolFact("upper", "error"),))],
        raises="ToolBroke",
    ),
    scenario(
        "cancel",
        cancelled,
        [UPPER],
        [ProgramFact("loop", "cancelled", nodes=(None,), tools=(ToolFact("upper", "cancelled"),))],
        raises="CancelledError",
    ),
    scenario(
        "parallel",
        parallel,
        [[UPPER, ToolUse("count", {"text": "four"})], "done"],
        [ProgramFact("loop", nodes=(None, None), tools=(ToolFact("count"), ToolFact("upper")))],
    ),
    scenario(
        "parallel",
        parallel_requests,
        ["same", "same", "same"],
        [ProgramFact("map", nodes=("left", "middle", "right"))],
        name="requests",
    ),
    scenario(
        "sub_agent",
        sub_agent,
        [ToolUse("ask", {"text": "inner"}), "inner says", "done"],
        [
            ProgramFact("outer", nodes=(None, None), tools=(ToolFact("ask"),)),
            ProgramFact("inner", parent="outer", nodes=(None,)),
        ],
    ),
    scenario(RETRY, loop, [UPPER, "done"], ONE_TOOL),
]
