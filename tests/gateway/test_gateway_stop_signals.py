"""``sojourn gateway`` at SIGTERM and Ctrl-C: what it says, what it waits for, and what ends the wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fake_engine import FakeEngine, engines, running
from gateway_harness import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from test_gateway_shutdown import assert_told

GRACE_S = 60
"""What ``sojourn gateway`` grants running requests; longer than any test may take."""
ENDS_IN_S = 30
"""A gateway that ends within this time has not waited for its grace to pass."""


class UnwatchedEngine(FakeEngine):
    """An engine that never answers viewers, so that their streams stay silent."""

    def __init__(self) -> None:
        super().__init__()
        self.views = 0
        """Number of queries for a live frame."""

    def _app(self) -> Starlette:
        app = super()._app()
        app.router.routes.insert(0, Route("/sojourn/v1/stream", self._stay_silent))
        return app

    async def _stay_silent(self, request: Request) -> Response:
        self.views += 1
        await asyncio.sleep(3600)
        return Response()


class GatewayProcess:
    """A running ``sojourn gateway`` and what it has said so far."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        port: int,
        said: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self.process, self.port, self._said, self.pipe = process, port, said, pipe
        self.lines: list[str] = []
        self.url = f"http://127.0.0.1:{port}"

    async def line_with(self, text: str) -> str:
        """Return the next line that contains ``text``."""

        async def read() -> str:
            async for line in self._said:
                self.lines.append(line.decode())
                if text in self.lines[-1]:
                    return self.lines[-1]
            raise AssertionError(self.lines)

        return await asyncio.wait_for(read(), 60)

    async def ended(self) -> str:
        """Wait for the end of the process. Return all it has said."""
        self.lines.append((await asyncio.wait_for(self._said.read(), ENDS_IN_S)).decode())
        await asyncio.wait_for(self.process.wait(), ENDS_IN_S)
        return "".join(self.lines)

    async def is_stopping(self) -> bool:
        """Return whether it has closed its port."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    def ask(self, http: aiohttp.ClientSession) -> asyncio.Future[aiohttp.ClientResponse]:
        """Send a request of a model."""
        body = {"model": "tiny", "messages": []}
        return asyncio.ensure_future(http.post(f"{self.url}/v1/chat/completions", json=body))


@asynccontextmanager
async def started(engine: FakeEngine, *, grace_s: int = GRACE_S) -> AsyncIterator[GatewayProcess]:
    """Run a gateway in front of ``engine`` in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = (
        "from sojourn_server import cli; import sojourn_server.cli.gateway as gateway; "
        f"gateway._STOP_GRACE_S = {grace_s}; cli.main()"
    )
    read, write = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "gateway", "--engines", engine.url, "--port", str(port),
            stdout=write, stderr=write,
        )  # fmt: skip
    finally:
        os.close(write)
    said = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(said), os.fdopen(read, "rb")
    )
    made = GatewayProcess(process, port, said, pipe)
    try:
        await made.line_with("Uvicorn running")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        pipe.close()


@pytest.mark.parametrize("again", [True, False], ids=["again", "once"])
async def test_a_stop_says_what_it_waits_for_and_ctrl_c_again_ends_it(again: bool) -> None:
    grace_s = GRACE_S if again else 1
    async with (
        engines(1) as [engine],
        aiohttp.ClientSession() as http,
        started(engine, grace_s=grace_s) as gateway,
    ):
        engine.hold = asyncio.Event()
        asked = gateway.ask(http)
        await until(lambda: engine.requests)
        gateway.process.send_signal(signal.SIGINT)
        said = await gateway.line_with("finishing")
        assert f"finishing 1 requests, at most {grace_s} s; Ctrl-C now ends at once" in said
        if again:
            gateway.process.send_signal(signal.SIGINT)
        said = await gateway.ended()
        await assert_told(asked)
        assert "ERROR" not in said, said
        assert "Waiting for connections" not in said


async def test_a_stop_whose_message_has_no_reader_finishes_the_requests() -> None:
    async with engines(1) as [engine], aiohttp.ClientSession() as http, started(engine) as gateway:
        engine.hold = asyncio.Event()
        asked = gateway.ask(http)
        await until(lambda: engine.requests)
        gateway.pipe.close()  # as ``sojourn gateway 2>&1 | head`` does
        gateway.process.send_signal(signal.SIGTERM)
        await until(gateway.is_stopping)
        engine.hold.set()
        answer = await asked
        assert answer.status == 200
        assert (await answer.json())["text"] == engine.name
        await asyncio.wait_for(gateway.process.wait(), ENDS_IN_S)


async def test_a_viewer_holds_up_no_stop() -> None:
    async with (
        running(UnwatchedEngine()) as [engine],
        aiohttp.ClientSession() as http,
        started(engine) as gateway,
    ):
        page = await http.get(f"{gateway.url}/sojourn/v1/stream")
        top = asyncio.ensure_future(http.get(f"{gateway.url}/sojourn/v1/stream?once=1"))
        await until(lambda: engine.views >= 2)
        gateway.process.send_signal(signal.SIGTERM)
        said = await gateway.ended()
        assert "finishing" not in said, said
        assert "ERROR" not in said, said
        assert await page.content.read() == b""
        with contextlib.suppress(aiohttp.ClientError):
            assert (await top).status >= 500
