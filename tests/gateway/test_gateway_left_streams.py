"""Streams whose client goes away leave nothing behind in the gateway."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
from typing import Any

import aiohttp
import pytest
from fake_engine import engines
from gateway_harness import DEADLINE_S, until, world
from sojourn_server.gateway.http import client_connection, engine_routes
from sojourn_server.gateway.http.client_connection import (
    MAX_PIPELINED_BYTES,
    MIN_READ_BYTES,
    UNREAD_TIMEOUT_S,
    AnswerDeadline,
    DeadlineProtocol,
)
from sojourn_server.gateway.http.proxy_request import ProxyRequest

LARGEST_READ_BYTES = 256 << 10
"""The most bytes that asyncio reads at once."""


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


async def test_a_client_that_leaves_with_another_request_sent_ahead_stops_its_first() -> None:
    """uvicorn tells only the newest request of a connection that the client has left."""
    async with engines(1) as [fake], world([fake]) as made:
        fake.hold = asyncio.Event()
        body = json.dumps({"model": "tiny", "messages": []}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        port = int(made.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body) * 2)
        await until(lambda: fake.requests)
        writer.close()
        await until(lambda: not made.gateway.connections._open, 20.0)
        assert [state.load for state in await made.gateway.routing_backend.replicas()] == [0]
        assert len(fake.requests) == 1


def post(body: dict[str, Any]) -> bytes:
    """A chat completion as a client sends it."""
    text = json.dumps({"model": "tiny", "messages": [], **body}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(text) + text


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Read an answer with status 200 to its end."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert head.startswith(b"HTTP/1.1 200 ")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None
    await reader.readexactly(int(length[1]))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[DeadlineProtocol]:
    """The connections of clients to the gateway. Each request is watched at once."""
    made: list[DeadlineProtocol] = []
    real = DeadlineProtocol.connection_made

    def noted(self: DeadlineProtocol, transport: asyncio.Transport) -> None:
        real(self, transport)
        made.append(self)

    monkeypatch.setattr(DeadlineProtocol, "connection_made", noted)
    monkeypatch.setattr(engine_routes, "WATCH_DELAY_S", 0.0)
    return made


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_client_that_sends_another_request_later_and_leaves_stops_its_first(
    aborts: bool, connections: list[DeadlineProtocol]
) -> None:
    """uvicorn stopped reading at the second request, so a disconnect was noticed when the first ended."""
    async with engines(1) as [fake], world([fake]) as made:
        fake.hold = asyncio.Event()
        _, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(post({}))
        await until(lambda: fake.requests)
        writer.write(post({}) * 20)
        await until(lambda: len(connections[0].pipeline) == 20)
        writer.transport.abort() if aborts else writer.close()
        await until(lambda: fake.gave_up, 20.0)
        await until(lambda: not connections[0].connections)
        assert [state.load for state in await made.gateway.routing_backend.replicas()] == [0]
        assert len(fake.requests) == 1


async def test_a_client_that_sends_a_long_request_ahead_is_disconnected(
    connections: list[DeadlineProtocol], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the limit nothing is read, so a disconnect is not noticed."""
    monkeypatch.setattr(client_connection, "PIPELINE_TIMEOUT_S", 0.2)
    caplog.set_level(logging.INFO, client_connection.__name__)
    async with engines(1) as [fake], world([fake]) as made:
        fake.hold = asyncio.Event()
        _, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(post({}))
        await until(lambda: fake.requests)
        writer.write(post({"user": "x" * MAX_PIPELINED_BYTES}))
        await until(lambda: fake.gave_up, 20.0)
        assert f"expected at most {MAX_PIPELINED_BYTES} bytes" in caplog.text
        writer.close()


async def test_a_long_request_sent_ahead_is_not_kept_as_a_whole_and_is_answered(
    connections: list[DeadlineProtocol],
) -> None:
    """A client may have the last byte of an answer before uvicorn has ended it."""
    async with engines(1) as [fake], world([fake]) as made:
        fake.hold = asyncio.Event()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(post({}))
        await until(lambda: fake.requests)
        size = 100 * MAX_PIPELINED_BYTES
        writer.write(post({"user": "x" * size}))
        await until(lambda: connections[0]._pause_deadline is not None)
        assert connections[0]._bytes_ahead < MAX_PIPELINED_BYTES + LARGEST_READ_BYTES
        held: list[int] = []
        for _ in range(100):  # nothing more is read
            await asyncio.sleep(0)
            held.append(connections[0]._bytes_ahead)
        assert len(set(held)) == 1
        fake.hold.set()
        for _ in range(2):
            await read_answer(reader)
        assert [len(request.get("user", "")) for request in fake.requests] == [0, size]
        assert connections[0]._bytes_ahead == 0
        assert connections[0]._pause_deadline is None
        writer.close()


async def test_requests_that_are_taken_are_no_longer_ahead(connections: list[DeadlineProtocol]) -> None:
    """A client that always had three requests ahead was disconnected after 64 KiB in total."""
    async with engines(1) as [fake], world([fake]) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        request = post({"user": "x" * 10_000})
        writer.write(request * 3)
        for _ in range(3 * MAX_PIPELINED_BYTES // len(request)):
            writer.write(request)
            await read_answer(reader)
            assert connections[0]._bytes_ahead <= 4 * len(request)
            assert connections[0]._pause_deadline is None
        for _ in range(3):
            await read_answer(reader)
        assert connections[0]._bytes_ahead == 0
        writer.close()


async def test_the_end_of_a_request_that_is_being_answered_is_not_ahead(
    connections: list[DeadlineProtocol],
) -> None:
    async with engines(1) as [fake], world([fake]) as made:
        fake.hold = asyncio.Event()
        _, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        await until(lambda: connections)
        first, second = post({"user": "x" * 3 * MAX_PIPELINED_BYTES}), post({"user": "y" * 10_000})
        place = len(first) - 2 * MAX_PIPELINED_BYTES
        connections[0].data_received(first[:place])
        connections[0].data_received(first[place:] + second)
        assert len(connections[0].pipeline) == 1
        assert 10_000 < connections[0]._bytes_ahead <= len(second)
        assert connections[0]._pause_deadline is None
        writer.close()


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "UNREAD_TIMEOUT_S", 0.2)
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
            await until(lambda: not made.gateway.connections._open)
            assert [state.load for state in await made.gateway.routing_backend.replicas()] == [0]


@pytest.mark.parametrize("keeps_alive", [True, False])
async def test_a_client_that_does_not_read_an_answers_end_is_disconnected(
    keeps_alive: bool, connections: list[DeadlineProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is not full, so nothing watched it, and a closed transport waits for its client for ever."""
    monkeypatch.setattr(client_connection, "UNREAD_TIMEOUT_S", 0.5)
    async with engines(1) as [fake], world([fake]) as made:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(made.url.rpartition(":")[2])))
            await until(lambda: connections)
            [connection] = connections
            transport, asked = connection.transport, 0
            while not transport.get_write_buffer_size():
                await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
                asked += 1
                while connection.server_state.total_requests < asked:
                    await asyncio.sleep(0)
            if not keeps_alive:
                transport.close()
            assert 0 < transport.get_write_buffer_size() < MIN_READ_BYTES
            await until(lambda: connection not in connection.connections)


class Clock:
    """An event loop and a transport for a connection without a server."""

    def __init__(self) -> None:
        self.buffered, self.is_aborted = 10 * MIN_READ_BYTES, False
        self.deadlines: list[Clock] = []
        self.is_cancelled = False
        self.response_complete = False
        """As a cycle of uvicorn."""

    def call_later(self, delay_s: float, call: object) -> Clock:
        assert delay_s == UNREAD_TIMEOUT_S
        self.deadlines.append(Clock())
        return self.deadlines[-1]

    def cancel(self) -> None:
        self.is_cancelled = True

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


def test_a_client_that_reads_a_long_answer_slowly_keeps_its_connection() -> None:
    connection, clock = AnswerDeadline(), Clock()
    connection.loop, connection.transport = clock, clock  # type: ignore[assignment]
    connection.pause_writing()
    for _ in range(3):
        clock.buffered -= MIN_READ_BYTES
        connection._check()
    assert len(clock.deadlines) == 4
    connection.resume_writing()
    assert clock.deadlines[-1].is_cancelled
    connection.pause_writing()
    clock.buffered -= MIN_READ_BYTES - 1
    assert not clock.is_aborted
    connection._check()
    assert clock.is_aborted
    assert len(clock.deadlines) == 5


def test_a_client_that_reads_an_answers_end_slowly_keeps_its_connection() -> None:
    connection, clock = AnswerDeadline(), Clock()
    connection.loop, connection.transport, connection.cycle = clock, clock, None  # type: ignore[assignment]
    for response_complete in (False, True):  # of the second answer nothing is known yet
        clock.buffered, connection.cycle = 10, Clock()
        connection.cycle.response_complete = response_complete
        connection._check_end()
    clock.buffered, connection.cycle = MIN_READ_BYTES, Clock()
    connection.cycle.response_complete = True
    for unread_bytes in (2 * MIN_READ_BYTES, MIN_READ_BYTES, 0, 10):
        clock.buffered = unread_bytes
        connection._check_end()
    assert not clock.is_aborted
    connection._check_end()
    assert clock.is_aborted
