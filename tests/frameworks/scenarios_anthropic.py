"""The raw ``anthropic`` client in the hand-written loops of ``chat_loops``, over the Messages API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import chat_loops as loops
import sojourn
from scenario_types import RETRY

ABSENT = loops.ABSENT


def client(base_url: str, kind: str = "Anthropic") -> Any:
    import anthropic

    return getattr(anthropic, kind)(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=2)


def arguments(messages: list[dict[str, Any]], tools: Any = ()) -> dict[str, Any]:
    """A chat's messages and tools as arguments of ``messages.create``."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            written.append({"role": "user", "content": [{**block, "content": message["content"]}]})
        else:
            written.append({"role": message["role"], "content": message["content"]})
    schemas = [tool["function"] for tool in tools]
    specs = [{"name": each["name"], "input_schema": each["parameters"]} for each in schemas]
    return {"max_tokens": 64, "messages": written, **({"tools": specs} if specs else {})}


def chat_answer(message: Any) -> Any:
    """An answer of the Messages API as one of chat completions, as far as the loops read it."""
    calls = [
        SimpleNamespace(
            id=block.id, function=SimpleNamespace(name=block.name, arguments=json.dumps(block.input))
        )
        for block in message.content
        if block.type == "tool_use"
    ]
    text = "".join(block.text for block in message.content if block.type == "text")
    given = [block.model_dump(exclude_none=True, exclude={"caller"}) for block in message.content]
    dump = {"role": "assistant", "content": given}
    answer = SimpleNamespace(content=text, tool_calls=calls, model_dump=lambda **_: dump)
    return SimpleNamespace(choices=[SimpleNamespace(message=answer)])


def sync(loop: Callable[[Any], Any]) -> Callable[[str, str], Any]:
    def play(base_url: str, model: str) -> Any:
        with client(base_url) as llm:
            return loop(lambda **chat: chat_answer(llm.messages.create(model=model, **arguments(**chat))))

    return play


def in_async(loop: Callable[[Any], Awaitable[Any]]) -> Callable[[str, str], Any]:
    def play(base_url: str, model: str) -> Any:
        async def run() -> Any:
            async with client(base_url, "AsyncAnthropic") as llm:

                async def complete(**chat: Any) -> Any:
                    return chat_answer(await llm.messages.create(model=model, **arguments(**chat)))

                return await loop(complete)

        return asyncio.run(run())

    return play


def stream(base_url: str, model: str) -> Any:
    with client(base_url) as llm, sojourn.program("stream"):
        events = llm.messages.create(model=model, stream=True, **arguments(**loops.ASK))
        return "".join(event.delta.text for event in events if event.type == "content_block_delta")


def helper_stream(base_url: str, model: str) -> Any:
    async def run() -> Any:
        async with (
            client(base_url, "AsyncAnthropic") as llm,
            sojourn.program("stream"),
            llm.messages.stream(model=model, **arguments(**loops.ASK)) as events,
        ):
            return await events.get_final_text()

    return asyncio.run(run())


scenario = partial(loops.scenario, "anthropic")

SCENARIOS = [
    scenario("sync", sync(loops.tool_loop), loops.ONE_TOOL),
    scenario("async", in_async(loops.async_tool_loop), loops.ONE_TOOL),
    scenario("stream", stream, loops.STREAM),
    scenario("stream", helper_stream, loops.STREAM, name="helper"),
    scenario(RETRY, sync(loops.tool_loop), loops.ONE_TOOL),
]
