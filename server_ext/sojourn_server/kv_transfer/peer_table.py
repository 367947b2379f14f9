"""Connections to peers, and the handshake that checks that both sides have KV of the same kind.

The side that dials sends a ``HelloMessage``. The other side compares the two kinds of KV (``KvIdentity``) and
accepts or refuses. No KV is sent before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol

from ..kv_offload.block_file import KvIdentity
from .transfer_actions import CloseConnection, DialPeer, SendMessage
from .transfer_context import StallDetector, TransferContext
from .transfer_wire import HelloMessage, RefusedMessage, WelcomeMessage, WireMessage

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


class HandshakeStage(Enum):
    """Stage of a connection's handshake."""

    DIALLED = "dialled"
    """This side dialled and has sent ``HelloMessage``."""
    ANSWERED = "answered"
    """This side has answered the peer's dial and waits for its ``HelloMessage``."""
    READY = "ready"


EXPECTED_MESSAGES: Mapping[HandshakeStage, tuple[type[WireMessage], ...]] = {
    HandshakeStage.DIALLED: (WelcomeMessage, RefusedMessage),
    HandshakeStage.ANSWERED: (HelloMessage,),
}
"""Handshake stage → handshake messages that the peer may send in this stage. In ``READY`` the peer may send
none."""
MAX_KEPT_REFUSALS = 256
"""Maximum number of refused peers whose reason is remembered. Further refusals are only counted."""
HANDSHAKE_MESSAGES = (HelloMessage, WelcomeMessage, RefusedMessage)


class PeerCaller(Protocol):
    """A transfer that needs a connection to a peer. After ``PeerTable.reach``, exactly one of the methods is
    called, once."""

    def reached(self, conn: int, epoch: str, now: float) -> None: ...
    def unreachable(self, why: str, now: float) -> None: ...


@dataclass(slots=True, eq=False)
class _PeerConn:
    stage: HandshakeStage
    watch: StallDetector
    address: str | None = None
    """The dialled address; ``None`` if the peer dialled."""
    epoch: str = ""


@dataclass(slots=True, eq=False)
class _DialedAddress:
    dial: DialPeer
    """The newest dial to this address. Results of earlier dials to it are ignored."""
    watch: StallDetector
    conn: int | None = None
    callers: list[PeerCaller] = field(default_factory=list)
    """Transfers that wait for the connection to be ready."""


class PeerTable:
    """All connections of one engine: one to each dialled address, and those that peers have opened."""

    def __init__(self, ctx: TransferContext, name: str, epoch: str) -> None:
        self.name = name
        self.epoch = epoch
        self._ctx = ctx
        self._conns: dict[int, _PeerConn] = {}
        self._addresses: dict[str, _DialedAddress] = {}
        self._dials = 0
        self.refusals: dict[str, str] = {}
        """Name or address of a peer → reason of its first refusal, by this engine or by the peer."""

    @property
    def busy(self) -> bool:
        """Whether a dial or a handshake is in progress."""
        return any(each.callers for each in self._addresses.values()) or any(
            conn.stage is not HandshakeStage.READY for conn in self._conns.values()
        )

    def reach(self, address: str, caller: PeerCaller, now: float) -> None:
        """Connect to ``address``, or use the existing connection. Calls ``caller.reached`` with the
        connection's number and the peer's epoch, or ``caller.unreachable`` with the reason. The call may come
        before this method returns."""
        known = self._addresses.get(address)
        if known is not None and known.conn is not None:
            conn = self._conns[known.conn]
            if conn.stage is HandshakeStage.READY:
                caller.reached(known.conn, conn.epoch, now)
                return
        if known is None:
            self._dials += 1
            dial = DialPeer(address, self._dials)
            known = self._addresses[address] = _DialedAddress(
                dial, StallDetector(self._ctx.limits.patience_s, now)
            )
            self._ctx.actions.append(dial)
        known.callers.append(caller)

    def dialled(self, dial: DialPeer, conn: int, now: float) -> None:
        """Handle a successful dial: begin the handshake on connection ``conn``."""
        known = self._addresses.get(dial.address)
        if known is None or known.dial != dial:  # the dial was given up
            self._ctx.actions.append(CloseConnection(conn))
            return
        known.conn = conn
        self._conns[conn] = _PeerConn(
            HandshakeStage.DIALLED, StallDetector(self._ctx.limits.patience_s, now), dial.address
        )
        hello = HelloMessage(name=self.name, epoch=self.epoch, kv=asdict(self._ctx.identity))
        self._ctx.actions.append(SendMessage(conn, hello))

    def dial_failed(self, dial: DialPeer, why: str, now: float) -> None:
        """Handle a failed dial: tell the transfers that wait for it that the peer is unreachable."""
        known = self._addresses.get(dial.address)
        if known is not None and known.dial == dial:
            self._give_up(dial.address, f"cannot reach {dial.address}: {why}", now)

    def accepted(self, conn: int, now: float) -> None:
        """Handle a connection opened by a peer: wait for its ``HelloMessage``."""
        self._conns[conn] = _PeerConn(
            HandshakeStage.ANSWERED, StallDetector(self._ctx.limits.patience_s, now)
        )

    def conns(self) -> list[int]:
        """Return the numbers of all connections."""
        return list(self._conns)

    @property
    def unidentified_peers(self) -> int:
        """Number of connections opened by peers that have not identified themselves."""
        return sum(conn.stage is HandshakeStage.ANSWERED for conn in self._conns.values())

    def is_ready(self, conn: int) -> bool:
        known = self._conns.get(conn)
        return known is not None and known.stage is HandshakeStage.READY

    def received(self, conn: int, message: WireMessage, now: float) -> bool:
        """Handle a handshake message. Returns false if the message is not allowed now; the caller must then
        close the connection."""
        known = self._conns.get(conn)
        if known is None:
            return False
        if not isinstance(message, EXPECTED_MESSAGES.get(known.stage, ())):
            return False
        if isinstance(message, HelloMessage):
            why = incompatibility_reason(self._ctx.identity, message.kv)
            if why is not None:
                self._ctx.counts["refused"] += 1
                self._note_refusal(message.name, why)
                reason = (
                    incompatibility_reason(self._ctx.identity, message.kv, for_unidentified_peer=True) or why
                )
                self._ctx.actions += [
                    SendMessage(conn, RefusedMessage(reason=reason)),
                    CloseConnection(conn),
                ]
                del self._conns[conn]
                return True
            known.epoch, known.stage = message.epoch, HandshakeStage.READY
            self._ctx.actions.append(SendMessage(conn, WelcomeMessage(name=self.name, epoch=self.epoch)))
            return True
        assert known.address is not None
        if isinstance(message, RefusedMessage):
            self._ctx.counts["refused"] += 1
            self._note_refusal(known.address, message.reason)
            self._ctx.actions.append(CloseConnection(conn))
            self._give_up(known.address, message.reason, now)
            return True
        assert isinstance(message, WelcomeMessage)
        known.epoch, known.stage = message.epoch, HandshakeStage.READY
        callers, self._addresses[known.address].callers = self._addresses[known.address].callers, []
        for caller in callers:
            caller.reached(conn, known.epoch, now)
        return True

    def connection_lost(self, conn: int, why: str, now: float) -> None:
        """Handle the end of a connection. The next ``reach`` of its address dials again."""
        known = self._conns.pop(conn, None)
        if known is not None and known.address is not None:
            self._give_up(known.address, why, now)

    def tick(self, now: float) -> None:
        """End dials and handshakes that have timed out."""
        for address, known in list(self._addresses.items()):
            if known.conn is None and known.watch.stalled(now):
                self._ctx.counts["stalls"] += 1
                self._give_up(address, f"{address} does not answer", now)
        for conn, peer in list(self._conns.items()):
            if peer.stage is not HandshakeStage.READY and peer.watch.stalled(now):
                self._ctx.counts["stalls"] += 1
                self._ctx.actions.append(CloseConnection(conn))
                self.connection_lost(conn, "the peer has not identified itself", now)

    def _note_refusal(self, peer: str, why: str) -> None:
        if len(self.refusals) < MAX_KEPT_REFUSALS:
            self.refusals.setdefault(peer, why)

    def _give_up(self, address: str, why: str, now: float) -> None:
        known = self._addresses.pop(address, None)
        if known is None:
            return
        if known.conn is not None:
            self._conns.pop(known.conn, None)
        for caller in known.callers:
            caller.unreachable(why, now)
