"""The raw ``openai`` client in hand-written loops, which open programs and report tools themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import chat_loops as loops
import sojourn
from chat_loops import ASK
from scenario_types import RETRY

ABSENT = loops.ABSENT


def client(base_url: str, kind: str = "OpenAI") -> Any:
    import openai

    return getattr(openai, kind)(base_url=base_url, api_key="none", max_retries=2)


def sync(loop: Callable[[Any], Any]) -> Callable[[str, str], Any]:
    """Return a play that runs ``loop(complete)``."""

    def play(base_url: str, model: str) -> Any:
        with client(base_url) as llm:
            return loop(partial(llm.chat.completions.create, model=model))

    return play


def in_async(loop: Callable[[Any], Awaitable[Any]]) -> Callable[[str, str], Any]:
    def play(base_url: str, model: str) -> Any:
        async def run() -> Any:
            async with client(base_url, "AsyncOpenAI") as llm:
                return await loop(partial(llm.chat.completions.create, model=model))

        return asyncio.run(run())

    return play


def response_loop(base_url: str, model: str) -> Any:
    with client(base_url) as llm:
        return loops.response_loop(partial(llm.responses.create, model=model))


def response_stream(base_url: str, model: str) -> Any:
    async def run() -> Any:
        async with client(base_url, "AsyncOpenAI") as llm, sojourn.program("stream"):
            events = await llm.responses.create(model=model, input="hi", stream=True)
            return "".join([e.delta async for e in events if e.type == "response.output_text.delta"])

    return asyncio.run(run())


def abandoned_stream(complete: Any) -> Any:
    with sojourn.program("stream"), complete(stream=True, **ASK) as chunks:
        # The length of the first piece depends on the network.
        return next(text for chunk in chunks if (text := chunk.choices[0].delta.content))[:1]


scenario = partial(loops.scenario, "openai")

SCENARIOS = [
    scenario("sync", sync(loops.tool_loop), loops.ONE_TOOL),
    scenario("sync", response_loop, loops.RESPONSES, name="responses"),
    scenario("async", in_async(loops.async_tool_loop), loops.ONE_TOOL),
    scenario("stream", sync(loops.stream), loops.STREAM),
    scenario("stream", response_stream, loops.STREAM, name="responses"),
    scenario("stream", sync(abandoned_stream), loops.STREAM, name="abandoned"),
    scenario(RETRY, sync(loops.tool_loop), loops.ONE_TOOL),
]
