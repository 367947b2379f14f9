"""A gateway that is told to stop while clients wait: each gets an error when its grace has passed.

The gateway of these tests grants running requests a second; ``sojourn gateway`` grants a minute.
``test_gateway_stop_signals`` sends signals to the latter.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket

import aiohttp
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import DEADLINE_S, World, lines, until, world
from sojourn_server.gateway.http import proxy_request
from sojourn_server.gateway.http.proxy_request import ProxyRequest

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


# -- Streams whose client goes away leave nothing behind in the gateway.


@pytest.mark.parametrize("silent", [False, True])
async def test_no_request_is_kept_after_its_client_left_its_stream(silent: bool) -> None:
    """An exception object that is kept for later readers keeps, by its traceback, the frames of each earlier
    one, and so 20 KB a stream, for ever."""
    async with engines(1) as [fake], world([fake]) as made:
        fake.stream_events, fake.hang_after = 1_000_000, 30 if silent else None
        for _ in range(5):
            async with aiohttp.ClientSession() as http:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
                async with http.post(f"{made.url}/v1/chat/completions", json=body) as answer:
                    await answer.content.readline()

        def kept() -> int:
            gc.collect()
            return sum(type(found) is ProxyRequest for found in gc.get_objects())

        await until(lambda: kept() == 0, 20.0)


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_request, "UNREAD_TIMEOUT_S", 0.2)
    async with engines(1) as [fake], world([fake]) as made:
        fake.stream_events = 1_000_000
        body = json.dumps({"model": "tiny", "messages": [], "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        port = int(made.url.rpartition(":")[2])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, head + body)

            await until(lambda: fake.requests)
            counted = made.gateway.metrics.registry.get_sample_value
            await until(lambda: counted("sojourn_gateway_client_disconnects_total") == 1)
            await until(lambda: fake.streaming == 0)
            assert [state.load for state in made.gateway.routing_backend.replicas()] == [0]
