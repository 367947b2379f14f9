"""Status of programs and replicas as a core knows them, for operators who query a gateway. Plain data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..core.engine_answers import LinkStats


class ProgramRouteStatus(msgspec.Struct, frozen=True):
    """Status of a program: its home, turns, sizes in tokens, and numbers of open requests."""

    program_id: str
    tenant: str
    replica: str | None
    """Id of the program's home; ``None``: the program has no home."""
    turns: int
    """Number of answered requests."""
    context_tokens: int
    """Longest context so far. With prefill and decode engines: number of context tokens whose KV is in
    storage."""
    size_tokens: int
    """Longest context that is expected. With prefill and decode engines: the same as ``context_tokens``."""
    moves: int
    """Number of changes from one home to another."""
    in_flight: int
    """Number of requests that were sent and have not ended."""
    waiting: int
    """Number of requests that wait at the gateway."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """Status of a replica. Sizes are in tokens of KV."""

    replica: str
    instance: str
    health: str
    """``up``, ``draining`` or ``suspect``."""
    load: float
    """The larger of two ratios of the replica's sent and waiting requests: their context tokens ÷
    ``capacity_tokens``, and their number ÷ the number that the replica runs at once. Above 1, some requests
    wait."""
    in_flight: int
    """Number of requests that were sent and have not ended."""
    queued: int
    """Number of requests that wait for the replica at the gateway."""
    programs: int
    """Number of programs whose home is the replica."""
    capacity_tokens: int
    """KV capacity of the device."""
    host_tokens: int
    """KV capacity of host memory."""
    room_tokens: int
    """KV capacity of device and host memory minus the expected sizes of all programs whose home is the
    replica. It may be negative."""


class PairEngineStatus(ReplicaStatus, frozen=True, kw_only=True):
    """Status of a prefill or decode engine. No program has its home there. A request is in flight at a
    prefill engine until its prompt is computed. ``room_tokens`` is the KV capacity minus the contexts of the
    requests in flight, at least 0."""

    role: str
    """``prefill`` or ``decode``."""
    node: str
    """Name of the engine's machine."""
    epoch: str
    """Instance of the engine's KV transfer manager; empty: unknown."""
    links: Mapping[str, LinkStats]
    """Last report of each link, by the link's name; empty: there is no report."""
