"""Streams whose client goes away leave nothing behind in the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
import socket

import aiohttp
import pytest
from fake_engine import engines
from gateway_harness import until, world
from sojourn_server.gateway.http import proxy_request
from sojourn_server.gateway.http.proxy_request import ProxyRequest


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
