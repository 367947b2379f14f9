"""litellm: hand-written loops, once through the openai client (``openai/``) and once through litellm's own
HTTP (``hosted_vllm/`` and the Responses API)."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import sojourn
from scenario_types import RETRY, ProgramFact, Scenario, ToolFact
from scenarios_openai import ASK, FLAT_TOOLS, TOOLS, UPPER, ToolBroke, run_tool
from sojourn.testing import ToolUse

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a price list when imported

ABSENT: dict[str, str] = {}

OPENAI, OWN = "openai", "hosted_vllm"


def server(base_url: str, model: str, provider: str = OWN) -> dict[str, Any]:
    return {"api_base": base_url, "api_key": "none", "model": f"{provider}/{model}"}


def loop(base_url: str, model: str, provider: str = OWN, **more: Any) -> Any:
    """A turn with a tool, and one without."""
    import litellm

    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    settings = {**server(base_url, model, provider), "tools": TOOLS, **more}
    with sojourn.program("loop"):
        while True:
            answer = litellm.completion(messages=messages, **settings).choices[0].message
            if not answer.tool_calls:
                return answer.content, [m["content"] for m in messages[1:] if m["role"] == "tool"]
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                with sojourn.tool_call(call.function.name, call.id):
                    result = run_tool(call.function.name, **json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def through_openai(base_url: str, model: str) -> Any:
    return loop(base_url, model, OPENAI)


def again(base_url: str, model: str) -> Any:
    return loop(base_url, model, num_retries=2, max_retries=0)


def again_through_openai(base_url: str, model: str) -> Any:
    return loop(base_url, model, OPENAI, num_retries=2, max_retries=0)


def again_by_a_router(base_url: str, model: str) -> Any:
    import litellm

    deployment = {"model_name": "any", "litellm_params": server(base_url, model)}
    router = litellm.Router(model_list=[deployment], num_retries=2, retry_after=0)
    with sojourn.program("loop"):
        return router.completion(model="any", **ASK).choices[0].message.content


def responses_loop(base_url: str, model: str) -> Any:
    import litellm

    items: list[Any] = [{"role": "user", "content": "hi"}]
    with sojourn.program("loop"), sojourn.step("work"):
        while True:
            answer = litellm.responses(input=items, tools=FLAT_TOOLS, **server(base_url, model, OPENAI))
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output[0].content[0].text
            for call in calls:
                fields = {"type": "function_call", "call_id": call.call_id, "name": call.name}
                items.append({**fields, "arguments": call.arguments})
                with sojourn.tool_call(call.name, call.call_id):
                    result = run_tool(call.name, **json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def async_loop(base_url: str, model: str) -> Any:
    import litellm

    async def run() -> Any:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        async with sojourn.program("loop"):
            answer = await litellm.acompletion(messages=messages, tools=TOOLS, **server(base_url, model))
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            (call,) = message.tool_calls
            async with sojourn.tool_call(call.function.name, call.id):
                await asyncio.sleep(0.002)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "HI"})
            answer = await litellm.acompletion(messages=messages, **server(base_url, model))
            return answer.choices[0].message.content

    return asyncio.run(run())


def stream(base_url: str, model: str, provider: str = OWN) -> Any:
    import litellm

    with sojourn.program("stream"):
        chunks = litellm.completion(stream=True, **ASK, **server(base_url, model, provider))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def stream_through_openai(base_url: str, model: str) -> Any:
    return stream(base_url, model, OPENAI)


def async_stream(base_url: str, model: str) -> Any:
    import litellm

    async def run() -> Any:
        async with sojourn.program("stream"):
            chunks = await litellm.acompletion(stream=True, **ASK, **server(base_url, model))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    return asyncio.run(run())


def responses_stream(base_url: str, model: str) -> Any:
    import litellm

    with sojourn.program("stream"):
        events = litellm.responses(input="hi", stream=True, **server(base_url, model, OPENAI))
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def failing_tool(base_url: str, model: str) -> Any:
    import litellm

    with sojourn.program("loop"):
        answer = litellm.completion(tools=TOOLS, **ASK, **server(base_url, model)).choices[0].message
        (call,) = answer.tool_calls
        with sojourn.tool_call(call.function.name, call.id):
            raise ToolBroke


def cancelled(base_url: str, model: str) -> Any:
    """While its tool runs."""
    import litellm

    async def run() -> Any:
        started = asyncio.Event()

        async def agent() -> None:
            async with sojourn.program("loop"):
                answer = await litellm.acompletion(tools=TOOLS, **ASK, **server(base_url, model))
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
    """Two tools of one answer at the same time."""
    import litellm

    async def run() -> Any:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

        async def use(call: Any) -> dict[str, Any]:
            async with sojourn.tool_call(call.function.name, call.id):
                await asyncio.sleep(0.002)
                result = run_tool(call.function.name, **json.loads(call.function.arguments))
            return {"role": "tool", "tool_call_id": call.id, "content": result}

        async with sojourn.program("loop"):
            answer = await litellm.acompletion(messages=messages, tools=TOOLS, **server(base_url, model))
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages += await asyncio.gather(*map(use, message.tool_calls))
            answer = await litellm.acompletion(messages=messages, **server(base_url, model))
            return answer.choices[0].message.content, [m["content"] for m in messages[2:]]

    return asyncio.run(run())


def sub_agent(base_url: str, model: str) -> Any:
    """A tool that is an agent itself."""
    import litellm

    settings = server(base_url, model)
    with sojourn.program("outer"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        answer = litellm.completion(messages=messages, tools=TOOLS, **settings).choices[0].message
        (call,) = answer.tool_calls
        with sojourn.tool_call(call.function.name, call.id), sojourn.program("inner"):
            inner = litellm.completion(**ASK, **settings).choices[0].message.content
        messages += [
            answer.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": inner},
        ]
        return inner, litellm.completion(messages=messages, **settings).choices[0].message.content


ONE_TOOL = (ProgramFact("loop", nodes=(None, None), tools=(ToolFact("upper"),)),)
STREAM = (ProgramFact("stream", nodes=(None,)),)


def scenario(row: str, play: Any, script: list[Any], programs: Any, **more: Any) -> Scenario:
    return Scenario("litellm", row, ("litellm",), lambda: list(script), play, tuple(programs), **more)


SCENARIOS = [
    scenario("sync", loop, [UPPER, "done"], ONE_TOOL),
    scenario("sync", through_openai, [UPPER, "done"], ONE_TOOL, name="openai"),
    scenario(
        "sync",
        responses_loop,
        [UPPER, "done"],
        [ProgramFact("loop", nodes=("work", "work"), tools=(ToolFact("upper"),))],
        name="responses",
    ),
    scenario("async", async_loop, [UPPER, "done"], ONE_TOOL),
    scenario("stream", stream, ["one two three"], STREAM),
    scenario("stream", stream_through_openai, ["one two three"], STREAM, name="openai"),
    scenario("stream", async_stream, ["one two three"], STREAM, name="async"),
    scenario("stream", responses_stream, ["one two three"], STREAM, name="responses"),
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
        "sub_agent",
        sub_agent,
        [ToolUse("ask", {"text": "inner"}), "inner says", "done"],
        [
            ProgramFact("outer", nodes=(None, None), tools=(ToolFact("ask"),)),
            ProgramFact("inner", parent="outer", nodes=(None,)),
        ],
    ),
    scenario(RETRY, again, [UPPER, "done"], ONE_TOOL),
    scenario(RETRY, again_through_openai, [UPPER, "done"], ONE_TOOL, name="openai"),
    scenario(RETRY, again_by_a_router, ["done"], [ProgramFact("loop", nodes=(None,))], name="router"),
]
