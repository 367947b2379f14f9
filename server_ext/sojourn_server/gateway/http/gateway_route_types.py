"""Types of the query parameters and answers of the gateway's own routes, and a table of these routes for
OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...api.engine_route_types import (
    DECISION_LINES,
    ENGINE_OPERATIONS,
    AnyStats,
    DecisionsAnswer,
    DecisionsQuery,
)
from ...api.openapi import Operation, either
from ...core.engine_answers import Capabilities, GraphList, ProgramDetail
from ...routing.routing_status import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .gateway_metrics import ProgramMove

MAX_LISTED_PROGRAMS = 1000
"""Maximum number of programs in one answer."""

AnyReplicaStatus = Annotated[Any, either(ReplicaStatus, PairEngineStatus)]


class GatewayCapabilities(Capabilities, frozen=True, kw_only=True):
    """Capabilities of all engines behind a gateway, merged."""

    engines: int
    pairs: dict[str, int] | UnsetType = UNSET
    """Number of engines by role, ``prefill`` or ``decode``; absent if the engines have no roles."""
    gateway: Literal[True]
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""
    cluster_policy: str


class RoutedProgramList(msgspec.Struct, frozen=True, kw_only=True):
    """The live programs that the client may see. ``total`` is their number; ended programs do not count.
    ``shown`` is the number in this answer, the most recently active ones."""

    programs: Sequence[ProgramRouteStatus]
    shown: int
    total: int
    note: str = "ended programs are not listed; GET /sojourn/v1/programs/ID or sojourn top shows them"
    """What the list leaves out, for people."""


class RoutedProgram(ProgramRouteStatus, frozen=True, kw_only=True):
    """One program: what the gateway knows about it, and its engine's answer."""

    engine: ProgramDetail | None
    """Answer of the program's engine. ``None``: no engine answers, or no engine has had a request of the
    program."""


class GatewayGraphList(GraphList, frozen=True, kw_only=True):
    """The workflow graphs that the engines know. Also the URLs of engines that run without sojourn
    (``stock``) or did not answer (``silent``)."""

    stock: list[str]
    silent: list[str]


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Status of all replicas, and the statistics of their engines."""

    replicas: Sequence[AnyReplicaStatus]
    engines: dict[str, AnyStats]
    """Statistics by the engine's URL."""
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""


class MoveList(msgspec.Struct, frozen=True, kw_only=True):
    """The latest moves of programs to other replicas, the oldest first."""

    moves: Sequence[ProgramMove]


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a gateway."""

    policy: str
    replicas: Sequence[AnyReplicaStatus]
    missing: list[str]
    """Addresses at which no engine answers. On Ray, names of deployments, each once per missing engine."""
    pairs: dict[str, int] | UnsetType = UNSET
    """Number of engines that are up, by role (``prefill`` or ``decode``); absent if the engines have no
    roles."""
    read_side: str | UnsetType = UNSET
    """Name of the policy that chooses which engine of a pair reads KV from storage; absent: unknown."""
    refused: Mapping[str, str] | UnsetType = UNSET
    """Addresses of engines that answer but get no requests, with the reasons."""


class RoutedProgramsQuery(msgspec.Struct):
    """Query of the list of programs."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_PROGRAMS)] = 100
    """Maximum number of programs in the answer."""


class ReplicaDecisionsQuery(DecisionsQuery):
    """Query of the decision log of one replica's engine."""

    replica: str | None = None
    """Name of the replica. Needed if there are several."""


_REPLICA = Operation(Annotated[Any, either(ReplicaStatus, PairEngineStatus, None)])
_SAME = (
    ("POST", "/events"),
    ("GET", "/programs/{program_id}/explain"),
    ("GET", "/graphs/{graph_hash}"),
    ("GET", "/stream"),
    ("GET", "/openapi.json"),
)
GATEWAY_OPERATIONS = {
    **{key: ENGINE_OPERATIONS[key] for key in _SAME},
    ("GET", "/capabilities"): Operation(GatewayCapabilities),
    ("GET", "/programs"): Operation(RoutedProgramList, RoutedProgramsQuery),
    ("GET", "/programs/{program_id}"): Operation(RoutedProgram),
    ("GET", "/graphs"): Operation(GatewayGraphList),
    ("GET", "/stats"): Operation(GatewayStats),
    ("GET", "/decisions"): Operation(DecisionsAnswer, ReplicaDecisionsQuery, media=DECISION_LINES),
    ("GET", "/moves"): Operation(MoveList),
    ("GET", "/replicas"): Operation(ReplicaList),
    ("POST", "/replicas/{replica}/drain"): _REPLICA,
    ("POST", "/replicas/{replica}/stay"): _REPLICA,
}
"""Operations by method and path below ``/sojourn/v1``."""
