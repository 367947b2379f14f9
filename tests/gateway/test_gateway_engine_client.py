"""The client to engines: what it passes on, which failures it repeats, and what it holds of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from multidict import CIMultiDict
from sojourn_server.gateway.http.engine_client import (
    ENGINE_DEAD_MESSAGE,
    MAX_WHOLE_ANSWER_BYTES,
    EngineAnswer,
    EngineClient,
    ReplicaRequestError,
)

Answer = Callable[["Script", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LONG = [b"x\n", b"x" * (MAX_WHOLE_ANSWER_BYTES - 1)]


class Script:
    """An engine that runs ``answer`` at each request."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.url = ""
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    self.requests.append(head)
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                    await self._answer(self, reader, writer)
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[tuple[EngineClient, Script]]:
    made, client = Script(answer), EngineClient()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield client, made
    finally:
        await client.close()
        server.close()


def says(*parts: bytes, then_closes: bool = False) -> Answer:
    """An answer that has these bytes, each sent for itself."""

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_closes:
            raise ConnectionError

    return answer


async def ask(client: EngineClient, script: Script, body: bytes = b"{}") -> EngineAnswer:
    headers = CIMultiDict({"x-a": "ö", "accept-encoding": "identity"})
    return await client.send(f"{script.url}/v1/x?q=a%20b", headers, body)


async def test_a_connection_carries_the_next_request_and_the_engine_gets_the_clients_headers_alone() -> None:
    async with engine(says(OK)) as (client, script):
        for _ in range(3):
            answer = await ask(client, script)
            assert (answer.status, answer.first, answer.is_complete) == (200, b"ok", True)
        assert script.connections == 1
        assert script.requests[0].startswith(b"POST /v1/x?q=a%20b HTTP/1.1\r\n")
        names = {line.split(b":")[0].lower() for line in script.requests[0].split(b"\r\n")[1:-2]}
        assert names == {b"host", b"x-a", b"accept-encoding", b"content-length"}
        assert "x-a: ö".encode() in script.requests[0]


@pytest.mark.parametrize(
    ("head", "parts"),
    [
        (STREAM, [b"9\r\ndata: 1\n\n\r\n", b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_WHOLE_ANSWER_BYTES + 1), LONG),
    ],
    ids=["stream", "long"],
)
async def test_a_stream_or_long_answer_is_read_as_it_comes(head: bytes, parts: list[bytes]) -> None:
    more = asyncio.Event()

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + parts[0])
        await more.wait()
        writer.write(parts[1])

    async with engine(answer) as (client, script):
        answer = await ask(client, script)
        assert (answer.first[-1:], answer.is_stream, answer.is_complete) == (b"\n", head is STREAM, False)
        more.set()
        read = answer.first
        while part := await answer.next_part():
            read += part
        assert read == (b"".join(parts) if parts is LONG else b"data: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1", b"SSH-2.0-x\r\n", b""])
async def test_an_answer_that_breaks_off_before_its_first_part_is_none_and_not_tried_again(
    said: bytes,
) -> None:
    async with engine(says(said, then_closes=True)) as (client, script):
        with pytest.raises(ReplicaRequestError) as caught:
            await ask(client, script)
        assert (caught.value.computing, len(script.requests)) == (True, 1), "it is not sent again"


async def test_an_engine_that_cannot_be_reached_has_not_computed() -> None:
    async with engine(says()) as (client, script):
        script.url = "http://127.0.0.1:1"
        with pytest.raises(ReplicaRequestError, match="connection failed") as caught:
            await ask(client, script)
        assert not caught.value.computing


@pytest.mark.parametrize(
    ("code", "message", "is_dead"),
    [
        (400, "Grammar error: Invalid type: EngineDeadError", False),
        (400, ENGINE_DEAD_MESSAGE, False),
        (500, f"404, message='Not Found', url='http://a/?{ENGINE_DEAD_MESSAGE}'", False),
        (500, ENGINE_DEAD_MESSAGE, True),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_that_quotes_its_request_is_no_dead_engine(
    code: int, message: str, is_dead: bool, is_stream: bool
) -> None:
    """A schema with the type ``EngineDeadError`` made two engines suspect with each request."""
    error = json.dumps({"error": {"message": message, "code": code}}).encode()
    said = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (code, len(error)) + error
    if is_stream:
        error = b"data: " + error + b"\n\n"
        said = STREAM + b"%x\r\n%s\r\n0\r\n\r\n" % (len(error), error)
    async with engine(says(said)) as (client, script):
        if is_dead:
            with pytest.raises(ReplicaRequestError, match="core is dead"):
                await ask(client, script)
        else:
            answer = await ask(client, script)
            assert (answer.status, answer.first) == (200 if is_stream else code, error)
