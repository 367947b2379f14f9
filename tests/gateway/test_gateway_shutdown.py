"""A gateway that is told to stop while clients wait: each gets an error when its grace has passed.

The gateway of the first tests grants running requests a second; ``sojourn gateway`` grants a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fake_engine import FakeEngine, engines, running
from gateway_harness import DEADLINE_S, lines, until, world
from gateway_process import GatewayProcess
from sojourn_server.gateway.http import proxy_request
from sojourn_server.gateway.http.proxy_request import ProxyRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

RETRY = "the gateway stops; send the request again"


def ask(http: aiohttp.ClientSession, url: str, **more: object) -> asyncio.Future[aiohttp.ClientResponse]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}
    return asyncio.ensure_future(http.post(f"{url}/v1/chat/completions", json=body))


async def test_a_stream_under_way_ends_with_an_error_inside_it() -> None:
    async with engines(1) as [fake], aiohttp.ClientSession() as http:
        fake.hang_after = 2
        async with world([fake]) as made:
            answer = await ask(http, made.url, stream=True)
            assert answer.status == 200
        *begun, error, done = await asyncio.wait_for(lines(answer), DEADLINE_S)
        assert [json.loads(line)["number"] for line in begun] == [0, 1]
        assert json.loads(error)["error"]["message"] == RETRY
        assert done == "[DONE]"


# -- Streams whose client goes away leave nothing behind in the gateway.


@pytest.mark.parametrize("silent", [False, True])
async def test_no_request_is_kept_after_its_client_left_its_stream(silent: bool) -> None:
    """An exception object that is kept for later readers keeps, by its traceback, the frames of each earlier
    one, and so 20 KB a stream, for ever."""
    async with engines(1) as [fake], world([fake]) as made:
        fake.stream_events, fake.hang_after = 1_000_000, 30 if silent else None
        for _ in range(5):
            async with aiohttp.ClientSession() as http:
                answer = await ask(http, made.url, stream=True)
                await answer.content.readline()

        def kept() -> int:
            gc.collect()
            return sum(type(found) is ProxyRequest for found in gc.get_objects())

        await until(lambda: kept() == 0, 20.0)


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_request, "UNREAD_TIMEOUT_S", 0.2)
    async with engines(1) as [fake], world([fake]) as made:
        fake.stream_events, fake.event_bytes = 1_000_000, 1 << 16
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


# -- ``sojourn gateway`` at SIGTERM and Ctrl-C: what it says, what it waits for, and what ends the wait


GRACE_S = 60
"""What ``sojourn gateway`` grants running requests; longer than any test may take."""
ENDS_IN_S = 30
"""A gateway that ends within this time has not waited for its grace to pass."""


class UnwatchedEngine(FakeEngine):
    """An engine that never answers viewers, so that their streams stay silent."""

    def _app(self) -> Starlette:
        app = super()._app()
        app.router.routes.insert(0, Route("/sojourn/v1/stream", self._stay_silent))
        return app

    async def _stay_silent(self, request: Request) -> Response:
        await asyncio.sleep(3600)
        return Response()


@asynccontextmanager
async def started(
    engine: FakeEngine, folder: Path, *, grace_s: int = GRACE_S
) -> AsyncIterator[GatewayProcess]:
    """Run a gateway in front of ``engine`` in a process of its own."""
    made = GatewayProcess([engine.url], folder / "log", constants={"cli.gateway._STOP_GRACE_S": grace_s})
    await asyncio.to_thread(made.__enter__)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


async def ended(gateway: GatewayProcess) -> str:
    """Wait for the end of the process. Return all it has said."""
    await until(lambda: gateway.has_ended, ENDS_IN_S)
    return gateway.log_path.read_text()


@pytest.mark.parametrize("again", [True, False], ids=["again", "once"])
async def test_a_stop_says_what_it_waits_for_and_ctrl_c_again_ends_it(again: bool, tmp_path: Path) -> None:
    grace_s = GRACE_S if again else 1
    async with (
        engines(1) as [engine],
        aiohttp.ClientSession() as http,
        started(engine, tmp_path, grace_s=grace_s) as gateway,
    ):
        engine.hold = asyncio.Event()
        asked = ask(http, gateway.url)
        await until(lambda: engine.requests)
        os.kill(gateway.pid, signal.SIGINT)
        said = f"finishing 1 requests, at most {grace_s} s; Ctrl-C now ends at once"
        await until(lambda: said in gateway.log_path.read_text())
        if again:
            os.kill(gateway.pid, signal.SIGINT)
        log = await ended(gateway)
        answer = await asyncio.wait_for(asked, DEADLINE_S)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        error = (await answer.json())["error"]
        assert (error["code"], error["message"]) == ("gateway_stopping", RETRY)
        assert "ERROR" not in log, log
        assert "Waiting for connections" not in log


async def test_a_viewer_holds_up_no_stop(tmp_path: Path) -> None:
    async with (
        running(UnwatchedEngine()) as [engine],
        aiohttp.ClientSession() as http,
        started(engine, tmp_path) as gateway,
    ):
        page = await http.get(f"{gateway.url}/sojourn/v1/stream")
        top = asyncio.ensure_future(http.get(f"{gateway.url}/sojourn/v1/stream?once=1&changed_within_s=5"))
        await until(lambda: [path for path, *_ in engine.asked].count("/sojourn/v1/stream") >= 2)
        os.kill(gateway.pid, signal.SIGTERM)
        log = await ended(gateway)
        assert "finishing" not in log, log
        assert "ERROR" not in log, log
        assert await page.content.read() == b""
        with contextlib.suppress(aiohttp.ClientError):
            assert (await top).status >= 500
