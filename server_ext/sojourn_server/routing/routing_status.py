"""What a core knows of programs and replicas, for those who ask a gateway. Plain data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LinkStats(msgspec.Struct, frozen=True):
    """Current state of one link of an engine."""

    queued_bytes: int
    queued_s: float | None
    """``None``: there is a queue, and its duration is unknown."""
    moved_bytes: int


class ProgramRouteStatus(msgspec.Struct, frozen=True):
    """A program."""

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
    """A replica. Sizes in tokens of KV."""

    replica: str
    instance: str
    health: str
    load: float
    in_flight: int
    queued: int
    """Requests that wait for it at the gateway."""
    programs: int
    capacity_tokens: int
    host_tokens: int
    room_tokens: int


class PairEngineStatus(ReplicaStatus, frozen=True, kw_only=True):
    """A prefill or decode engine. No program has its home there."""

    role: str
    node: str
    epoch: str
    links: Mapping[str, LinkStats]
    """Its last report, by link name; empty: none."""
