"""Connections to engines, before engines that answer in any way; on asyncio's event loop and on uvloop."""

from __future__ import annotations

import asyncio
import datetime
import errno
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from gateway_harness import no_more_files, until
from socketless_connection import SocketlessConnection
from sojourn_server.gateway.http import engine_client, engine_connection, engine_connection_pool
from sojourn_server.gateway.http.engine_client import ReplicaRequestError, send_to_engine
from sojourn_server.gateway.http.engine_connection import (
    EngineConnectError,
    EngineConnectionError,
    EngineConnectionLost,
    EngineProtocolError,
    EngineResponse,
    GatewayConnectError,
)
from sojourn_server.gateway.http.engine_connection_pool import EngineConnectionPool, request_head
from sojourn_server.gateway.http.replica_addresses import ReplicaAddress

Answer = Callable[["Script", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6;note=1\r\ndata: \r\n3\r\n1\n\n\r\n0\r\nX-Trailer: 1\r\n\r\n"
)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    return request.param()


class Script:
    """An engine that runs ``answer`` at each request. ``tls``: it speaks TLS."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.url = ""
        self._answer = answer
        self._tls = tls

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                    await self._answer(self, reader, writer)
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def engine(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Script]:
    made = Script(answer)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


@asynccontextmanager
async def pool() -> AsyncIterator[EngineConnectionPool]:
    made = EngineConnectionPool()
    try:
        yield made
    finally:
        made.close()


def says(*parts: bytes) -> Answer:
    """An answer that has these bytes, each sent for itself."""

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def says_and_closes(*parts: bytes) -> Answer:
    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(*parts)(script, reader, writer)
        raise ConnectionError

    return answer


async def ask(to: EngineConnectionPool, script: Script, body: bytes = b"", **more: Any) -> EngineResponse:
    return await to.request(script.url, b"POST", b"/v1/x?q=1", [(b"x-a", b"\xc3\xb6")], body, **more)


# -- connections that are used again -----------------------------------------------------


async def test_a_connection_carries_the_next_request() -> None:
    async with engine(says(OK)) as script, pool() as to:
        for _ in range(3):
            response = await ask(to, script)
            assert (response.status, await response.read()) == (200, b"ok")
        assert script.connections == 1
        host = script.url.removeprefix("http://").encode()
        head = b"POST /v1/x?q=1 HTTP/1.1\r\nhost: %b\r\nx-a: \xc3\xb6\r\ncontent-length: 0\r\n\r\n"
        assert script.requests == [head % host] * 3


@pytest.mark.parametrize(
    "answer",
    [
        OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
        OK + OK,  # more than was asked
        OK + b"x",
    ],
)
async def test_a_connection_that_cannot_carry_another_is_closed(answer: bytes) -> None:
    async with engine(says(answer)) as script, pool() as to:
        for _ in range(2):
            assert await (await ask(to, script)).read() == b"ok"
        assert script.connections == 2
        await until(lambda: script.closed == 2)


async def test_bytes_without_a_request_close_the_connection() -> None:
    more = asyncio.Event()

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await more.wait()
        writer.write(OK)

    async with engine(answer) as script, pool() as to:
        assert await (await ask(to, script)).read() == b"ok"
        more.set()
        await until(lambda: script.closed == 1)
        assert await (await ask(to, script)).read() == b"ok"
        assert script.connections == 2


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(says(OK)) as script, pool() as to:
        first, second = await asyncio.gather(ask(to, script), ask(to, script))
        assert await first.read() + await second.read() == b"okok"
        assert script.closed == 0
        monkeypatch.setattr(engine_connection_pool, "IDLE_CONNECTION_S", 0.0)
        assert await (await ask(to, script)).read() == b"ok"  # none is young enough
        await until(lambda: script.connections == script.closed == 3)
        assert not to._open


# -- all ways to end a response ----------------------------------------------------------


async def test_a_stream_is_read_as_it_comes_and_its_connection_kept() -> None:
    async with engine(says(CHUNKED[:-20], CHUNKED[-20:])) as script, pool() as to:
        for _ in range(2):
            response = await ask(to, script)
            assert response.media_type == b"text/event-stream"
            parts = []
            while part := await response.read_some():
                parts.append(part)
            assert b"".join(parts) == b"data: 1\n\n"
            assert [name for name, _ in response.raw_headers] == [b"Content-Type", b"Transfer-Encoding"]
        assert script.connections == 1


async def test_a_response_without_a_length_ends_with_its_connection() -> None:
    async with engine(says_and_closes(b"HTTP/1.1 200 OK\r\n\r\nsome", b"thing")) as script, pool() as to:
        assert await (await ask(to, script)).read() == b"something"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-", OK[:-1], CHUNKED[:-7]])
async def test_a_response_that_breaks_off_is_an_error(said: bytes) -> None:
    async with engine(says_and_closes(said)) as script, pool() as to:
        with pytest.raises(EngineConnectionLost) as caught:
            await (await ask(to, script)).read()
        assert caught.value.is_written
        assert caught.value.idle_s == 0


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"SSH-2.0-x\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (engine_connection.MAX_HEAD_BYTES + 1), "bytes of headers"),
        # The bytes that come together with the body are not counted.
        (CHUNKED[:-2] + b"x: " + b"y" * (8 * engine_connection.MAX_HEAD_BYTES), "bytes of headers"),
    ],
)
async def test_what_is_no_response_is_an_error_at_once(said: bytes, error: str) -> None:
    async with engine(says(said)) as script, pool() as to:
        with pytest.raises(EngineProtocolError, match=error):
            await (await ask(to, script)).read()
        await until(lambda: script.closed == 1)


# -- limits and ends ---------------------------------------------------------------------


async def test_a_reader_that_lags_stops_its_engine() -> None:
    piece, written = b"x" * (1 << 16), 0

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1000 * len(piece)))
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    async with engine(answer) as script, pool() as to:
        response = await ask(to, script)
        await until(lambda: response._unread_bytes > engine_connection.MAX_UNREAD_BYTES)
        before = -1
        while before < written:  # until the kernel's buffers are full
            before = written
            await asyncio.sleep(0.05)
        assert response._unread_bytes < 4 * engine_connection.MAX_UNREAD_BYTES
        assert written < 1000 * len(piece)
        read = 0
        while part := await response.read_some():
            read += len(part)
        assert read == 1000 * len(piece)
        assert await (await ask(to, script)).read() == piece * 1000  # read whole, on the same connection
        assert script.connections == 1


async def test_of_a_long_answer_a_part_is_held() -> None:
    most_bytes = engine_client.MAX_WHOLE_ANSWER_BYTES
    piece, total = b"x" * (1 << 16), 1000 * (1 << 16)

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()

    async with engine(answer) as script, pool() as to:
        found = await send_to_engine(to, ReplicaAddress("e", script.url), b"/v1/x", [], b"")
        response = found.response
        assert not response.is_complete
        assert most_bytes < len(found.first) < 2 * most_bytes
        await until(lambda: response._unread_bytes > engine_connection.MAX_UNREAD_BYTES)
        assert response._connection is not None
        assert response._connection._is_paused
        assert len(found.first) + len(await response.read()) == total
        assert response.is_complete


async def test_an_answer_that_breaks_off_before_its_first_part_is_none() -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 500_000
    async with engine(says_and_closes(said)) as script, pool() as to:
        with pytest.raises(ReplicaRequestError) as caught:
            await to_engine(to, script)
        assert caught.value.computing


async def test_a_response_that_is_given_up_ends_its_connection_and_its_reader() -> None:
    async with engine(says(CHUNKED[:-20])) as script, pool() as to:
        response = await ask(to, script)
        reading = asyncio.ensure_future(response.read())
        await until(lambda: response._parts)
        response.close()
        with pytest.raises(EngineConnectionError, match="broken off"):
            await reading
        await until(lambda: script.closed == 1)


async def test_a_request_that_is_cancelled_ends_its_connection() -> None:
    async with engine(says()) as script, pool() as to:
        asking = asyncio.ensure_future(ask(to, script))
        await until(lambda: script.requests)
        asking.cancel()
        await until(lambda: script.closed == 1)
        assert not to._open


async def test_closing_the_pool_ends_requests_in_flight() -> None:
    async with engine(says()) as script, pool() as to:
        asking = asyncio.ensure_future(ask(to, script))
        await until(lambda: script.requests)
        to.close()
        with pytest.raises(EngineConnectionError):
            await asking
        await until(lambda: script.closed == 1)


# -- which failures may be repeated ------------------------------------------------------


async def to_engine(to: EngineConnectionPool, script: Script, body: bytes = b"") -> bytes:
    address = ReplicaAddress("e", script.url)
    return (await send_to_engine(to, address, b"/v1/x", [], body)).first


async def test_a_body_that_was_not_read_is_sent_again_over_a_new_connection() -> None:
    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(script.requests) == 2:
            writer.transport.abort()
            raise ConnectionError
        await reader.readexactly(int(script.requests[-1].split(b"content-length: ")[1].split()[0]))
        writer.write(OK)

    async with engine(answer) as script, pool() as to:
        assert await to_engine(to, script) == b"ok"
        assert await to_engine(to, script, b"x" * (32 << 20)) == b"ok"
        assert [b"connection: close" in head for head in script.requests] == [False, False, True]


@pytest.mark.parametrize(("stale_s", "requests"), [(0.0, 3), (60.0, 2)])
async def test_only_after_an_idle_time_a_closed_connection_is_no_failure(
    stale_s: float, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn_server.gateway.http.engine_client.STALE_CONNECTION_S", stale_s)

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(script.requests) == 2:
            raise ConnectionError
        writer.write(OK)

    async with engine(answer) as script, pool() as to:
        assert await to_engine(to, script) == b"ok"
        if requests == 3:
            assert await to_engine(to, script) == b"ok"
        else:
            with pytest.raises(ReplicaRequestError) as caught:
                await to_engine(to, script)
            assert caught.value.computing
        assert len(script.requests) == requests


async def test_an_answer_that_has_begun_is_a_sign_that_its_request_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sojourn_server.gateway.http.engine_client.STALE_CONNECTION_S", 1e-9)

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(script.requests) == 2:
            writer.write(b"HTTP/1.1 103 x\r\n\r\n")
            raise ConnectionError
        writer.write(OK)

    async with engine(answer) as script, pool() as to:
        assert await to_engine(to, script) == b"ok"
        with pytest.raises(ReplicaRequestError) as caught:
            await to_engine(to, script)
        assert caught.value.computing
        assert len(script.requests) == 2


@pytest.mark.parametrize("fails", [False, True])
async def test_a_write_that_fails_at_once_has_not_reached_the_engine(fails: bool) -> None:
    one = SocketlessConnection(fails=fails)
    one.connection.connection_lost(BrokenPipeError("broken pipe"))
    with pytest.raises(EngineConnectionLost) as caught:
        await one.response.headers()
    assert caught.value.is_written is not fails


async def test_an_engine_that_cannot_be_reached_has_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(says()) as script, pool() as to:
        script.url = script.url.replace("http:", "https:")  # it never answers the handshake
        monkeypatch.setattr(engine_connection_pool, "CONNECT_TIMEOUT_S", 0.05)
        for why in ("not open after", "connection failed: .*refused|Connect call failed"):
            with pytest.raises(ReplicaRequestError, match=why) as caught:
                await to_engine(to, script)
            assert not caught.value.computing
            assert not to._open
            script.url = "http://127.0.0.1:1"


async def test_a_gateway_without_files_blames_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with engine(says(OK)) as script, pool() as to:
        with no_more_files():
            for _ in range(3):
                with pytest.raises(GatewayConnectError, match="open files"):
                    await to_engine(to, script)
        assert not to._open
        assert len(caplog.records) == 1
        assert await to_engine(to, script) == b"ok"


@pytest.mark.parametrize("number", [errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
async def test_other_shortages_of_the_gateway_are_its_own_too(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create_connection(*args: Any, **more: Any) -> None:
        raise OSError(number, "too few")

    async with pool() as to:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
        with pytest.raises(GatewayConnectError, match="too few"):
            await to._connect(engine_connection_pool._endpoint("http://127.0.0.1:1"))


# -- names with several addresses --------------------------------------------------------


async def drops_packets(where: Any) -> None:
    await asyncio.Event().wait()


async def cannot_be_used_here(where: Any) -> None:
    raise OSError(errno.EADDRNOTAVAIL, "no such address here")


async def refuses(where: Any) -> None:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the name ``engine`` have 127.0.0.2, 127.0.0.3, … with these connects, and then ``last``."""

    def have(*connects: Callable[[Any], Awaitable[None]], last: str = "127.0.0.1") -> None:
        loop = asyncio.get_running_loop()
        fail = {f"127.0.0.{number}": connect for number, connect in enumerate(connects, 2)}
        real, resolve = loop.sock_connect, loop.getaddrinfo

        async def getaddrinfo(host: str, port: int, *rest: Any, **more: Any) -> Any:
            if host != "engine":
                return await resolve(host, port, *rest, **more)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in [*fail, last]]

        async def sock_connect(opened: socket.socket, where: Any) -> None:
            await (fail[where[0]](where) if where[0] in fail else real(opened, where))

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(loop, "sock_connect", sock_connect)

    return have


@pytest.mark.parametrize(
    "connects", [[drops_packets] * 3, [refuses, cannot_be_used_here], [drops_packets, refuses], []]
)
async def test_an_engine_is_reached_at_any_address_of_its_name(
    connects: list[Any], addresses: Callable[..., None]
) -> None:
    """The health checks found the second address, so the engine was up, and all its requests failed."""
    async with engine(says(OK)) as script, pool() as to:
        addresses(*connects)
        script.url = script.url.replace("127.0.0.1", "engine")
        for _ in range(2):
            assert await to_engine(to, script) == b"ok"
        assert script.connections == 1


async def test_an_engine_is_at_fault_if_one_address_of_its_name_can_be_used(
    addresses: Callable[..., None],
) -> None:
    async with pool() as to:
        addresses(refuses, last="127.0.0.2")
        with pytest.raises(EngineConnectError, match="refused"):
            await to._connect(engine_connection_pool._endpoint("http://engine:1"))
        addresses(refuses, cannot_be_used_here, last="127.0.0.3")
        with pytest.raises(EngineConnectError, match="refused"):
            await to._connect(engine_connection_pool._endpoint("http://engine:1"))
        addresses(cannot_be_used_here, last="127.0.0.2")
        with pytest.raises(GatewayConnectError, match="no such address"):
            await to._connect(engine_connection_pool._endpoint("http://engine:1"))


async def test_of_a_name_all_of_whose_addresses_drop_packets_no_connect_is_left(
    addresses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_connection_pool, "NEXT_ADDRESS_S", 0.01)
    monkeypatch.setattr(engine_connection_pool, "CONNECT_TIMEOUT_S", 0.1)
    async with pool() as to:
        addresses(drops_packets, drops_packets, last="127.0.0.2")
        with pytest.raises(EngineConnectError, match="not open after"):
            await to._connect(engine_connection_pool._endpoint("http://engine:1"))
        assert not to._open
        await until(lambda: len(asyncio.all_tasks()) == 1)


# -- TLS ---------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert").write_bytes(made.public_bytes(pem))
    (folder / "key").write_bytes(private)
    return folder / "cert", folder / "key"


async def test_an_engine_with_tls_is_asked_if_its_certificate_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with engine(says(CHUNKED), tls) as script, pool() as to:
        with pytest.raises(ReplicaRequestError, match="certificate verify failed") as caught:
            await to_engine(to, script)
        assert not caught.value.computing
        trusting = ssl.create_default_context(cafile=str(cert))
        monkeypatch.setattr(engine_connection_pool, "_tls_context", lambda: trusting)
        for body in (b"x", b"x" * (1 << 20)):
            assert await (await ask(to, script, body)).read() == b"data: 1\n\n"


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls1.2", "tls1.3"])
def tls(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of an engine that the gateway trusts, with one version of TLS."""
    cert, key = certificate(tmp_path)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = made.maximum_version = request.param
    made.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    monkeypatch.setattr(engine_connection_pool, "_tls_context", lambda: trusting)
    return made


@pytest.mark.parametrize("aborts", [False, True])
async def test_over_tls_a_request_that_was_read_counts_as_computed(aborts: bool, tls: ssl.SSLContext) -> None:
    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if aborts:
            writer.transport.abort()
        raise ConnectionError

    async with engine(answer, tls) as script, pool() as to:
        with pytest.raises(ReplicaRequestError) as caught:
            await to_engine(to, script)
        assert caught.value.computing
        assert len(script.requests) == 1


async def test_over_tls_a_connection_carries_the_next_request(tls: ssl.SSLContext) -> None:
    read = asyncio.Event()

    async def answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-20])
        await read.wait()
        writer.write(CHUNKED[-20:])

    async with engine(answer, tls) as script, pool() as to:
        for _ in range(2):
            read.clear()
            response = await ask(to, script)
            parts = [await response.read_some()]
            read.set()
            while part := await response.read_some():
                parts.append(part)
            assert b"".join(parts) == b"data: 1\n\n"
        assert script.connections == 1


# -- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/v1/x", [(b"a", b"b\r\nc: d")]),
        (b"/v1/x", [(b"a", b"b\nc: d")]),
        (b"/v1/x", [(b"a", b"b\rc")]),
        (b"/v1/x", [(b"a\0", b"b")]),
        (b"/v1/x HTTP/1.1\r\na: b", []),
        (b"/v1/x y", []),
    ],
)
def test_nothing_in_a_request_begins_a_new_line(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ValueError, match="expected neither"):
        request_head(b"POST", target, b"h", headers, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
async def test_where_the_network_cuts_a_response_is_no_matter(size: int) -> None:
    one = SocketlessConnection()
    for start in range(0, len(CHUNKED), size):
        assert not one.is_released
        one.receive(CHUNKED[start : start + size])
    assert one.is_released
    assert (one.response.status, await one.response.read()) == (200, b"data: 1\n\n")


async def test_the_body_of_an_interim_answer_is_not_the_next_ones() -> None:
    one = SocketlessConnection()
    one.receive(b"HTTP/1.1 199 x\r\nContent-Length: 3\r\n\r\nabc")
    one.receive(OK)
    assert await one.response.read() == b"ok"
