"""Streams whose client goes away leave nothing behind in the gateway."""

from __future__ import annotations

import gc

import aiohttp
import pytest
from fake_engine import engines
from gateway_harness import until, world
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
