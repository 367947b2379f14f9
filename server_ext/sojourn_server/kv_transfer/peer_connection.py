"""Connections to peers: messages on a stream, and the handshake that checks that both sides have KV of the
same kind.

The side that dials sends a ``HelloMessage``. The other side compares the two kinds of KV (``KvIdentity``) and
accepts or refuses. No KV is sent before that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ..kv_offload.block_file import KvIdentity
from .peer_transport import UnknownTransport
from .transfer_limits import TransferLimits
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

STALL_CHECKS = 4
"""A write's timeout is divided into this many steps. If this process pauses, only one step expires, and
waiting socket events are handled before the next. So a pause is not taken for a stalled peer."""

_FIELD_DESCRIPTIONS = {
    "model": "the model",
    "kv_dtype": "the data type of KV (--kv-cache-dtype)",
    "block_tokens": "the tokens of a Full Block",
    "block_bytes": "the bytes of a Full Block",
    "layers": "the number of layers",
    "hash_scheme": "how blocks are hashed (PYTHONHASHSEED, --prefix-caching-hash-algo, --block-size)",
    "vllm_version": "the vLLM release, which is the layout within a layer",
    "tp_rank": "the rank",
    "tp_size": "the number of ranks",
}
_PRIVATE_FIELDS = ("model", "hash_scheme")
"""Fields with local paths and the hash seed, which a refused peer is not told."""


class TransferFailed(Exception):
    """Raised if a transfer cannot continue. The text is the reason, for the engine and for the log."""


def incompatibility_reason(
    ours: KvIdentity, theirs: Mapping[str, str | int], *, hidden: Collection[str] = ()
) -> str:
    """Return why two engines cannot exchange blocks, as a message for the operator; empty if they can.

    ``theirs``: the fields of the peer's ``KvIdentity``. ``hidden``: fields whose values are left out.
    """
    mine, lines = asdict(ours), []
    for name in [*mine, *sorted(theirs.keys() - mine.keys())]:
        if theirs.get(name) != mine.get(name):
            values = f": {theirs.get(name, 'not said')!r} there, {mine.get(name, 'unknown')!r} here"
            lines.append(_FIELD_DESCRIPTIONS.get(name, name) + values * (name not in hidden))
    if not lines:
        return ""
    return f"KV of another kind cannot be used here: {'; '.join(lines)}. Start both engines alike"


class PeerStream(Protocol):
    """The bytes of a connection (``SocketStream``)."""

    async def read(self, count: int) -> bytes: ...
    async def write(self, parts: Sequence[bytes | memoryview]) -> None: ...
    def close(self) -> None: ...


class PeerConnection:
    """Sends and receives messages on one stream."""

    def __init__(self, table: PeerTable, stream: PeerStream, address: str = "") -> None:
        self.stream = stream
        self.address = address
        """The dialled address; empty if the peer has dialled."""
        self.is_identified = False
        """Whether the handshake has succeeded."""
        self.why_lost: str | None = None
        """Why the connection has ended; ``None`` while it is open."""
        self.lane = asyncio.Lock()
        """Held by the transfer whose layers are being sent, so that transfers are served in order."""
        self._table = table
        self._sending = asyncio.Lock()

    async def receive(self) -> tuple[AnyWireMessage, bytes]:
        """Return the next message and its payload. Raises ``OSError`` or ``EOFError`` if the connection ends,
        and ``PeerWireError`` for an invalid message."""
        head = decode_head(await self.stream.read(HEAD_BYTES))
        message = decode(await self.stream.read(head.message_bytes))
        if head.payload_bytes and not isinstance(message, DataMessage):
            raise PeerWireError(f"{type(message).__name__} has no payload")
        return message, await self.stream.read(head.payload_bytes) if head.payload_bytes else b""

    async def send(self, message: WireMessage, payload: Sequence[memoryview] = ()) -> None:
        """Send a message. Returns when the memory of ``payload`` may be reused, also if the caller is
        cancelled meanwhile. Raises ``TransferFailed`` if the connection has ended or the peer accepts no
        data."""
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
        node = self._table.node
        async with self._sending:
            self.check()
            writing = asyncio.ensure_future(self.stream.write([frame, *payload]))
            for _ in range(STALL_CHECKS):
                await asyncio.wait({writing}, timeout=node.limits.patience_s / STALL_CHECKS)
                if writing.done():
                    break
            else:
                node.counts["stalls"] += 1
                self._table.drop(self, "the peer accepts no data")
            try:
                await writing
            except OSError as error:
                self._table.drop(self, str(error) or "the connection has ended")
            self.check()

    def check(self) -> None:
        """Raise ``TransferFailed`` if the connection has ended."""
        if self.why_lost is not None:
            raise TransferFailed(self.why_lost)


class PeerNode(Protocol):
    """What connections use of their ``TransferNode``."""

    identity: KvIdentity
    limits: TransferLimits
    name: str
    epoch: str
    counts: Counter[str]

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]: ...
    async def dial(self, address: str) -> PeerStream: ...
    def received(self, conn: PeerConnection, message: AnyWireMessage, payload: bytes) -> None: ...
    def lost(self, conn: PeerConnection, why: str) -> None: ...
    def warn(self, message: str, *arguments: object) -> None: ...


class PeerTable:
    """All connections of one engine: one to each dialled address, and those that peers have opened."""

    def __init__(self, node: PeerNode) -> None:
        """``node.received`` is called with each message of an identified peer, ``node.lost`` when a
        connection has ended."""
        self.node = node
        self.conns: set[PeerConnection] = set()
        self.connection = PeerConnection
        self._dialled: dict[str, asyncio.Task[object]] = {}
        """Address → task that returns the connection to it."""

    async def reach(self, address: str) -> PeerConnection:
        """Connect to ``address``, or use the existing connection. Raises ``TransferFailed``."""
        dialled = self._dialled.get(address)
        if dialled is None:
            dialled = self._dialled[address] = self.node.spawn(self._dial(address))
        conn = await asyncio.shield(dialled)
        assert isinstance(conn, PeerConnection)
        conn.check()
        return conn

    async def accept(self, stream: PeerStream) -> None:
        """Serve a connection that a peer has opened, until it ends."""
        conn = self.connection(self, stream)
        self.conns.add(conn)
        await self._serve(conn, self._greet(conn))

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
                conn = self.connection(self, await node.dial(address), address)
                self.conns.add(conn)
                hello = HelloMessage(name=node.name, epoch=node.epoch, kv=asdict(node.identity))
                await conn.send(hello)
                answer, _ = await conn.receive()
            if isinstance(answer, RefusedMessage):
                self._refuse(address, answer.reason)
                raise TransferFailed(answer.reason)
            if not isinstance(answer, WelcomeMessage):
                raise PeerWireError(f"{type(answer).__name__} is not allowed here now")
        except (OSError, EOFError, ValueError, UnknownTransport, TransferFailed) as error:
            why = f"cannot reach {address}: {error}"
            if isinstance(error, TransferFailed):
                why = str(error)
            elif isinstance(error, TimeoutError):
                node.counts["stalls"] += 1
                why = f"{address} does not answer"
            self._dialled.pop(address, None)
            if conn is not None:
                self.drop(conn, why)
            raise TransferFailed(why) from error
        conn.is_identified = True
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
                told = incompatibility_reason(node.identity, hello.kv, hidden=_PRIVATE_FIELDS)
                await conn.send(RefusedMessage(reason=told))
                raise EOFError(why)
            conn.is_identified = True
            await conn.send(WelcomeMessage(name=node.name, epoch=node.epoch))

    async def _serve(self, conn: PeerConnection, greeting: Awaitable[None] | None = None) -> None:
        """Receive a connection's messages until it ends."""
        why = "the connection has ended"
        try:
            if greeting is not None:
                await greeting
            while conn.why_lost is None:
                self.node.received(conn, *await conn.receive())
        except (OSError, EOFError, TransferFailed) as error:
            why = str(error) or why
            if isinstance(error, TimeoutError) and not conn.is_identified:
                self.node.counts["stalls"] += 1
                why = "the peer has not identified itself"
        except PeerWireError as error:
            self.node.counts["not_understood"] += 1
            why = str(error)
        finally:
            self.drop(conn, why)

    def _refuse(self, peer: str, why: str) -> None:
        self.node.counts["refused"] += 1
        self.node.warn("%s: no KV goes to or from %s: %s", self.node.name, peer, why)
