"""Messages between coordinator, gateways and engines. They are plain data, encoded as msgpack.

In all messages, ``epoch`` identifies the coordinator that sends or receives the message. A later coordinator
has a higher epoch. ``seen_epoch`` is the highest epoch that the sender has seen. Messages of earlier
coordinators are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing import routing_events
from ...routing.home_change_log import HomeChanges
from ...routing.routing_status import LinkStats, PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from ..http.engine_descriptions import EngineDescription, PairCapabilities

Message = TypeVar("Message")
Answered = TypeVar("Answered")

IN_FLIGHT_UNKNOWN = -1
"""Value of ``DrainResponse.in_flight`` for an engine that has not registered with this coordinator. Such an
engine does not count as drained."""


class MessageEncodingError(Exception):
    """A message has a value that msgpack cannot encode, such as an integer beyond 64 bits."""


class ResponseStatus(str, Enum):
    """Status of the coordinator's answer to a message."""

    OK = "ok"
    JOIN = "join"
    """The coordinator does not know the sender, for instance after the coordinator's restart. The sender has
    to join and report all its requests."""
    DEPOSED = "deposed"
    """There is a later coordinator, and this one makes no more decisions."""


class ReplicaInfo(msgspec.Struct, frozen=True):
    """A replica in the list that the coordinator sends to gateways."""

    replica_id: str
    url: str
    """URL of the replica's engine."""
    rank: int | None
    """Data-parallel rank; ``None``: the engine has a single rank."""
    description: EngineDescription
    health: str
    """``up``, ``draining`` or ``suspect``."""
    direct: bool
    """Whether a gateway may send turns to this replica without asking the coordinator. Applies to turns of
    programs whose home is this replica."""
    takes_new: bool
    """Whether the replica accepts new programs, and programs with another home."""
    paths: PairCapabilities | None = None
    """Capabilities of a prefill or decode engine; ``None`` for other engines."""

    @property
    def instance(self) -> str:
        """Id of the engine. It changes with each restart."""
        return self.description.instance


class ReplicaProbeResult(msgspec.Struct, frozen=True):
    """Result of a gateway's check of whether a replica is alive."""

    replica_id: str
    instance: str
    alive: bool


class JoinRequest(msgspec.Struct, frozen=True):
    """Message of a gateway that starts or reconnects."""

    gateway_id: str
    seen_epoch: int
    requests: tuple[routing_events.RequestReceived | routing_events.RequestSent, ...] = ()
    """All requests of the gateway that are in progress, sent or waiting. Their ``deadline_s`` counts seconds
    from the time of this message."""
    join: int = 0
    """Number of this join. The gateway counts its joins."""


class ReportRequest(msgspec.Struct, frozen=True):
    """A batch of events of a gateway, in order. Their ``deadline_s`` counts seconds from the time of this
    message."""

    gateway_id: str
    epoch: int
    number: int
    """Number of this batch since the join. The first batch is 0."""
    facts: tuple[routing_events.AnyRoutingEvent, ...]
    probes: tuple[ReplicaProbeResult, ...] = ()
    acked: int = 0
    """Number of the last action that the gateway has received."""
    places_version: int = -1
    """Version of the gateway's list of replicas; -1: it has none."""
    join: int = 0
    """Number of the gateway's latest join. A batch of an earlier join is answered with ``JOIN``."""


class PollRequest(msgspec.Struct, frozen=True):
    """Long poll of a gateway."""

    gateway_id: str
    epoch: int
    acked: int
    """Number of the last action that the gateway has received."""
    version: int
    """Version of the gateway's copy of homes; -1: it has none from this coordinator."""
    places_version: int
    """Version of the gateway's list of replicas; -1: it has none."""
    join: int = 0
    """Number of the gateway's latest join. A poll of an earlier join is answered with ``JOIN``."""
    settings: str = ""
    """``settings_digest`` of the gateway's configuration; empty: the gateway is of an earlier version."""
    checkpoint: str = ""
    """``checkpoint_digest`` of the gateway's configuration; empty: the gateway is of an earlier version."""


class CoordinatorResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a gateway."""

    epoch: int
    status: ResponseStatus = ResponseStatus.OK
    mail_from: int = 1
    """Number of the first action in ``mail``."""
    mail: tuple[routing_events.AnyRoutingAction, ...] = ()
    """Actions that the gateway has not acknowledged. The gateway skips actions that it already has."""
    homes: HomeChanges | None = None
    """Changed homes of programs; ``None``: no home has changed, or this is not the answer to a poll."""
    places: tuple[ReplicaInfo, ...] | None = None
    """All replicas; ``None``: the gateway already has the present list."""
    places_version: int = -1
    """Version of the coordinator's list of replicas."""


class EngineRegistration(msgspec.Struct, frozen=True):
    """Message of an engine that registers, or reports that it is alive."""

    engine_id: str
    url: str
    description: EngineDescription
    seen_epoch: int = 0
    paths: PairCapabilities | None = None
    """Capabilities of a prefill or decode engine; ``None`` for other engines."""
    links: dict[str, LinkStats] = {}
    """State of a prefill or decode engine's links, by link name. Empty if there is no new state."""
    wanted_engines: int = 0
    """Number of engines that the cluster should have, as in the coordinator's last answer to the engine; 0:
    unknown."""
    settings: str = ""
    """``settings_digest`` of the engine's configuration; empty: its supervisor is of an earlier version."""
    checkpoint: str = ""
    """``checkpoint_digest`` of the engine's configuration; empty: its supervisor is of an earlier version."""


class RegistrationResponse(msgspec.Struct, frozen=True):
    """Answer to an engine."""

    epoch: int
    status: ResponseStatus = ResponseStatus.OK
    wanted_engines: int = 0
    """Number of engines that the cluster should have; 0: unknown."""


class EngineStopped(msgspec.Struct, frozen=True):
    """A supervisor's message that an engine's process has ended. ``reason``: text for the log and for
    ``ReplicaGone``."""

    engine_id: str
    instance: str
    reason: str


class DrainRequest(msgspec.Struct, frozen=True):
    """A supervisor's message that drains its engine. The first message starts the drain. Later ones only ask
    for the progress."""

    engine_id: str


class DrainResponse(msgspec.Struct, frozen=True):
    """Progress of a drain."""

    epoch: int
    in_flight: int
    """Number of the engine's requests in flight, or ``IN_FLIGHT_UNKNOWN``."""
    status: ResponseStatus = ResponseStatus.OK


class CoordinatorState(msgspec.Struct, frozen=True):
    """A coordinator's state, for operators."""

    epoch: int
    restored: int
    """Number of programs with a home in the checkpoint that the coordinator read."""
    gateways: int
    """Number of gateways that have joined."""
    wanted_engines: int
    """Number of engines that the cluster should have."""
    replicas: list[ReplicaStatus]
    uses: dict[str, float]
    """Used capacity ÷ share, by tenant. Empty if tenants do not share capacity."""
    pairs: list[PairEngineStatus] = []
    """Prefill and decode engines. They are not in ``replicas``."""
    programs: list[ProgramRouteStatus] = []
    """Always empty, because ``CoordinatorClient.programs`` returns the programs. Earlier gateways expect this
    field."""


def encode_message(message: Any) -> bytes:
    """Encode a message. Raises ``MessageEncodingError``."""
    try:
        return msgspec.msgpack.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise MessageEncodingError(str(error) or type(error).__name__) from None


def decode_message(data: bytes, kind: type[Message]) -> Message:
    """Decode a message of the type ``kind``. Raises ``msgspec.DecodeError`` for anything else."""
    return msgspec.msgpack.decode(data, type=kind)


def encodable_events(
    events: Sequence[routing_events.AnyRoutingEvent], log: RateLimitedLog
) -> tuple[routing_events.AnyRoutingEvent, ...]:
    """Return the events that can be encoded. Other events are logged and left out. In place of such a
    ``RequestFinished``, return one with only the request id, replica and ``answered``."""
    found: list[routing_events.AnyRoutingEvent] = []
    for event in events:
        try:
            encode_message(event)
        except MessageEncodingError as error:
            what = type(event).__name__
            log.log(logging.ERROR, f"an event {what} cannot be encoded: %s", error)
            if isinstance(event, routing_events.RequestFinished):
                found.append(
                    routing_events.RequestFinished(event.request_id, 0, event.replica_id, event.answered)
                )
        else:
            found.append(event)
    return tuple(found)


REQUESTLESS_EVENTS = (
    routing_events.ProgramEnded,
    routing_events.KvDropped,
    routing_events.ReplicaDrainStarted,
    routing_events.ReplicaDrainCancelled,
)
"""Events that concern no request. A gateway keeps them until it has joined."""
URGENT_EVENTS = (
    routing_events.RequestReceived,
    routing_events.RequestFailed,
    routing_events.YieldAnswered,
    routing_events.ReplicaDrainStarted,
    routing_events.ReplicaDrainCancelled,
)
"""Events for which a request or an operator waits. They are sent at once."""

CALL_TIMEOUT_S = 10.0
"""Default maximum seconds that a caller waits for the coordinator's answer."""


class CoordinatorUnavailable(Exception):
    """The coordinator does not answer, because it is restarting or cannot be reached. The message may have
    been processed."""


REQUESTS: dict[str, type[Any] | None] = {
    "join": JoinRequest,
    "tell": ReportRequest,
    "listen": PollRequest,
    "register": EngineRegistration,
    "gone": EngineStopped,
    "drain": DrainRequest,
    "state": None,
    "programs": None,
}
"""Names of the coordinator's methods, each with the type of its message; ``None``: without a message. Three
methods of ``CoordinatorClient`` have other names: ``report`` calls ``tell``, ``poll`` calls ``listen``, and
``engine_stopped`` calls ``gone``."""


class CoordinatorClient(ABC):
    """Calls the methods of a remote ``Coordinator``. Each method raises ``CoordinatorUnavailable`` without an
    answer, and ``MessageEncodingError`` for a message that cannot be encoded."""

    @abstractmethod
    async def _call(self, method: str, message: Any, kind: type[Message]) -> Message:
        """Call a method with ``message``; ``None``: without one. Return its answer, which has the type
        ``kind``. Raises ``CoordinatorUnavailable``, ``MessageEncodingError``."""

    async def join(self, join: JoinRequest) -> CoordinatorResponse:
        return await self._call("join", join, CoordinatorResponse)

    async def report(self, report: ReportRequest) -> CoordinatorResponse:
        return await self._call("tell", report, CoordinatorResponse)

    async def poll(self, poll: PollRequest) -> CoordinatorResponse:
        return await self._call("listen", poll, CoordinatorResponse)

    async def register(self, registration: EngineRegistration) -> RegistrationResponse:
        return await self._call("register", registration, RegistrationResponse)

    async def engine_stopped(self, stopped: EngineStopped) -> RegistrationResponse:
        return await self._call("gone", stopped, RegistrationResponse)

    async def drain(self, drain: DrainRequest) -> DrainResponse:
        return await self._call("drain", drain, DrainResponse)

    async def state(self) -> CoordinatorState:
        return await self._call("state", None, CoordinatorState)

    async def programs(self) -> list[ProgramRouteStatus]:
        return await self._call("programs", None, list[ProgramRouteStatus])


async def call_with_timeout(
    call: Coroutine[Any, Any, Answered], timeout_s: float = CALL_TIMEOUT_S
) -> Answered:
    """Await a call to the coordinator and return its result. Raises the call's exceptions. Raises
    ``CoordinatorUnavailable`` after ``timeout_s`` seconds.

    Does not use ``asyncio.wait_for``. Before Python 3.12, that loses a cancellation that coincides with the
    result.
    """
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.wait({calling}, timeout=timeout_s)
        if not calling.done():
            raise CoordinatorUnavailable("it does not answer")
        return calling.result()
    finally:
        if not calling.cancel() and not calling.cancelled():
            calling.exception()  # mark it as retrieved
