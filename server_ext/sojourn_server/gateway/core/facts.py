"""What a routing core is told, and what it answers. Plain data: it travels, and is written down."""

from __future__ import annotations

import msgspec


class Fact(msgspec.Struct, frozen=True, tag=True, tag_field="fact", omit_defaults=True):
    """Something happened."""


class ReplicaSeen(Fact, frozen=True):
    """A replica registers, or says again that it is there.

    ``instance`` is another one after a restart: then nothing that it held is left.
    """

    replica_id: str
    instance: str
    capacity_tokens: int
    host_tokens: int = 0
    max_running: int = 0
    max_context_tokens: int = 0
    """Longest context that it computes; 0: not known."""


class ReplicaGone(Fact, frozen=True):
    """A replica is known to be dead. ``instance``: which life of it; another one lives on."""

    replica_id: str
    instance: str
    reason: str = "lost"


class ReplicaDrains(Fact, frozen=True):
    """Nobody moves into a replica any more; who is at home there moves at its next turn."""

    replica_id: str


class ReplicaStays(Fact, frozen=True):
    """A replica is no longer to be drained: what ``ReplicaDrains`` said of it is taken back."""

    replica_id: str


class Asked(Fact, frozen=True):
    """A request came."""

    request_id: str
    tenant: str
    """Of the key it came with, never of its body."""
    context_tokens: int
    program_id: str | None = None
    parent_id: str | None = None
    agent_type: str | None = None
    output_tokens: int = 0
    """What its client expects to come; 0: not said."""
    deadline_s: float | None = None
    """On the core's clock."""
    prefix: tuple[int, ...] = ()
    """Hashes of its beginning, each of one piece and all before it; empty where nobody reads them."""
    exact: bool = False
    """``context_tokens`` were counted. Else they are a guess, and nobody is refused for a guess."""


class Sent(Fact, frozen=True):
    """A request that a gateway has sent: to the home that it knew, or before the core started anew."""

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
    """Its first byte went to the client."""
    prefill_id: str | None = None
    """Where prefill and decode are separated, its prefill engine; ``None``: its prompt is computed."""


class Began(Fact, frozen=True):
    """The first byte of an answer went to the client: it cannot be sent again elsewhere."""

    request_id: str
    replica_id: str


class Prefilled(Fact, frozen=True):
    """A request's prompt is computed, and its prefill engine is done with it. Where prefill and decode are
    not separated nobody says so."""

    request_id: str
    replica_id: str


class Ended(Fact, frozen=True):
    """A request is over: answered, refused by the engine, or given up by its client."""

    request_id: str
    output_tokens: int = 0
    replica_id: str | None = None
    """Where it was answered; ``None``: its client gave it up, wherever it was."""
    answered: bool | None = True
    """With a status of 200, whole or begun. ``None``: who says so does not know; one that had begun was."""


class Failed(Fact, frozen=True):
    """A request did not reach its replica, or got no answer from it."""

    request_id: str
    replica_id: str
    computing: bool = False
    """The replica had taken it in: the request itself may be what it failed of."""


class ProgramEnded(Fact, frozen=True):
    """A program is over."""

    program_id: str
    tenant: str


class KvDropped(Fact, frozen=True):
    """A replica no longer has a program's KV in any tier."""

    program_id: str
    tenant: str
    replica_id: str


class Tick(Fact, frozen=True):
    """Time has gone by."""


AnyFact = (
    ReplicaSeen
    | ReplicaGone
    | ReplicaDrains
    | ReplicaStays
    | Asked
    | Sent
    | Began
    | Prefilled
    | Ended
    | Failed
    | ProgramEnded
    | KvDropped
    | Tick
)


class Action(msgspec.Struct, frozen=True, tag=True, tag_field="action", omit_defaults=True):
    """Something is to be done by whoever holds the connections."""


class Send(Action, frozen=True):
    """Send a request to a replica."""

    request_id: str
    replica_id: str
    reason: str
    moved_from: str | None = None
    """Where its program was at home until now."""
    left_because: str = ""
    """Why it could not stay there, one of ``LEFT_BECAUSE``; empty: it could have."""


class Recall(Action, frozen=True):
    """A request has to make way: take it back from its replica, by closing the connection. It is not over,
    and a ``Send`` or ``Refuse`` follows, now or later.

    Whoever has passed on its first byte leaves it where it is, and such a ``Send`` too: its ``Began``
    or ``Ended`` from there says so.
    """

    request_id: str
    replica_id: str


class Refuse(Action, frozen=True):
    """Answer a request with an error. ``code`` is one of ``REFUSALS``."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Cut(Action, frozen=True):
    """A request's replica is gone after the first byte: end its stream with an error inside it."""

    request_id: str
    replica_id: str


class Left(Action, frozen=True):
    """A program has moved: its old replica need not keep its KV."""

    program_id: str
    replica_id: str
    tenant: str


class Probe(Action, frozen=True):
    """A replica has not been heard of for long: ask whether it lives."""

    replica_id: str
    instance: str


AnyAction = Send | Recall | Refuse | Cut | Left | Probe

LEFT_BECAUSE = ("drain", "failed")
"""Its home is to be left by all; or a request of its failed there."""

REFUSALS = (
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
"""Codes of all that may be refused."""
