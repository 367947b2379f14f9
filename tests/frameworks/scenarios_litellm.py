"""litellm in hand-written loops, through the openai client (``openai/``) and through litellm's own HTTP
(``hosted_vllm/`` and the Responses API)."""

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

OPENAI, OWN = "openai", "hosted_vllm"


def server(base_url: str, model: str, provider: str = OWN) -> dict[str, Any]:
    return {"api_base": base_url, "api_key": "none", "model": f"{provider}/{model}"}


def sync(
    loop: Callable[[Any], Any], provider: str = OWN, function: str = "completion", **more: Any
) -> Callable[[str, str], Any]:
    """Return a play that runs ``loop(complete)``."""

    def play(base_url: str, model: str) -> Any:
        import litellm

        return loop(partial(getattr(litellm, function), **server(base_url, model, provider), **more))

    return play


def in_async(loop: Callable[[Any], Awaitable[Any]]) -> Callable[[str, str], Any]:
    def play(base_url: str, model: str) -> Any:
        import litellm

        async def run() -> Any:
            return await loop(partial(litellm.acompletion, **server(base_url, model)))

        return asyncio.run(run())

    return play


async def async_stream(acomplete: Any) -> Any:
    async with sojourn.program("stream"):
        chunks = await acomplete(stream=True, **ASK)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def response_stream(respond: Any) -> Any:
    with sojourn.program("stream"):
        events = respond(input="hi", stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")


RETRIES = {"num_retries": 2, "max_retries": 0}
scenario = partial(loops.scenario, "litellm")

SCENARIOS = [
    scenario("sync", sync(loops.tool_loop), loops.ONE_TOOL),
    scenario("sync", sync(loops.tool_loop, OPENAI), loops.ONE_TOOL, name="openai"),
    scenario("sync", sync(loops.response_loop, OPENAI, "responses"), loops.RESPONSES, name="responses"),
    scenario("async", in_async(loops.async_tool_loop), loops.ONE_TOOL),
    scenario("stream", sync(loops.stream), loops.STREAM),
    scenario("stream", sync(loops.stream, OPENAI), loops.STREAM, name="openai"),
    scenario("stream", in_async(async_stream), loops.STREAM, name="async"),
    scenario("stream", sync(response_stream, OPENAI, "responses"), loops.STREAM, name="responses"),
    scenario(RETRY, sync(loops.tool_loop, **RETRIES), loops.ONE_TOOL),
    scenario(RETRY, sync(loops.tool_loop, OPENAI, **RETRIES), loops.ONE_TOOL, name="openai"),
]
