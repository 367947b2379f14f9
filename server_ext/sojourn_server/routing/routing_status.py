"""Status of programs and replicas as a core knows them, for operators who query a gateway. Plain data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LinkStats(msgspec.Struct, frozen=True):
    """Current state of one link of an engine, to storage or to other engines."""

    queued_bytes: int
    queued_s: float | None
    """Seconds until the link's queue is empty; ``None``: unknown."""
    moved_bytes: int


class ProgramRouteStatus(msgspec.Struct, frozen=True):
    """Status of a program."""

    program_id: str
    tenant: str
    replica: str | None
    turns: int
    context_tokens: int
    size_tokens: int
    moves: int
    in_flight: int
    waiting: int


class ReplicaStatus(msgspec.Struct, frozen=True):
    """Status of a replica. Sizes in tokens of KV."""

    replica: str
    instance: str
    health: str
    load: float
    in_flight: int
    queued: int
    """Number of requests that wait for the replica at the gateway."""
    programs: int
    capacity_tokens: int
    host_tokens: int
    room_tokens: int


class PairEngineStatus(ReplicaStatus, frozen=True, kw_only=True):
    """Status of a prefill or decode engine. No program has its home there."""

    role: str
    node: str
    epoch: str
    links: Mapping[str, LinkStats]
    """Last report of each link, by name; empty: no report."""
