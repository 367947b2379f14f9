"""Frozen snapshots for the gateway's policies: routing, stealing, fairness.

A replica is one engine, or one data-parallel rank of an engine: the unit with its own KV memory. A program's
home is the replica that serves the program's turns. Sizes are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ReplicaView(NamedTuple):
    """A replica as the gateway knows it from the requests and answers that passed through the gateway."""

    replica_id: str
    load: float
    """The larger of two shares: the used share of the device's KV memory, and the used share of the request
    limit. Requests that wait for the replica at the gateway count as well, so the load may exceed 1."""
    in_flight: int
    """Number of requests that were sent to the replica and have not ended."""
    room_tokens: int
    """KV capacity of device and host memory, in tokens, minus the expected sizes of all programs whose home
    is this replica; may be negative."""
    homed: int = 0
    """Number of programs whose home is this replica."""
    takes_new: bool = True
    """Whether the replica accepts programs with another home or none: it is healthy and not draining."""
    queued: int = 0
    """Requests that wait for the replica at the gateway."""
    memory_tokens: int = 0
    """KV capacity of device and host memory, in tokens."""


class ResidentProgramGroup(NamedTuple):
    """One or several resident programs with the same numbers of past and expected turns.

    A resident program has a request or is expected to return. Token counts are sums over the programs."""

    context_tokens: int
    """Sum of the longest contexts that the programs have had so far."""
    size_tokens: int
    """Sum of the longest contexts that the programs are expected to reach; at least ``context_tokens``."""
    turns: int
    """Answered turns of each program."""
    turns_left: float
    """Expected further turns of each program, at least 1. For an unknown agent type: the number of past
    turns."""
    programs: int = 1
    """Number of programs in the group."""


class RoutingView(NamedTuple):
    """A request that needs a replica."""

    request_id: str
    number: int
    """Number of requests before this one, over all programs."""
    context_tokens: int
    """Prompt length in tokens."""
    size_tokens: int
    """Expected longest context of the request's program; at least the prompt."""
    home: ReplicaView | None = None
    """The home of the request's program; ``None``: the program has no home, or has to leave its home."""
    cached: bool = False
    """Whether the program's KV is still on ``home``, as far as the gateway knows."""
    parent_home: ReplicaView | None = None
    """Home of the parent program. ``None``: there is none, or the request's program has had an answer
    already."""
    prefix_tokens: Mapping[str, int] = {}
    """Estimated number of leading prompt tokens that each replica has computed already, by replica id.
    Replicas with none are absent. Empty if the policy does not set ``reads_prefixes``."""
    turns_left: float = 1.0
    """Expected number of the program's turns from now on, this one included."""
    residents: Mapping[str, Sequence[ResidentProgramGroup]] = {}
    """Other programs by their home replica; replicas without programs are absent."""


class RoutingDecision(NamedTuple):
    """The chosen replica, and the reason as a metric label. ``replica_id`` is ``None`` if the request has to
    wait."""

    replica_id: str | None
    reason: str
    needs_tokens: int = 0
    """Free KV tokens that a request without a replica waits for. The request is routed again when a replica
    that accepts programs has that many free tokens, or is no program's home. Requests that need fewer tokens
    may be routed first.

    0: the need is unknown. Then other requests wait behind this request, with two exceptions: requests that
    go to their program's home, and requests whose decision has ``passes``."""
    passes: bool = False
    """Whether the request may overtake requests that wait for capacity, because its program will soon end."""


NO_REPLICA = RoutingDecision(None, "no_replica")
"""Decision to wait because no replica accepts programs."""


def wait_for_capacity(needs_tokens: int) -> RoutingDecision:
    """Return a decision to wait until a replica has ``needs_tokens`` free."""
    return RoutingDecision(None, "no_room", max(1, needs_tokens))
