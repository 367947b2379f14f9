"""Streams of bytes between peers, by address: ``unix:PATH``, ``tcp:HOST:PORT``, and what else is given.

A ``Transport`` is the place for another data plane. What is asked of it: that a write returns when its memory
may be used again, and that bytes arrive in order or not at all. NVIDIA's NIXL moves registered memory by RDMA
and would spare the copies; it is not built in, and says so where it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from .transfer_actions import SendMessage
from .transfer_wire import encode

_READ_AHEAD_BYTES = 256 << 10
"""Of each peer, twice as much lies in a buffer at most before anybody reads it."""
_MAX_UNIX_PATH = 107
"""What fits ``struct sockaddr_un``."""


class ByteStream(Protocol):
    """One connection."""

    async def read(self, count: int) -> bytes:
        """Exactly so many bytes. Raises ``OSError`` or ``EOFError`` where the connection ends before."""
        ...

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send, one after the other; returns when their memory may be used again. Raises ``OSError``."""
        ...

    def close(self) -> None:
        """End it at once, from the loop: a write that is under way ends too, well or not, and reads no memory
        any more. Again: nothing happens."""
        ...


class TransportListener(Protocol):
    """A place where peers are taken in."""

    @property
    def address(self) -> str:
        """Where to dial it; the port is the real one."""
        ...

    async def close(self) -> None: ...


AcceptCallback = Callable[[ByteStream], Awaitable[None]]


class PeerTransport(Protocol):
    """One way of reaching peers. Both calls raise ``OSError``, and ``ValueError`` for what is no address."""

    async def dial(self, rest: str) -> ByteStream:
        """Connect to ``rest``, an address without its scheme."""
        ...

    async def listen(self, rest: str, accept: AcceptCallback) -> TransportListener:
        """Take in who dials; ``accept`` is called with each, and runs beside."""
        ...


class UnknownTransport(RuntimeError):
    """The transport that an address names is not built in, or there is none of that name."""


def transport_for(address: str, transports: Mapping[str, PeerTransport]) -> tuple[PeerTransport, str]:
    """The transport of an address, and the rest of it. Raises ``UnknownTransport`` and ``ValueError``."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise ValueError(f"{address!r} is no address; expected unix:PATH or tcp:HOST:PORT")
    found = transports.get(scheme)
    if found is not None:
        return found, rest
    known = " or ".join(sorted(transports))
    if scheme == "nixl":
        raise UnknownTransport(
            f"{address}: NIXL is not built in; use {known}, or give the traffic manager a Transport of your "
            "own by that name"
        )
    raise UnknownTransport(f"{address}: there is no transport {scheme!r} here; use {known}")


def check_address(address: str) -> None:
    """Whether an engine may be told to listen there. Raises ``ValueError`` and ``UnknownTransport``."""
    transport, rest = transport_for(address, builtin_transports())
    if isinstance(transport, UnixTransport):
        _unix_path(rest)
    else:
        _host_and_port(rest)


class SocketStream:
    """A stream over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Else what ``write`` was given may lie in a buffer, by reference, after it has returned.
        writer.transport.set_write_buffer_limits(high=0)

    async def read(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._writer.transport.abort()


class _SocketListener:
    def __init__(self, server: asyncio.Server, address: str, path: Path | None = None) -> None:
        self._server = server
        self._address = address
        self._path = path

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        self._server.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


class UnixTransport:
    """Sockets of one machine, named by a path that only its owner may use."""

    async def dial(self, rest: str) -> ByteStream:
        return SocketStream(*await asyncio.open_unix_connection(_unix_path(rest), limit=_READ_AHEAD_BYTES))

    async def listen(self, rest: str, accept: AcceptCallback) -> TransportListener:
        path = Path(_unix_path(rest))
        _remove_stale_socket(path)
        server = await asyncio.start_unix_server(_accept_stream(accept), path, limit=_READ_AHEAD_BYTES)
        os.chmod(path, 0o600)
        return _SocketListener(server, f"unix:{path}", path)


class TcpTransport:
    """Sockets between machines. Nobody is asked who he is, nothing is hidden: for a network of one's own."""

    async def dial(self, rest: str) -> ByteStream:
        reader, writer = await asyncio.open_connection(*_host_and_port(rest), limit=_READ_AHEAD_BYTES)
        _set_socket_options(writer)
        return SocketStream(reader, writer)

    async def listen(self, rest: str, accept: AcceptCallback) -> TransportListener:
        host, port = _host_and_port(rest)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            _set_socket_options(writer)
            await accept(SocketStream(reader, writer))

        server = await asyncio.start_server(take, host, port, limit=_READ_AHEAD_BYTES)
        real = server.sockets[0].getsockname()[1]
        return _SocketListener(server, f"tcp:[{host}]:{real}" if ":" in host else f"tcp:{host}:{real}")


def builtin_transports() -> dict[str, PeerTransport]:
    """Transports by scheme."""
    return {"unix": UnixTransport(), "tcp": TcpTransport()}


def _accept_stream(
    accept: AcceptCallback,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(SocketStream(reader, writer))

    return take


def _set_socket_options(writer: asyncio.StreamWriter) -> None:
    """Nothing waits for more to be sent with it, and a machine that vanished is noticed some day."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _unix_path(rest: str) -> str:
    if len(os.fsencode(rest)) > _MAX_UNIX_PATH:
        raise ValueError(f"the path of a Unix socket has at most {_MAX_UNIX_PATH} bytes: {rest}")
    return rest


def _remove_stale_socket(path: Path) -> None:
    """Remove what a dead engine has left. Raises ``OSError`` where one lives there, or it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is there, and is no socket")
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)
    else:
        raise OSError(f"another process listens at {path}")
    finally:
        probe.close()


def _host_and_port(rest: str) -> tuple[str, int]:
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{rest!r} is no host and port; expected for example 10.0.0.7:8500")
    return host.removeprefix("[").removesuffix("]"), int(port)


MAX_QUEUED_BYTES = 64 << 20
"""Of messages that wait for one peer, as of a thousand long contexts offered at once. With more it is cut
off."""
PIECE_BYTES = 256 << 10
"""What a peer is to take within ``patience_s``; of larger messages each piece has as long."""
_STALL_CHECKS = 4
"""Times that the watch looks within that. Where this process stood still, the first look comes late, and
whatever the socket has done meanwhile is seen before the next."""


class _QueuedMessage(NamedTuple):
    frame: bytes
    payload: Sequence[memoryview]
    item: int | None


class PeerConnection:
    """What is to be said on a stream. Only in its loop."""

    def __init__(
        self,
        stream: ByteStream,
        patience_s: float,
        sent: Callable[[int], None],
        stalled: Callable[[], None],
    ) -> None:
        """``sent`` is told of each item that is out, or never will be: nothing reads its memory any more.
        ``stalled`` is told that the peer has taken nothing for ``patience_s``: it is to close the stream."""
        self.stream = stream
        self.tasks: list[asyncio.Task[None]] = []
        self.waiting_bytes = 0
        """Of messages that are not out."""
        self._patience_s = patience_s
        self._sent = sent
        self._stalled = stalled
        self._timer: asyncio.TimerHandle
        self._line: asyncio.Queue[_QueuedMessage | None] = asyncio.Queue()
        """``None``: nothing more comes."""

    def say(self, action: SendMessage) -> bool:
        """Put something into the line. False: too much waits in it already, and this does not.

        Raises ``PeerWireError`` for a message that is too long.
        """
        frame = encode(action.message, sum(part.nbytes for part in action.payload))
        if self.waiting_bytes + len(frame) > MAX_QUEUED_BYTES:
            return False
        self.waiting_bytes += len(frame)
        self._line.put_nowait(_QueuedMessage(frame, action.payload, action.item))
        return True

    def finish(self) -> None:
        """``talk`` returns once what was to be said before is out."""
        self._line.put_nowait(None)

    async def talk(self) -> None:
        """Say what is to be said, until ``finish``. Raises what the stream does."""
        while (said := await self._line.get()) is not None:
            try:
                for piece in _pieces([said.frame, *said.payload]):
                    await self._write(piece)
            except BaseException:
                self.stream.close()  # before anybody hears that its memory is free
                raise
            finally:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    self._sent(said.item)

    def unsaid(self) -> list[int]:
        """Empty the line, of a connection that is over; returns the items that were in it."""
        items = []
        while not self._line.empty():
            said = self._line.get_nowait()
            if said is not None:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    items.append(said.item)
        return items

    async def _write(self, piece: Sequence[memoryview]) -> None:
        self._look(_STALL_CHECKS)
        try:
            await self.stream.write(piece)
        finally:
            self._timer.cancel()

    def _look(self, left: int) -> None:
        if not left:
            self._stalled()
            return
        later = asyncio.get_running_loop().call_later
        self._timer = later(self._patience_s / _STALL_CHECKS, self._look, left - 1)


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, so many at a time."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            taken, rest = rest[:room], rest[room:]
            piece.append(taken)
            room -= taken.nbytes
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece
