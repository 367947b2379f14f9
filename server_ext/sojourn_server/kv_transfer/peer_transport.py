"""Byte streams between engines, by address: ``unix:PATH`` or ``tcp:HOST:PORT``.

Unix sockets are for peers on one machine, and only the owner may use the socket file. TCP sockets have no
authentication or encryption: use them only in a private network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

_READ_AHEAD_BYTES = 256 << 10
"""Each connection buffers at most twice this number of received bytes."""


def parse_address(address: str) -> str | tuple[str, int]:
    """Return the path of a Unix socket, or host and port. Raises ``ValueError`` for another address."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{address!r:.200} is not an address; expected unix:PATH or tcp:HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def dial(address: str) -> SocketStream:
    """Connect to ``address``. Raises ``OSError``, or ``ValueError`` for a wrong address."""
    place = parse_address(address)
    if isinstance(place, str):
        return SocketStream(*await asyncio.open_unix_connection(place, limit=_READ_AHEAD_BYTES))
    return SocketStream(*await asyncio.open_connection(*place, limit=_READ_AHEAD_BYTES))


async def listen(
    address: str, accept: Callable[[SocketStream], Awaitable[None]]
) -> tuple[asyncio.Server, str]:
    """Listen on ``address``. ``accept`` runs for each connection, concurrently with others. Returns the
    server and the address that peers dial, which has the actual port if port 0 was requested. Raises
    ``OSError``, or ``ValueError`` for a wrong address."""
    place = parse_address(address)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(SocketStream(reader, writer))

    if isinstance(place, str):
        if _is_used(place):
            raise OSError(f"another process listens at {place}")
        server = await asyncio.start_unix_server(take, place, limit=_READ_AHEAD_BYTES)
        os.chmod(place, 0o600)
        return server, address
    server = await asyncio.start_server(take, *place, limit=_READ_AHEAD_BYTES)
    host, port = place[0], server.sockets[0].getsockname()[1]
    return server, f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


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
            await self._writer.drain()  # asyncio copies what the socket does not take at once

    def close(self) -> None:
        """Close the connection at once. A running write ends and stops reading its memory. Idempotent. Call
        it only in the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._writer.transport.abort()


def _is_used(path: str) -> bool:
    """Whether a process listens at ``path``. Asyncio replaces the socket file of a dead engine."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
