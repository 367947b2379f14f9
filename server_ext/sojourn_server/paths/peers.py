"""Connections to peers, and the handshake: who dials says ``Hello``, and nothing goes before ``Welcome``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from .actions import Dial, HangUp, Send
from .depot import Depot, Watch
from .handshake import refusal, told
from .wire import Hello, Message, Refused, Welcome


class Stage(Enum):
    """How far a connection is."""

    DIALLED = "dialled"
    """We have said ``Hello``."""
    ANSWERED = "answered"
    """They are to say ``Hello``."""
    READY = "ready"


EXPECTED: Mapping[Stage, tuple[type[Message], ...]] = {
    Stage.DIALLED: (Welcome, Refused),
    Stage.ANSWERED: (Hello,),
}
"""What may be said before a connection is ready; from then on none of it."""
MOST_REFUSALS = 256
"""Peers of which it is kept why they were refused."""
HANDSHAKE = (Hello, Welcome, Refused)


class Caller(Protocol):
    """Who wants to reach a peer."""

    def reached(self, conn: int, epoch: str, now: float) -> None: ...
    def unreachable(self, why: str, now: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Conn:
    stage: Stage
    watch: Watch
    address: str | None = None
    """Where it was dialled."""
    name: str = ""
    epoch: str = ""


@dataclass(slots=True, eq=False)
class _Address:
    dial: Dial
    """The answer to an earlier one has come too late."""
    watch: Watch
    conn: int | None = None
    callers: list[Caller] = field(default_factory=list)


class Peers:
    """One connection to each address that was dialled, and those who dialled us."""

    def __init__(self, depot: Depot, name: str, epoch: str) -> None:
        self.name = name
        self.epoch = epoch
        self._depot = depot
        self._conns: dict[int, _Conn] = {}
        self._addresses: dict[str, _Address] = {}
        self._dials = 0
        self.refusals: dict[str, str] = {}
        """Why there is no KV between us and a peer, by its name or address: the first time."""

    @property
    def busy(self) -> bool:
        """Somebody waits for a connection, or for its first words."""
        return any(each.callers for each in self._addresses.values()) or any(
            conn.stage is not Stage.READY for conn in self._conns.values()
        )

    def reach(self, address: str, caller: Caller, now: float) -> None:
        """Tell ``caller`` when there is a connection to ``address``, or that there is none."""
        known = self._addresses.get(address)
        if known is not None and known.conn is not None:
            conn = self._conns[known.conn]
            if conn.stage is Stage.READY:
                caller.reached(known.conn, conn.epoch, now)
                return
        if known is None:
            self._dials += 1
            dial = Dial(address, self._dials)
            known = self._addresses[address] = _Address(dial, Watch(self._depot.limits.patience_s, now))
            self._depot.actions.append(dial)
        known.callers.append(caller)

    def dialled(self, dial: Dial, conn: int, now: float) -> None:
        """The connection that was asked for is there."""
        known = self._addresses.get(dial.address)
        if known is None or known.dial != dial:  # it took too long
            self._depot.actions.append(HangUp(conn))
            return
        known.conn = conn
        self._conns[conn] = _Conn(Stage.DIALLED, Watch(self._depot.limits.patience_s, now), dial.address)
        hello = Hello(name=self.name, epoch=self.epoch, kv=told(self._depot.identity))
        self._depot.actions.append(Send(conn, hello))

    def undialable(self, dial: Dial, why: str, now: float) -> None:
        """There is no connection to be had."""
        known = self._addresses.get(dial.address)
        if known is not None and known.dial == dial:
            self._give_up(dial.address, f"cannot reach {dial.address}: {why}", now)

    def accepted(self, conn: int, now: float) -> None:
        """Somebody has dialled us."""
        self._conns[conn] = _Conn(Stage.ANSWERED, Watch(self._depot.limits.patience_s, now))

    def conns(self) -> list[int]:
        """Every connection there is."""
        return list(self._conns)

    @property
    def strangers(self) -> int:
        """Connections of those who dialled us and have not said who they are."""
        return sum(conn.stage is Stage.ANSWERED for conn in self._conns.values())

    def is_ready(self, conn: int) -> bool:
        known = self._conns.get(conn)
        return known is not None and known.stage is Stage.READY

    def received(self, conn: int, message: Message, now: float) -> bool:
        """A word of the handshake; False: it has no business to be said now, and the connection is to end."""
        known = self._conns.get(conn)
        if known is None:
            return False
        if not isinstance(message, EXPECTED.get(known.stage, ())):
            return False
        if isinstance(message, Hello):
            why = refusal(self._depot.identity, message.kv)
            if why is not None:
                self._depot.counts["refused"] += 1
                self._note_refusal(message.name, why)
                reason = refusal(self._depot.identity, message.kv, for_stranger=True) or why
                self._depot.actions += [Send(conn, Refused(reason=reason)), HangUp(conn)]
                del self._conns[conn]
                return True
            known.name, known.epoch, known.stage = message.name, message.epoch, Stage.READY
            self._depot.actions.append(Send(conn, Welcome(name=self.name, epoch=self.epoch)))
            return True
        assert known.address is not None
        if isinstance(message, Refused):
            self._depot.counts["refused"] += 1
            self._note_refusal(known.address, message.reason)
            self._depot.actions.append(HangUp(conn))
            self._give_up(known.address, message.reason, now)
            return True
        assert isinstance(message, Welcome)
        known.name, known.epoch, known.stage = message.name, message.epoch, Stage.READY
        callers, self._addresses[known.address].callers = self._addresses[known.address].callers, []
        for caller in callers:
            caller.reached(conn, known.epoch, now)
        return True

    def lost(self, conn: int, why: str, now: float) -> None:
        """A connection has ended; the next who wants to reach its address dials anew."""
        known = self._conns.pop(conn, None)
        if known is not None and known.address is not None:
            self._give_up(known.address, why, now)

    def tick(self, now: float) -> None:
        """Give up what has not been answered."""
        for address, known in list(self._addresses.items()):
            if known.conn is None and known.watch.stalled(now):
                self._depot.counts["stalls"] += 1
                self._give_up(address, f"{address} does not answer", now)
        for conn, of in list(self._conns.items()):
            if of.stage is not Stage.READY and of.watch.stalled(now):
                self._depot.counts["stalls"] += 1
                self._depot.actions.append(HangUp(conn))
                self.lost(conn, "the peer has not said who it is", now)

    def _note_refusal(self, peer: str, why: str) -> None:
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals.setdefault(peer, why)

    def _give_up(self, address: str, why: str, now: float) -> None:
        known = self._addresses.pop(address, None)
        if known is None:
            return
        if known.conn is not None:
            self._conns.pop(known.conn, None)
        for caller in known.callers:
            caller.unreachable(why, now)
