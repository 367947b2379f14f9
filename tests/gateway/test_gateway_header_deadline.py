"""Clients' connections: 300 half-requests were still open after 64 s, so a request's headers have a deadline;
what a client sends ahead is limited; and the limit of open files is raised."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from gateway_harness import DEADLINE_S, until
from sojourn_server.gateway.http import client_connection
from sojourn_server.gateway.http.client_connection import (
    MAX_HEAD_BYTES,
    MAX_OPEN_FILES,
    MAX_PIPELINED_REQUESTS,
    DeadlineProtocol,
    HeaderDeadline,
    log_accept_errors_rarely,
    raise_open_file_limit,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class OverH11(HeaderDeadline, H11Protocol):
    """uvicorn's choice where httptools is not installed."""


@pytest.fixture(params=[DeadlineProtocol, OverH11])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[asyncio.Protocol]:
    monkeypatch.setattr(client_connection, "HEADERS_TIMEOUT_S", 0.3)
    found: type[asyncio.Protocol] = request.param
    return found


@asynccontextmanager
async def listening(protocol: type[asyncio.Protocol]) -> AsyncIterator[int]:
    async def answer(request: Request) -> Response:
        await asyncio.sleep(float(request.query_params.get("sleep", "0")))
        return PlainTextResponse("here")

    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/", answer)])
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=protocol, log_level="error", ws="none", loop="asyncio", timeout_graceful_shutdown=1
        )
    )
    task = asyncio.ensure_future(server._serve(sockets=[bound]))
    await until(lambda: server.started)
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def test_half_a_request_is_closed_however_slowly_it_goes_on(protocol: type[asyncio.Protocol]) -> None:
    async with listening(protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF)

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        slowly = asyncio.ensure_future(trickle())
        try:
            answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        except ConnectionResetError:
            answer = b""  # bytes that were under way met a closed connection
        finally:
            slowly.cancel()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 Request Timeout")
        writer.close()


async def test_half_a_request_after_a_whole_one_is_closed(protocol: type[asyncio.Protocol]) -> None:
    async with listening(protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE)
        assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
        writer.write(HALF)
        assert (await asyncio.wait_for(reader.read(), DEADLINE_S)).startswith(b"HTTP/1.1 408 Request Timeout")
        writer.close()


async def test_whole_requests_have_no_deadline(protocol: type[asyncio.Protocol]) -> None:
    """The answer takes longer than headers may, and headers come in pieces."""
    async with listening(protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /?sleep=0.6 HTTP/1.1\r\nHo")
            await asyncio.sleep(0)
            writer.write(b"st: a\r\n\r\n")
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_connection_without_a_byte_is_closed(
    protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "FIRST_BYTE_TIMEOUT_S", 0.2)
    async with listening(protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()


# -- what a client sends ahead ------------------------------------------------------------


async def test_more_requests_than_are_answered_end_the_connection() -> None:
    """One client without a key had 330,000 requests wait after 8 s, in 800 MB."""
    async with listening(DeadlineProtocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /?sleep=3600 HTTP/1.1\r\nHost: a\r\n\r\n" + WHOLE * (MAX_PIPELINED_REQUESTS + 1))
        try:
            answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        except ConnectionResetError:
            answer = b""
        assert answer == b""
        writer.close()


async def test_requests_sent_ahead_are_answered_in_order(protocol: type[asyncio.Protocol]) -> None:
    async with listening(protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE * MAX_PIPELINED_REQUESTS)
        for _ in range(MAX_PIPELINED_REQUESTS):
            answer = await asyncio.wait_for(reader.readuntil(b"here"), DEADLINE_S)
            assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    "begins",
    [
        b"GET / HTTP/1.1\r\nX-Long: ",
        b"GET /",
        b"GET /?sleep=3600 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: ",
    ],
)
async def test_headers_without_an_end_are_not_kept(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client without a key had 2 GB kept in 5 s."""
    monkeypatch.setattr(client_connection, "HEADERS_TIMEOUT_S", DEADLINE_S)
    async with listening(DeadlineProtocol) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begins)

        async def go_on() -> None:
            for _ in range(512):
                writer.write(b"x" * MAX_HEAD_BYTES)
                await writer.drain()

        with pytest.raises(ConnectionError):
            await go_on()
        writer.close()


@pytest.mark.parametrize("lines", [1, 100])
async def test_headers_that_are_too_long_are_refused_and_long_ones_are_not(lines: int) -> None:
    async with listening(DeadlineProtocol) as port:
        for size, status in ((MAX_HEAD_BYTES - 2000, b"200"), (MAX_HEAD_BYTES + 1, b"431")):
            header = b"X-Long: %s\r\n" % (b"x" * (size // lines))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + header * lines + b"\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            assert answer.startswith(b"HTTP/1.1 " + status)
            writer.close()


# -- open files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "most_waiting", "limit", "warns"),
    [
        (1024, 1 << 20, 20_000, MAX_OPEN_FILES, False),
        (1024, resource.RLIM_INFINITY, 20_000, MAX_OPEN_FILES, False),
        (1024, 1 << 20, 100_000, 200_000, False),
        (1024, 4096, 20_000, 4096, True),
        (1024, 30_000, 20_000, 30_000, False),
        (1 << 20, 1 << 20, 20_000, 1 << 20, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 20_000, resource.RLIM_INFINITY, False),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    soft: int,
    hard: int,
    most_waiting: int,
    limit: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    raise_open_file_limit(most_waiting)
    assert limits[-1] == (limit, hard)
    assert bool(caplog.records) == warns


def test_a_limit_of_open_files_that_cannot_be_raised_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(which: int, both: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_open_file_limit(20_000)
    assert "1024" in caplog.text
    assert "ulimit -n" in caplog.text


def test_asyncios_error_for_each_connection_that_it_cannot_accept_is_logged_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])
    for _ in range(2):
        log_accept_errors_rarely(lambda: now)
    for _ in range(1000):
        now += 0.025
        logging.getLogger("asyncio").error("socket.accept() out of system resource\nsocket: x")
        logging.getLogger("asyncio").error("another error")
    errors = [record.message.partition("\n")[0] for record in caplog.records]
    assert errors.count("socket.accept() out of system resource") == 3
    assert errors.count("another error") == 1000
