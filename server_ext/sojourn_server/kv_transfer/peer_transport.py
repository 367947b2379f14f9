"""Byte streams between engines, by address: ``unix:PATH``, ``tcp:HOST:PORT``, or a transport that you add.

To add a transport, implement ``PeerTransport``. A ``write`` may return only once its memory may be reused,
and bytes must arrive in order or not at all. NVIDIA's NIXL (RDMA between registered memory) is not built in;
addresses with its scheme are refused with a message.
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
"""Each connection buffers at most twice this number of received bytes."""
_MAX_UNIX_PATH = 107
"""Maximum length of a path in ``struct sockaddr_un``, without the final zero."""


class ByteStream(Protocol):
    """One connection as a stream of bytes."""

    async def read(self, count: int) -> bytes:
        """Read exactly ``count`` bytes. Raises ``OSError`` or ``EOFError`` if the connection ends before
        that."""
        ...

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send the parts in order. Returns when their memory may be reused. Raises ``OSError``."""
        ...

    def close(self) -> None:
        """Close the connection at once. A running write ends and stops reading its memory. Idempotent. Call
        it only in the event loop."""
        ...


class TransportListener(Protocol):
    """Listens at one address of a transport."""

    @property
    def address(self) -> str:
        """The address that peers dial. It has the actual port if port 0 was requested."""
        ...

    async def close(self) -> None: ...


AcceptCallback = Callable[[ByteStream], Awaitable[None]]


class PeerTransport(Protocol):
    """One kind of transport. ``dial`` and ``listen`` raise ``OSError``, and ``ValueError`` for a malformed
    address."""

    async def dial(self, rest: str) -> ByteStream:
        """Connect to ``rest``, an address without its scheme."""
        ...

    async def listen(self, rest: str, accept: AcceptCallback) -> TransportListener:
        """Listen on ``rest``, an address without its scheme. ``accept`` runs for each connection,
        concurrently with others."""
        ...


class UnknownTransport(RuntimeError):
    """Raised for an address whose transport is unknown or not built in."""


def transport_for(address: str, transports: Mapping[str, PeerTransport]) -> tuple[PeerTransport, str]:
    """Return the transport of an address, and the address without its scheme. Raises ``ValueError`` for a
    malformed address, and ``UnknownTransport`` for an unknown scheme."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise ValueError(f"{address!r:.200} is not an address; expected unix:PATH or tcp:HOST:PORT")
    found = transports.get(scheme)
    if found is not None:
        return found, rest
    known = " or ".join(sorted(transports))
    if scheme == "nixl":
        raise UnknownTransport(
            f"{address:.200}: NIXL is not built in; use {known}, or pass the TransferManager a PeerTransport "
            "for that scheme"
        )
    raise UnknownTransport(f"{address:.200}: unknown transport {scheme!r:.80}; use {known}")


def check_address(address: str) -> None:
    """Check that a built-in transport can use an address. Raises ``ValueError`` for a malformed address, and
    ``UnknownTransport`` for another scheme."""
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
        # Otherwise ``write`` returns while the transport still refers to the caller's memory.
        writer.transport.set_write_buffer_limits(high=0)

    async def read(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
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
    """Unix sockets, for peers on one machine. Only the owner may use the socket file."""

    async def dial(self, rest: str) -> ByteStream:
        return SocketStream(*await asyncio.open_unix_connection(_unix_path(rest), limit=_READ_AHEAD_BYTES))

    async def listen(self, rest: str, accept: AcceptCallback) -> TransportListener:
        path = Path(_unix_path(rest))
        _remove_stale_socket(path)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await accept(SocketStream(reader, writer))

        server = await asyncio.start_unix_server(take, path, limit=_READ_AHEAD_BYTES)
        os.chmod(path, 0o600)
        return _SocketListener(server, f"unix:{path}", path)


class TcpTransport:
    """TCP sockets without authentication or encryption. Use them only in a private network."""

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
    """Return the built-in transports by scheme."""
    return {"unix": UnixTransport(), "tcp": TcpTransport()}


def _set_socket_options(writer: asyncio.StreamWriter) -> None:
    """Disable Nagle's algorithm, and enable keep-alive to detect peers that have vanished."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _unix_path(rest: str) -> str:
    if len(os.fsencode(rest)) > _MAX_UNIX_PATH:
        raise ValueError(f"the path of a Unix socket has at most {_MAX_UNIX_PATH} bytes: {rest:.200}")
    return rest


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket file of a dead engine. Raises ``OSError`` if a process listens there, or if the file
    is not a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
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
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{rest!r:.200} is not a host and port; expected, for example, 10.0.0.7:8500")
    return host.removeprefix("[").removesuffix("]"), int(port)


MAX_QUEUED_BYTES = 64 << 20
"""Maximum bytes of messages queued on one connection, without payloads. A connection that would exceed this
limit is closed. The limit is enough to offer a thousand long prompts at once."""
PIECE_BYTES = 256 << 10
"""Maximum bytes of one write to a stream; larger messages are sent in pieces. A peer must accept each piece
within ``patience_s`` seconds."""
_STALL_CHECKS = 4
"""A write's timeout ``patience_s`` is divided into this many timer steps. If this process pauses, only one
step expires, and waiting socket events are handled before the next. So a pause is not taken for a stalled
peer."""


class _QueuedMessage(NamedTuple):
    frame: bytes
    payload: Sequence[memoryview]
    item: int | None


class PeerConnection:
    """Sends queued messages on one stream. Use it only in its event loop. The queue's limit does not count
    payloads, because the link to peers already limits them."""

    def __init__(
        self, stream: ByteStream, patience_s: float, sent: Callable[[int], None], stalled: Callable[[], None]
    ) -> None:
        """``sent`` is called with the number of each link item whose memory ``run_sender`` no longer reads,
        whether the item was sent or not. ``stalled`` is called when the peer has accepted nothing for
        ``patience_s`` seconds; it must close the stream."""
        self.stream = stream
        self.tasks: list[asyncio.Task[None]] = []
        self.waiting_bytes = 0
        """Bytes of queued messages, without their payloads."""
        self._patience_s = patience_s
        self._sent = sent
        self._stalled = stalled
        self._timer: asyncio.TimerHandle
        self._queue: asyncio.Queue[_QueuedMessage | None] = asyncio.Queue()
        """Messages to send; ``None`` ends the queue."""

    def send(self, action: SendMessage) -> bool:
        """Queue a message. Returns false, without queueing, if the queue is full. Raises ``PeerWireError``
        for a message that is too long."""
        frame = encode(action.message, sum(part.nbytes for part in action.payload))
        if self.waiting_bytes + len(frame) > MAX_QUEUED_BYTES:
            return False
        self.waiting_bytes += len(frame)
        self._queue.put_nowait(_QueuedMessage(frame, action.payload, action.item))
        return True

    def finish(self) -> None:
        """Make ``run_sender`` return once the queue is empty."""
        self._queue.put_nowait(None)

    async def run_sender(self) -> None:
        """Send queued messages until ``finish``. Raises the stream's errors."""
        while (said := await self._queue.get()) is not None:
            try:
                for piece in _pieces([said.frame, *said.payload]):
                    await self._write(piece)
            except BaseException:
                self.stream.close()  # before the memory is reported as free
                raise
            finally:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    self._sent(said.item)

    def drain(self) -> list[int]:
        """Empty the queue of a closed connection. Returns the numbers of the link items whose messages were
        in it."""
        items = []
        while not self._queue.empty():
            said = self._queue.get_nowait()
            if said is not None:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    items.append(said.item)
        return items

    async def _write(self, piece: Sequence[memoryview]) -> None:
        self._watch_write(_STALL_CHECKS)
        try:
            await self.stream.write(piece)
        finally:
            self._timer.cancel()

    def _watch_write(self, left: int) -> None:
        """Start the timer that detects a stalled write. ``left``: number of timer steps left. If it is 0, the
        write has stalled: call ``stalled`` instead."""
        if not left:
            self._stalled()
            return
        later = asyncio.get_running_loop().call_later
        self._timer = later(self._patience_s / _STALL_CHECKS, self._watch_write, left - 1)


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """Split the parts into pieces of at most ``PIECE_BYTES``."""
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
