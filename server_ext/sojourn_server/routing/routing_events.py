"""Events that a routing core takes, and actions that it returns. All times are on the core's clock.

A *pair* is a prefill engine and a decode engine that serve one request together.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class PairRole(str, Enum):
    """The stage that an engine computes, if prefill and decode are separated."""

    PREFILL = "prefill"
    DECODE = "decode"


class AnyRoutingEvent(msgspec.Struct, frozen=True):
    """Base of the events."""


class ReplicaRegistered(AnyRoutingEvent, frozen=True):
    """A replica registers, or reports that it is alive. ``instance`` is an id that changes when the replica
    restarts and loses all its KV."""

    replica_id: str
    instance: str
    capacity_tokens: int
    """KV capacity of the device, in tokens."""
    host_tokens: int = 0
    """KV capacity of host memory, in tokens."""
    max_running: int = 0
    """Number of requests that the replica runs at once; 0: unknown."""
    max_context_tokens: int = 0
    """Longest context that the replica computes; 0: unknown."""
    role: PairRole | None = None
    """``None``: the replica computes whole requests."""


class PairEngineRegistered(ReplicaRegistered, frozen=True, kw_only=True):
    """A prefill or decode engine registers, or reports that it is alive."""

    role: PairRole
    node: str
    """Name of the engine's machine. The engine reads KV through this machine's storage NIC."""
    block_s: float
    """Seconds that the node's storage NIC takes for one Full Block, the unit of KV storage (DualPath
    §4.1)."""
    peer: str
    """Address at which other engines reach this engine's KV transfer manager."""
    epoch: str = ""
    """Instance of the engine's KV transfer manager; empty: unknown."""


class NicQueueReported(AnyRoutingEvent, frozen=True):
    """A node reports how many seconds of reads are queued at its storage NIC."""

    node: str
    queue_s: float


class ResidentKv(msgspec.Struct, frozen=True, array_like=True):
    """A program whose KV an engine still has, in any tier."""

    tenant: str
    program_id: str
    tokens: int
    """Number of the context's tokens whose KV is there."""
    context_tokens: int
    idle_s: float = 0.0
    """Seconds since the program's last contact with the engine."""
    steps_left: float | None = None
    """Expected number of further turns, by the program's declared graph or the client's hint; ``None``:
    unknown."""


class KvReported(AnyRoutingEvent, frozen=True, kw_only=True):
    """A replica reports its load, and the programs whose KV it has."""

    replica_id: str
    instance: str
    programs: tuple[ResidentKv, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    """(tenant, program id) of programs that wait in the engine until it has room for their KV."""
    complete: bool = True
    """Whether ``programs`` lists all programs with KV."""
    requests: int = 0
    """Number of requests in the engine."""
    request_tokens: int = 0
    """Context tokens of these requests."""
    age_s: float = 0.0
    """Maximum seconds since the engine wrote the report."""


class ReplicaGone(AnyRoutingEvent, frozen=True):
    """An instance of a replica is dead. The event is ignored if another instance is registered."""

    replica_id: str
    instance: str


class ReplicaDrainStarted(AnyRoutingEvent, frozen=True):
    """A replica begins to drain. It gets no further programs, and its own programs move away at their next
    turn."""

    replica_id: str


class ReplicaDrainCancelled(AnyRoutingEvent, frozen=True):
    """The drain of a replica was cancelled."""

    replica_id: str


class RequestReceived(AnyRoutingEvent, frozen=True):
    """A client's request arrived."""

    request_id: str
    tenant: str
    """Tenant of the request's API key. The request body cannot change it."""
    context_tokens: int
    program_id: str | None = None
    parent_id: str | None = None
    agent_type: str | None = None
    output_tokens: int = 0
    """Output length, in tokens, that the client expects; 0: the client stated none."""
    deadline_s: float | None = None
    """The client's deadline, on the core's clock."""
    prefix: tuple[int, ...] = ()
    """Hashes of the prompt's pieces. Each hash covers its piece and all earlier pieces. Empty if the routing
    policy does not read them."""
    exact: bool = False
    """Whether ``context_tokens`` was counted. If not, ``context_tokens`` is an estimate, and the core does
    not reject the request as too long."""
    only_replica_id: str | None = None
    """The replica that stores the conversation that the request continues; ``None``: any may serve it."""


class FirstByteSent(AnyRoutingEvent, frozen=True):
    """The client has the first byte of an answer, so the request can no longer be sent to another replica."""

    request_id: str
    replica_id: str


class PrefillFinished(AnyRoutingEvent, frozen=True):
    """A prefill engine has nothing left to do for a request. Only pairs have this event."""

    request_id: str
    replica_id: str
    computed: bool = True
    """Whether it computed the prompt. If not, the decode engine computes all of the request."""


class RequestFinished(AnyRoutingEvent, frozen=True):
    """A request ended: it was answered, refused by the engine, or abandoned by its client."""

    request_id: str
    output_tokens: int = 0
    replica_id: str | None = None
    """The replica at which the request ended. ``None``: the request ended, whether it was waiting or sent.
    For example, its client gave up."""
    answered: bool = True
    """Whether the request was answered with status 200, completely or in part."""
    prompt_tokens: int = 0
    """Number of prompt tokens, as counted by an engine; 0: unknown."""


class RequestFailed(AnyRoutingEvent, frozen=True):
    """A request did not reach its replica, or got no answer from it."""

    request_id: str
    replica_id: str
    computing: bool = False
    """Whether the replica had accepted the request. Then the request itself may have caused the failure."""


class ProgramEnded(AnyRoutingEvent, frozen=True):
    """A program ended."""

    program_id: str
    tenant: str


class Tick(AnyRoutingEvent, frozen=True):
    """Time has passed. The gateway that owns the core sends this event regularly."""


class SendRequest(msgspec.Struct, frozen=True):
    """Send a request to a replica. With prefill and decode engines, send it to a prefill engine first, then
    to ``replica_id``, which decodes."""

    request_id: str
    replica_id: str
    reason: str
    """Why this replica was chosen: a value of ``routing_reasons``."""
    moved_from: str | None = None
    """The program's former home, if the program moves with this request; ``None``: the program does not
    move."""
    left_because: str = ""
    """Why the program had to leave its home, one of ``HOME_LEFT_REASONS``; empty: it could have stayed."""
    prefill_id: str = ""
    """Id of the prefill engine; empty: engines do not work in pairs. Then the fields below are empty too."""
    peer: str = ""
    """Address of the decode engine's KV transfer manager, to which the prefill engine sends KV."""
    decode_reads: bool = False
    """Whether the decode engine's node reads the prompt's stored blocks, not the prefill engine's."""

    @property
    def home_id(self) -> str:
        """The program's home: the replica, of a pair the prefill engine."""
        return self.prefill_id or self.replica_id


class RecallRequest(msgspec.Struct, frozen=True):
    """Close a request's connection to its replica. Either the request makes way for a more urgent one, or it
    waits at this replica for KV capacity. A ``SendRequest`` or ``RejectRequest`` for the recalled request
    follows, now or later.

    A gateway that has already passed on the first byte ignores the recall and the next ``SendRequest`` for
    the request. Instead, it reports ``FirstByteSent`` or ``RequestFinished`` from the recalled replica.
    """

    request_id: str
    replica_id: str


class RejectRequest(msgspec.Struct, frozen=True):
    """Answer a request with an error. ``status`` is the HTTP status, ``code`` one of ``REJECTION_CODES``.
    ``retry_after_s`` is the ``Retry-After`` header in seconds; ``None``: no header."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class AbortStream(msgspec.Struct, frozen=True):
    """End a request's stream with an error inside the stream. The replica failed after the client had got
    the first byte."""

    request_id: str
    replica_id: str


class ReleaseProgramKv(msgspec.Struct, frozen=True):
    """Allow a replica to drop a program's KV, because the program has moved to another replica."""

    program_id: str
    replica_id: str
    tenant: str


class ProbeReplica(msgspec.Struct, frozen=True):
    """Check whether a replica is alive, because it was silent for too long or failed at a request."""

    replica_id: str
    instance: str


AnyRoutingAction = SendRequest | RecallRequest | RejectRequest | AbortStream | ReleaseProgramKv | ProbeReplica

HOME_LEFT_REASONS = ("drain", "failed")
"""Why a program had to leave its home. ``drain``: the home drains. ``failed``: the request failed there."""

REJECTION_CODES = (
    "context_too_long",
    "duplicate_request",
    "gateway_failed",
    "no_room",
    "policy_failed",
    "replicas_failed",
    "too_many_waiting",
)
"""Codes of errors with which the gateway itself answers, as metrics and clients see them."""
