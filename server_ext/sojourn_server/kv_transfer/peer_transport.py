"""Byte streams between engines, by address: ``unix:PATH`` or ``tcp:HOST:PORT``.

Unix sockets are for peers on one machine, and only the owner may use the socket file. TCP sockets have no
authentication or encryption: use them only in a private network. NVIDIA's NIXL (RDMA between registered
memory) is not built in; addresses with its scheme are refused with a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .transfer_actions import SendMessage
from .transfer_wire import encode

_READ_AHEAD_BYTES = 256 << 10
"""Each connection buffers at most twice this number of received bytes."""
_MAX_UNIX_PATH = 107
"""Maximum length of a path in ``struct sockaddr_un``, without the final zero."""


class UnknownTransport(RuntimeError):
    """Raised for an address whose transport is unknown or not built in."""


def check_address(address: str) -> None:
    """Raise ``ValueError`` for a malformed address, and ``UnknownTransport`` for an unknown scheme."""
    _place(address)


def _place(address: str) -> str | tuple[str, int]:
    """Return the path of a Unix socket, or host and port. Raises what ``check_address`` raises."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise ValueError(f"{address!r:.200} is not an address; expected unix:PATH or tcp:HOST:PORT")
    if scheme == "tcp":
        return _host_and_port(rest)
    if scheme != "unix":
        what = "NIXL is not built in" if scheme == "nixl" else f"unknown transport {scheme!r:.80}"
        raise UnknownTransport(f"{address:.200}: {what}; use tcp or unix")
    if len(os.fsencode(rest)) > _MAX_UNIX_PATH:
        raise ValueError(f"the path of a Unix socket has at most {_MAX_UNIX_PATH} bytes: {rest:.200}")
    return rest


async def dial(address: str) -> SocketStream:
    """Connect to ``address``. Raises ``OSError``, and what ``check_address`` raises."""
    place = _place(address)
    if isinstance(place, str):
        return SocketStream(*await asyncio.open_unix_connection(place, limit=_READ_AHEAD_BYTES))
    return SocketStream(*await asyncio.open_connection(*place, limit=_READ_AHEAD_BYTES))


async def listen(
    address: str, accept: Callable[[SocketStream], Awaitable[None]]
) -> tuple[asyncio.Server, str]:
    """Listen on ``address``. ``accept`` runs for each connection, concurrently with others. Returns the
    server and the address that peers dial, which has the actual port if port 0 was requested. Raises
    ``OSError``, and what ``check_address`` raises."""
    place = _place(address)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(SocketStream(reader, writer))

    if isinstance(place, str):
        _remove_stale_socket(Path(place))
        server = await asyncio.start_unix_server(take, place, limit=_READ_AHEAD_BYTES)
        os.chmod(place, 0o600)
        return server, address
    server = await asyncio.start_server(take, *place, limit=_READ_AHEAD_BYTES)
    host, port = place[0], server.sockets[0].getsockname()[1]
    return server, f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def stop_listening(server: asyncio.Server, address: str) -> None:
    """Close a listener, and remove the file of a Unix socket."""
    server.close()
    if address.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("unix:"))


class SocketStream:
    """One connection as a stream of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Otherwise ``write`` returns while the transport still refers to the caller's memory.
        writer.transport.set_write_buffer_limits(high=0)
        sock = writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # to detect peers that have vanished

    async def read(self, count: int) -> bytes:
        """Read exactly ``count`` bytes. Raises ``OSError`` or ``EOFError`` if the connection ends before
        that."""
        return await self._reader.readexactly(count)

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send the parts in order. Returns when their memory may be reused. Raises ``OSError``."""
        for part in parts:
            self._writer.write(part)
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection at once. A running write ends and stops reading its memory. Idempotent. Call
        it only in the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._writer.transport.abort()


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
        self,
        stream: SocketStream,
        patience_s: float,
        sent: Callable[[int], None],
        stalled: Callable[[], None],
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
