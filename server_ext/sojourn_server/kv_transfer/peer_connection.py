"""Connections to peers: messages on a stream, and the handshake that checks that both sides have KV of the
same kind.

The side that dials sends a ``HelloMessage``. The other side compares the two kinds of KV (``KvIdentity``) and
accepts or refuses. No KV is sent before that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ..kv_offload.shared_store import KvIdentity
from .peer_transport import SocketStream
from .staging_buffers import TransferLimits
from .transfer_wire import (
    HEAD_BYTES,
    AnyWireMessage,
    DataMessage,
    HelloMessage,
    PeerWireError,
    RefusedMessage,
    WelcomeMessage,
    WireMessage,
    decode,
    decode_head,
    encode,
)

_SETTINGS = {
    "kv_dtype": " (--kv-cache-dtype)",
    "hash_scheme": " (PYTHONHASHSEED, --prefix-caching-hash-algo, --block-size)",
}
"""What sets a field of ``KvIdentity``, where its name does not say it."""


class TransferFailed(Exception):
    """Raised if a transfer cannot continue. The text is the reason, for the engine and for the log."""


def incompatibility_reason(ours: KvIdentity, theirs: Mapping[str, str | int]) -> str:
    """Return why two engines cannot exchange blocks, as a message for the operator; empty if they can.
    ``theirs``: the fields of the peer's ``KvIdentity``."""
    mine = asdict(ours)
    lines = [
        f"{name}{_SETTINGS.get(name, '')}: {theirs.get(name, 'not said')!r} there, "
        f"{mine.get(name, 'unknown')!r} here"
        for name in [*mine, *sorted(theirs.keys() - mine.keys())]
        if theirs.get(name) != mine.get(name)
    ]
    if not lines:
        return ""
    return f"KV of another kind cannot be used here: {'; '.join(lines)}. Start both engines alike"


class PeerConnection:
    """Sends and receives messages on one stream."""

    def __init__(self, table: PeerTable, stream: SocketStream, address: str = "") -> None:
        self.stream = stream
        self.address = address
        """The dialled address; empty if the peer has dialled."""
        self.why_lost: str | None = None
        """Why the connection has ended; ``None`` while it is open."""
        self.unanswered = 0
        """Number of pings since the last message of the peer."""
        self.lane = asyncio.Lock()
        """Held by the transfer whose layers are being sent, so that transfers are served in order."""
        self.sending = asyncio.Lock()
        self._table = table

    async def receive(self) -> tuple[AnyWireMessage, bytes]:
        """Return the next message and its payload. Raises ``OSError`` or ``EOFError`` if the connection ends,
        and ``PeerWireError`` for an invalid message."""
        message_bytes, payload_bytes = decode_head(await self.stream.read(HEAD_BYTES))
        message = decode(await self.stream.read(message_bytes))
        if payload_bytes and not isinstance(message, DataMessage):
            raise PeerWireError(f"{type(message).__name__} has no payload")
        payload = await self.stream.read(payload_bytes) if payload_bytes else b""
        self.unanswered = 0
        return message, payload

    async def send(self, message: WireMessage, payload: Sequence[memoryview] = ()) -> None:
        """Send a message. Returns when the memory of ``payload`` may be reused, also if the caller is
        cancelled meanwhile. Raises ``TransferFailed`` for a lost connection or a message that is too long."""
        try:
            frame = encode(message, sum(part.nbytes for part in payload))
        except PeerWireError as error:
            raise TransferFailed(str(error)) from error
        sending = self._table.node.spawn(self._send(frame, payload))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise

    def post(self, message: WireMessage) -> None:
        """Send a message without waiting for it."""
        if self.why_lost is None:
            self._table.node.spawn(self._send(encode(message), ()))

    async def _send(self, frame: bytes, payload: Sequence[memoryview]) -> None:
        async with self.sending:
            self.check()
            try:
                await self.stream.write([frame, *payload])
            except OSError as error:
                self._table.drop(self, str(error) or "the connection has ended")
            self.check()

    def check(self) -> None:
        """Raise ``TransferFailed`` if the connection has ended."""
        if self.why_lost is not None:
            raise TransferFailed(self.why_lost)


class PeerNode(Protocol):
    """What connections use of their ``TransferNode``. ``received`` gets each message of an identified peer,
    ``lost`` the end of a connection."""

    identity: KvIdentity
    limits: TransferLimits
    name: str
    counts: Counter[str]

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...
    async def dial(self, address: str) -> SocketStream: ...
    def received(self, conn: PeerConnection, message: AnyWireMessage, payload: bytes) -> None: ...
    def lost(self, conn: PeerConnection, why: str) -> None: ...
    def warn(self, message: str, *arguments: object) -> None: ...


class PeerTable:
    """All connections of one engine: one to each dialled address, and those that peers have opened."""

    def __init__(self, node: PeerNode) -> None:
        self.node = node
        self.conns: set[PeerConnection] = set()
        self._dialled: dict[str, asyncio.Task[PeerConnection]] = {}
        """Address → task that returns the connection to it."""

    async def reach(self, address: str) -> PeerConnection:
        """Connect to ``address``, or use the existing connection. Raises ``TransferFailed``."""
        dialled = self._dialled.get(address)
        if dialled is None:
            dialled = self._dialled[address] = self.node.spawn(self._dial(address))
        conn = await asyncio.shield(dialled)
        conn.check()
        return conn

    async def accept(self, stream: SocketStream) -> None:
        """Serve a connection that a peer has opened, until it ends."""
        conn = PeerConnection(self, stream)
        self.conns.add(conn)
        await self._serve(conn, greets=True)

    def drop(self, conn: PeerConnection, why: str) -> None:
        """Close a connection at once. The transfers that need it fail for the reason ``why``."""
        if conn.why_lost is None:
            conn.why_lost = why
            conn.stream.close()
            self.conns.discard(conn)
            self._dialled.pop(conn.address, None)
            self.node.lost(conn, why)

    async def _dial(self, address: str) -> PeerConnection:
        conn, node = None, self.node
        try:
            async with asyncio.timeout(node.limits.patience_s):
                conn = PeerConnection(self, await node.dial(address), address)
                self.conns.add(conn)
                await conn.send(HelloMessage(name=node.name, kv=asdict(node.identity)))
                answer, _ = await conn.receive()
            if isinstance(answer, RefusedMessage):
                self._refuse(address, answer.reason)
                raise TransferFailed(answer.reason)
            if not isinstance(answer, WelcomeMessage):
                raise PeerWireError(f"{type(answer).__name__} is not allowed here now")
        except (OSError, EOFError, ValueError, TransferFailed) as error:
            why = f"cannot reach {address}: {str(error) or 'it does not answer'}"
            if isinstance(error, TransferFailed):
                why = str(error)
            self._dialled.pop(address, None)
            if conn is not None:
                self.drop(conn, why)
            raise TransferFailed(why) from error
        node.spawn(self._serve(conn))
        return conn

    async def _greet(self, conn: PeerConnection) -> None:
        """Answer a peer's ``HelloMessage``."""
        node = self.node
        async with asyncio.timeout(node.limits.patience_s):
            hello, _ = await conn.receive()
            if not isinstance(hello, HelloMessage):
                raise PeerWireError(f"{type(hello).__name__} is not allowed here now")
            why = incompatibility_reason(node.identity, hello.kv)
            if why:
                self._refuse(hello.name, why)
                await conn.send(RefusedMessage(reason=why))
                raise EOFError(why)
            await conn.send(WelcomeMessage())

    async def _serve(self, conn: PeerConnection, *, greets: bool = False) -> None:
        """Receive a connection's messages until it ends. ``greets``: the handshake comes first."""
        why = "the connection has ended"
        try:
            if greets:
                await self._greet(conn)
            while conn.why_lost is None:
                self.node.received(conn, *await conn.receive())
        except (OSError, EOFError, TransferFailed) as error:
            why = str(error) or why
        except PeerWireError as error:
            self.node.counts["not_understood"] += 1
            why = str(error)
        finally:
            self.drop(conn, why)

    def _refuse(self, peer: str, why: str) -> None:
        self.node.counts["refused"] += 1
        self.node.warn("%s: no KV goes to or from %s: %s", self.node.name, peer, why)
