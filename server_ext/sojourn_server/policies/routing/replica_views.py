"""Frozen snapshots for the gateway's policies: routing, stealing, fairness.

A replica is one engine, or one data-parallel rank of an engine: the unit with its own KV memory. Sizes are
in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ReplicaView(NamedTuple):
    """A replica as the gateway knows it, from the requests it sent and the answers it got."""

    replica_id: str
    load: float
    """The larger of two shares: of KV memory, and of concurrent requests. Counts requests in flight and
    requests that wait for the replica at the gateway. Above 1, some requests wait."""
    in_flight: int
    """Number of requests that were sent and are unanswered."""
    room_tokens: int
    """KV tokens that the resident programs leave free in all tiers, each program counted at its size;
    negative if they exceed the capacity."""
    homed: int = 0
    """Number of resident programs."""
    takes_new: bool = True
    """Whether new programs may move to the replica: it is healthy and not draining."""
    queued: int = 0
    """Requests that wait for the replica at the gateway."""
    memory_tokens: int = 0
    """KV capacity of all tiers."""


class ResidentProgramGroup(NamedTuple):
    """A resident program that has a request or is expected to return; or several programs with the same
    number of past and expected turns, with the sums of their tokens."""

    context_tokens: int
    """Context length after the longest turn so far."""
    size_tokens: int
    """Expected longest context; at least the present context."""
    turns: int
    """Answered turns of each program."""
    turns_left: float
    """Expected further turns, at least 1; the number of past turns if the agent type is unknown."""
    programs: int = 1


class RoutingView(NamedTuple):
    """A request that needs a replica."""

    request_id: str
    number: int
    """Number of requests before it, over all programs."""
    context_tokens: int
    """Length of its prompt."""
    size_tokens: int
    """Expected longest context of its program; at least the prompt."""
    home: ReplicaView | None = None
    """The replica of the program's earlier turns; ``None``: there are none, or the replica is gone."""
    cached: bool = False
    """Whether the program's KV is still on ``home``, as far as the gateway knows."""
    parent_home: ReplicaView | None = None
    """The parent's replica, if the program is new and its prompt starts like the parent's."""
    prefix_tokens: Mapping[str, int] = {}
    """Tokens of the prompt that each replica computed recently; replicas without a match are absent."""
    turns_left: float = 1.0
    """Expected turns of the program, this one included; see ``ResidentProgramGroup``."""
    residents: Mapping[str, Sequence[ResidentProgramGroup]] = {}
    """Other programs by their home replica; replicas without programs are absent."""


class RoutingDecision(NamedTuple):
    """The chosen replica, and the reason for the ledger. ``replica_id`` ``None``: the request waits."""

    replica_id: str | None
    reason: str
    needs_tokens: int = 0
    """Tokens that must be free on a replica that takes new programs (unless it has no resident program)
    before the request is routed again. Until then, other requests of at least this size without KV wait too.
    0: all other requests wait behind it."""
    passes: bool = False
    """Whether the request overtakes those that wait for capacity, because it is not expected to stay."""


NO_REPLICA = RoutingDecision(None, "no_replica")


def wait_for_capacity(needs_tokens: int) -> RoutingDecision:
    """A decision to wait until a replica has ``needs_tokens`` free."""
    return RoutingDecision(None, "no_room", max(1, needs_tokens))
