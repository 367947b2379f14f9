"""What coordinator, gateways and engines say to each other. Plain data, written down as msgpack.

``epoch`` in all of it: which coordinator speaks, or is spoken to. A later one has a higher number, and
whoever has heard of that does not listen to an earlier one.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import msgspec

from ..core import facts
from ..core.journal import Changes
from ..http.decider import ProgramPlace, ReplicaStatus
from ..http.watch import Description
from ..pd.decider import PairStatus
from ..pd.facts import SendPair
from ..pd.told import LinkTold, PathsTold

Message = TypeVar("Message")

NOT_KNOWN = -1
"""Requests in flight, of an engine that has not registered with this coordinator: who waits for it to be left
waits on."""


class CannotBeWritten(Exception):
    """A message has something in it that msgpack has no bytes for, such as an integer beyond 64 bits."""


class Status(str, Enum):
    """What became of what was said."""

    OK = "ok"
    JOIN = "join"
    """The coordinator does not know who speaks, or began anew since: join (again), and say everything."""
    DEPOSED = "deposed"
    """There is a later coordinator: this one decides nothing any more."""


class Place(msgspec.Struct, frozen=True):
    """A replica, as a gateway must know it."""

    replica_id: str
    url: str
    rank: int | None
    description: Description
    health: str
    direct: bool
    """A turn of a program at home there would be sent there now: it need not be asked about."""
    takes_new: bool
    paths: PathsTold | None = None
    """Of an engine of pairs."""

    @property
    def instance(self) -> str:
        """Which life of it."""
        return self.description.instance


class ProbeAnswer(msgspec.Struct, frozen=True):
    """What a gateway found when it was asked whether a replica lives."""

    replica_id: str
    instance: str
    alive: bool


class Join(msgspec.Struct, frozen=True):
    """A gateway is there, and says what it has."""

    gateway_id: str
    seen_epoch: int
    requests: tuple[facts.Asked | facts.Sent, ...] = ()
    """All that are not over: those it has sent, and those that wait. ``deadline_s`` counts from now."""
    join: int = 0
    """Which of this gateway's joins it is: a later one has a higher number."""


class Tell(msgspec.Struct, frozen=True):
    """What happened at a gateway, in order. ``deadline_s`` counts from now."""

    gateway_id: str
    epoch: int
    number: int
    """Of this batch, since it joined; the first is 0."""
    facts: tuple[facts.AnyFact, ...]
    probes: tuple[ProbeAnswer, ...] = ()
    acked: int = 0
    places_version: int = -1
    join: int = 0
    """Since which of its joins: a batch that comes late, of one before, is not taken for one of this."""


class Listen(msgspec.Struct, frozen=True):
    """A gateway waits for news."""

    gateway_id: str
    epoch: int
    acked: int
    """Mail up to this number has come."""
    version: int
    """Of its copy of the homes; -1: it has none of this epoch's."""
    places_version: int
    join: int = 0
    """As in ``Tell``."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """To a gateway. What it has got already it leaves aside: mail by its number."""

    epoch: int
    status: Status = Status.OK
    mail_from: int = 1
    mail: tuple[facts.AnyAction | SendPair, ...] = ()
    homes: Changes | None = None
    places: tuple[Place, ...] | None = None
    """All there are; ``None``: as before."""
    places_version: int = -1


class Registration(msgspec.Struct, frozen=True):
    """An engine is there, and well."""

    engine_id: str
    url: str
    description: Description
    seen_epoch: int = 0
    paths: PathsTold | None = None
    """Of an engine of pairs."""
    links: dict[str, LinkTold] = {}
    """Of an engine of pairs, by name; empty: it has not looked since it told last."""


class Registered(msgspec.Struct, frozen=True):
    """To an engine."""

    epoch: int
    status: Status = Status.OK
    wanted_engines: int = 0
    """How many there should be; 0: not known."""


class EngineGone(msgspec.Struct, frozen=True):
    """An engine's process has ended: its own deployment says so."""

    engine_id: str
    instance: str
    reason: str


class Drain(msgspec.Struct, frozen=True):
    """An engine is to be left by all. Asked again, it only says how far that is."""

    engine_id: str


class Drained(msgspec.Struct, frozen=True):
    """How far it is. Only with ``OK`` the engine is known, and ``in_flight`` is not ``NOT_KNOWN``."""

    epoch: int
    in_flight: int
    status: Status = Status.OK


class State(msgspec.Struct, frozen=True):
    """What a coordinator knows, for those who ask."""

    epoch: int
    restored: int
    """Programs with a home that this coordinator began with."""
    gateways: int
    wanted_engines: int
    programs: list[ProgramPlace]
    replicas: list[ReplicaStatus]
    uses: dict[str, float]
    pairs: list[PairStatus] = []
    """In place of ``replicas`` where engines are pairs."""


def write(message: Any) -> bytes:
    """A message as bytes. Raises ``CannotBeWritten``."""
    try:
        return msgspec.msgpack.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CannotBeWritten(str(error) or type(error).__name__) from None


def read(data: bytes, kind: type[Message]) -> Message:
    """A message from bytes. Raises ``msgspec.ValidationError`` for one of another kind."""
    return msgspec.msgpack.decode(data, type=kind)
