"""A gateway that is told to stop while clients wait: each gets an error when its grace has passed.

The gateway of these tests grants running requests a second; ``sojourn gateway`` grants a minute.
``test_gateway_stop_signals`` sends signals to the latter.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import DEADLINE_S, World, lines, until, world

RETRY = "the gateway stops; send the request again"


def ask(http: aiohttp.ClientSession, made: World, **more: object) -> asyncio.Future[aiohttp.ClientResponse]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}
    return asyncio.ensure_future(http.post(f"{made.url}/v1/chat/completions", json=body))


async def assert_told(request: asyncio.Future[aiohttp.ClientResponse]) -> None:
    """The client is told to send its request again."""
    answer = await asyncio.wait_for(request, DEADLINE_S)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "5"
    error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == ("gateway_stopping", RETRY)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_whose_engine_is_silent_gets_an_error(stream: bool) -> None:
    async with engines(1) as [fake], aiohttp.ClientSession() as http:
        fake.hold = asyncio.Event()
        async with world([fake]) as made:
            request = ask(http, made, stream=stream)
            await until(lambda: fake.requests)
        await assert_told(request)


async def test_a_client_that_waits_for_an_engine_gets_an_error() -> None:
    async with aiohttp.ClientSession() as http:
        async with world([]) as made:
            request = ask(http, made)
            await until(lambda: made.gateway.routing_backend.core.waiting)
        await assert_told(request)


async def test_a_stream_under_way_ends_with_an_error_inside_it() -> None:
    async with engines(1) as [fake], aiohttp.ClientSession() as http:
        fake.hang_after = 2
        async with world([fake]) as made:
            answer = await ask(http, made, stream=True)
            assert answer.status == 200
        *begun, error, done = await asyncio.wait_for(lines(answer), DEADLINE_S)
        assert [json.loads(line)["number"] for line in begun] == [0, 1]
        assert json.loads(error)["error"]["message"] == RETRY
        assert done == "[DONE]"


async def test_streams_that_end_in_time_are_whole() -> None:
    async with engines(1) as [fake], aiohttp.ClientSession() as http:
        fake.hold = asyncio.Event()
        async with world([fake]) as made:
            request = ask(http, made, stream=True)
            await until(lambda: fake.requests)
            release(fake)
        answer = await asyncio.wait_for(request, DEADLINE_S)
        assert (await lines(answer))[-1] == "[DONE]"


def release(fake: FakeEngine) -> None:
    """Let the engine answer once the gateway has been told to stop."""
    assert fake.hold is not None
    asyncio.get_running_loop().call_later(0.2, fake.hold.set)
