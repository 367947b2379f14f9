"""Events that a routing core takes, and actions that it returns.

Plain data, sent between gateways and a coordinator: the tags are part of that protocol.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class PairRole(str, Enum):
    """Which part of a request an engine computes, where prefill and decode are separated."""

    PREFILL = "prefill"
    DECODE = "decode"


class RoutingEvent(msgspec.Struct, frozen=True, tag=True, tag_field="fact", omit_defaults=True):
    """Something that happened."""


class ReplicaRegistered(RoutingEvent, frozen=True, tag="ReplicaSeen"):
    """A replica registers, or reports that it is alive.

    ``instance`` changes with a restart: then the replica has lost everything that it held.
    """

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int = 0
    max_running: int = 0
    max_context_tokens: int = 0
    """Longest context that it computes; 0: unknown."""


class PairEngineRegistered(RoutingEvent, frozen=True, tag="EngineSeen"):
    """A prefill or decode engine registers, or reports that it is alive.

    ``instance`` changes with a restart.
    """

    replica_id: str
    instance: str
    role: PairRole
    node: str
    """The machine whose storage NIC the engine reads through."""
    kv_tokens: int
    block_s: float
    """Seconds that the node's storage NIC takes for one Full Block."""
    peer: str
    """Address of its traffic manager, for other engines."""
    max_context_tokens: int = 0
    """Longest context that it computes; 0: unknown."""
    epoch: str = ""
    """Instance of its traffic manager; empty: unknown."""
    max_running: int = 0
    """Requests that it runs at once; 0: unknown."""


class NicQueueReported(RoutingEvent, frozen=True, tag="NicTold"):
    """Seconds of reads that are queued at a node's storage NIC."""

    node: str
    queue_s: float


class ReplicaGone(RoutingEvent, frozen=True):
    """This instance of a replica is dead."""

    replica_id: str
    instance: str
    reason: str = "lost"


class ReplicaDrainStarted(RoutingEvent, frozen=True, tag="ReplicaDrains"):
    """No program moves into a replica any more; its own programs move away at their next turn."""

    replica_id: str


class ReplicaDrainCancelled(RoutingEvent, frozen=True, tag="ReplicaStays"):
    """Reverts ``ReplicaDrainStarted``."""

    replica_id: str


class RequestReceived(RoutingEvent, frozen=True, tag="Asked"):
    """A client's request arrived."""

    request_id: str
    tenant: str
    """Tenant by its API key, never by its body."""
    context_tokens: int
    program_id: str | None = None
    parent_id: str | None = None
    agent_type: str | None = None
    output_tokens: int = 0
    """Output length that the client expects; 0: not given."""
    deadline_s: float | None = None
    """Deadline on the core's clock."""
    prefix: tuple[int, ...] = ()
    """Rolling hashes of the prompt's pieces; empty where the policy does not read them."""
    exact: bool = False
    """``context_tokens`` is a count. Otherwise it is an estimate, and no request is rejected for it."""


class RequestSent(RoutingEvent, frozen=True, tag="Sent"):
    """A gateway sent a request on its own: to a home that it knew, or before this core started."""

    request_id: str
    replica_id: str
    tenant: str
    context_tokens: int
    program_id: str | None = None
    parent_id: str | None = None
    agent_type: str | None = None
    output_tokens: int = 0
    deadline_s: float | None = None
    began: bool = False
    """The client has the first byte of the answer."""
    prefill_id: str | None = None
    """Its prefill engine, of a pair; ``None``: its prompt is computed."""


class FirstByteSent(RoutingEvent, frozen=True, tag="Began"):
    """The client has the first byte of an answer: the request cannot be sent again elsewhere."""

    request_id: str
    replica_id: str


class PrefillFinished(RoutingEvent, frozen=True, tag="Prefilled"):
    """A prefill engine has computed a request's prompt. Only sent where prefill and decode are separated."""

    request_id: str
    replica_id: str


class RequestFinished(RoutingEvent, frozen=True, tag="Ended"):
    """A request ended: answered, refused by the engine, or abandoned by its client."""

    request_id: str
    output_tokens: int = 0
    replica_id: str | None = None
    """The replica that answered; ``None``: the client gave up, wherever the request was."""
    answered: bool | None = True
    """Answered with status 200, completely or in part. ``None``: unknown; it was if it had begun."""
    prompt_tokens: int = 0
    """Number of prompt tokens, as an engine of a pair counted them; 0: unknown."""


class RequestFailed(RoutingEvent, frozen=True, tag="Failed"):
    """A request did not reach its replica, or got no answer from it."""

    request_id: str
    replica_id: str
    computing: bool = False
    """The replica had accepted it: the request itself may have caused the failure."""


class ProgramEnded(RoutingEvent, frozen=True):
    """A program ended."""

    program_id: str
    tenant: str


class KvDropped(RoutingEvent, frozen=True):
    """A replica no longer has a program's KV in any tier."""

    program_id: str
    tenant: str
    replica_id: str


class Tick(RoutingEvent, frozen=True):
    """Time passed."""


AnyRoutingEvent = (
    ReplicaRegistered
    | PairEngineRegistered
    | NicQueueReported
    | ReplicaGone
    | ReplicaDrainStarted
    | ReplicaDrainCancelled
    | RequestReceived
    | RequestSent
    | FirstByteSent
    | PrefillFinished
    | RequestFinished
    | RequestFailed
    | ProgramEnded
    | KvDropped
    | Tick
)


class RoutingAction(msgspec.Struct, frozen=True, tag=True, tag_field="action", omit_defaults=True):
    """Something that the owner of the connections has to do."""


class SendRequest(RoutingAction, frozen=True, tag="Send"):
    """Send a request to a replica."""

    request_id: str
    replica_id: str
    reason: str
    moved_from: str | None = None
    """Its program's home until now."""
    left_because: str = ""
    """Why the program had to leave its home, one of ``HOME_LEFT_REASONS``; empty: it could have stayed."""


class SendRequestToPair(SendRequest, frozen=True, tag="SendPair", kw_only=True):
    """Send a request to a prefill engine first, and then to ``replica_id``, which decodes."""

    prefill_id: str
    peer: str
    """Address of the decode engine's traffic manager; the prefill engine sends KV there."""
    epoch: str = ""
    """Expected instance of that traffic manager; empty: any."""
    decode_share: float = 0.0
    """Part of the stored prompt that the decode engine's node reads, 0 to 1."""


class RecallRequest(RoutingAction, frozen=True, tag="Recall"):
    """Close a request's connection to its replica: it makes way for another. It is not over: a
    ``SendRequest`` or ``RejectRequest`` follows, now or later.

    A gateway that has passed on the first byte ignores the recall and the ``SendRequest`` after it, and says
    so with ``FirstByteSent`` or ``RequestFinished`` from that replica.
    """

    request_id: str
    replica_id: str


class RejectRequest(RoutingAction, frozen=True, tag="Refuse"):
    """Answer a request with an error. ``code`` is one of ``REJECTION_CODES``."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class AbortStream(RoutingAction, frozen=True, tag="Cut"):
    """A replica is gone after a request's first byte: end the stream with an error inside it."""

    request_id: str
    replica_id: str


class ReleaseProgramKv(RoutingAction, frozen=True, tag="Left"):
    """A program has moved: its former replica may drop its KV."""

    program_id: str
    replica_id: str
    tenant: str


class ProbeReplica(RoutingAction, frozen=True, tag="Probe"):
    """A replica has been silent for too long: check whether it is alive."""

    replica_id: str
    instance: str


AnyRoutingAction = (
    SendRequest
    | SendRequestToPair
    | RecallRequest
    | RejectRequest
    | AbortStream
    | ReleaseProgramKv
    | ProbeReplica
)

HOME_LEFT_REASONS = ("drain", "failed")
"""The home is being drained; or a request of the program failed there."""

REJECTION_CODES = (
    "bad_request",
    "context_too_long",
    "coordinator_away",
    "duplicate_request",
    "gateway_failed",
    "no_room",
    "policy_failed",
    "replicas_failed",
    "too_many_waiting",
)
