"""Connections to peers: messages on a stream, and the handshake that checks that both sides have KV of the
same kind.

The side that dials sends a ``HelloMessage``. The other side compares the two kinds of KV (``KvIdentity``) and
accepts or refuses. No KV is sent before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
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

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_REFUSALS = 256
"""Maximum number of reasons of refused peers that are logged."""
MAX_HANDSHAKE_BYTES = 64 << 10
"""Maximum bytes of a message from a peer that has not identified itself. Such a peer may send no payload."""
MIN_PAYLOAD_BYTES = 1 << 20
"""Payloads up to this size, in bytes, are accepted from every identified peer, even if this engine's own
payloads are smaller."""
PIECE_BYTES = 256 << 10
"""Maximum bytes of one write to a stream; larger messages are sent in pieces. A peer must accept each piece
within ``patience_s`` seconds."""
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
_PRIVATE_FIELDS = {"model", "hash_scheme"}


class TransferFailed(Exception):
    """Raised if a transfer cannot continue. The text is the reason, for the engine and for the log."""


def incompatibility_reason(
    ours: KvIdentity, theirs: Mapping[str, str | int], *, for_unidentified_peer: bool = False
) -> str | None:
    """Return why two engines cannot exchange blocks, as a message for the operator; ``None`` if they can.

    ``theirs``: the fields of the peer's ``KvIdentity``. ``for_unidentified_peer``: leave out the values of
    private fields, which contain local paths and the hash seed.
    """
    mine = asdict(ours)
    names = [*mine, *sorted(theirs.keys() - mine.keys())]
    different = [name for name in names if theirs.get(name) != mine.get(name)]
    if not different:
        return None

    def line(name: str) -> str:
        what = _FIELD_DESCRIPTIONS.get(name, name)
        if for_unidentified_peer and name in _PRIVATE_FIELDS:
            return what
        return f"{what}: {theirs.get(name, 'not said')!r} there, {mine.get(name, 'unknown')!r} here"

    listed = "; ".join(map(line, different))
    return f"KV of another kind cannot be used here: {listed}. Start both engines alike"


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
        self.epoch = ""
        """The run of the peer's process; empty before the handshake."""
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
        if not self.epoch and (head.payload_bytes or head.message_bytes > MAX_HANDSHAKE_BYTES):
            raise PeerWireError("the message is too large for a peer that has not identified itself")
        if head.payload_bytes > self._table.max_payload_bytes:
            raise PeerWireError(
                f"a payload of {head.payload_bytes} bytes is too long, expected at most "
                f"{self._table.max_payload_bytes}; give all engines the same chunk_bytes"
            )
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
        sending = self._table.spawn(self._send(frame, payload))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise

    def post(self, message: WireMessage) -> None:
        """Send a message without waiting for it."""
        if self.why_lost is None:
            self._table.spawn(self._send(encode(message), ()))

    async def _send(self, frame: bytes, payload: Sequence[memoryview]) -> None:
        async with self._sending:
            for piece in _pieces([frame, *payload]):
                self.check()
                writing = asyncio.ensure_future(self.stream.write(piece))
                for _ in range(STALL_CHECKS):
                    await asyncio.wait({writing}, timeout=self._table.limits.patience_s / STALL_CHECKS)
                    if writing.done():
                        break
                else:
                    self._table.counts["stalls"] += 1
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


class PeerTable:
    """All connections of one engine: one to each dialled address, and those that peers have opened."""

    def __init__(
        self,
        identity: KvIdentity,
        limits: TransferLimits,
        *,
        name: str,
        epoch: str,
        counts: Counter[str],
        dial: Callable[[str], Awaitable[PeerStream]],
        spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[object]],
        received: Callable[[PeerConnection, AnyWireMessage, bytes], None],
        lost: Callable[[PeerConnection, str], None],
    ) -> None:
        """``received`` is called with each message of an identified peer, ``lost`` when a connection has
        ended."""
        self.limits = limits
        self.counts = counts
        self.spawn = spawn
        self.conns: set[PeerConnection] = set()
        self.refusals: set[str] = set()
        """Reasons of refused handshakes, by this engine or by peers."""
        self.max_payload_bytes = max(
            limits.chunk_bytes, identity.block_bytes // identity.layers, MIN_PAYLOAD_BYTES
        )
        self.connection = PeerConnection
        self._identity = identity
        self._name = name
        self._epoch = epoch
        self._dial_address = dial
        self._received = received
        self._lost = lost
        self._dialled: dict[str, asyncio.Task[object]] = {}
        """Address → task that returns the connection to it."""

    async def reach(self, address: str, epoch: str | None) -> PeerConnection:
        """Connect to ``address``, or use the existing connection. ``epoch``: the run of the peer's process
        that the router chose; ``None`` for any. Raises ``TransferFailed``."""
        dialled = self._dialled.get(address)
        if dialled is None:
            dialled = self._dialled[address] = self.spawn(self._dial(address))
        conn = await asyncio.shield(dialled)
        assert isinstance(conn, PeerConnection)
        conn.check()
        if epoch is not None and epoch != conn.epoch:
            raise TransferFailed("the peer has restarted since it was chosen")
        return conn

    async def accept(self, stream: PeerStream) -> None:
        """Serve a connection that a peer has opened, until it ends."""
        conn = self.connection(self, stream)
        if len(self.conns) >= MAX_CONNECTIONS:
            self.counts["turned_away"] += 1
            stream.close()
            return
        self.conns.add(conn)
        await self._serve(conn, self._greet(conn))

    def drop(self, conn: PeerConnection, why: str) -> None:
        """Close a connection at once. The transfers that need it fail for the reason ``why``."""
        if conn.why_lost is None:
            conn.why_lost = why
            conn.stream.close()
            self.conns.discard(conn)
            self._dialled.pop(conn.address, None)
            self._lost(conn, why)

    async def _dial(self, address: str) -> PeerConnection:
        conn: PeerConnection | None = None
        try:
            async with asyncio.timeout(self.limits.patience_s):
                conn = self.connection(self, await self._dial_address(address), address)
                self.conns.add(conn)
                hello = HelloMessage(name=self._name, epoch=self._epoch, kv=asdict(self._identity))
                await conn.send(hello)
                answer, _ = await conn.receive()
            if isinstance(answer, RefusedMessage):
                self._refuse(address, answer.reason)
                raise TransferFailed(answer.reason)
            if not isinstance(answer, WelcomeMessage):
                raise PeerWireError(f"{type(answer).__name__} is not allowed here now")
        except (OSError, EOFError, ValueError, UnknownTransport, TransferFailed) as error:
            if isinstance(error, TransferFailed):
                why = str(error)
            elif isinstance(error, TimeoutError):
                self.counts["stalls"] += 1
                why = f"{address} does not answer"
            else:
                why = f"cannot reach {address}: {error}"
            self._dialled.pop(address, None)
            if conn is not None:
                self.drop(conn, why)
            raise TransferFailed(why) from error
        conn.epoch = answer.epoch
        self.spawn(self._serve(conn))
        return conn

    async def _greet(self, conn: PeerConnection) -> None:
        """Answer a peer's ``HelloMessage``."""
        async with asyncio.timeout(self.limits.patience_s):
            hello, _ = await conn.receive()
            if not isinstance(hello, HelloMessage):
                raise PeerWireError(f"{type(hello).__name__} is not allowed here now")
            why = incompatibility_reason(self._identity, hello.kv)
            if why is not None:
                self._refuse(hello.name, why)
                told = incompatibility_reason(self._identity, hello.kv, for_unidentified_peer=True)
                await conn.send(RefusedMessage(reason=told or why))
                raise EOFError(why)
            conn.epoch = hello.epoch
            await conn.send(WelcomeMessage(name=self._name, epoch=self._epoch))

    async def _serve(self, conn: PeerConnection, greeting: Awaitable[None] | None = None) -> None:
        """Receive a connection's messages until it ends."""
        why = "the connection has ended"
        try:
            if greeting is not None:
                await greeting
            while conn.why_lost is None:
                self._received(conn, *await conn.receive())
        except (OSError, EOFError, TransferFailed) as error:
            why = str(error) or why
            if isinstance(error, TimeoutError) and not conn.epoch:
                self.counts["stalls"] += 1
                why = "the peer has not identified itself"
        except PeerWireError as error:
            self.counts["not_understood"] += 1
            why = str(error)
        finally:
            self.drop(conn, why)

    def _refuse(self, peer: str, why: str) -> None:
        self.counts["refused"] += 1
        if why not in self.refusals and len(self.refusals) < MAX_REFUSALS:
            self.refusals.add(why)
            logger.warning("%s: no KV goes to or from %s: %s", self._name, peer, why)


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
