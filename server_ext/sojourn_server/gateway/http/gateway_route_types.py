"""Types of the answers of the gateway's own routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ...api.openapi import either
from ...core.engine_answers import EngineStats, PolicyState
from ...routing.routing_records import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .gateway_metrics import ProgramMove

MAX_LISTED_PROGRAMS = 1000
"""Maximum number of programs in one answer."""

AnyReplicaStatus = Annotated[Any, either(ReplicaStatus, PairEngineStatus)]


class RoutedProgramList(msgspec.Struct, frozen=True, kw_only=True):
    """The live programs that the client may see: ``total`` in number, of which the answer has ``shown``, the
    most recently active ones."""

    programs: Sequence[ProgramRouteStatus]
    shown: int
    total: int
    note: str = "ended programs are not listed; GET /sojourn/v1/programs/ID or sojourn top shows them"
    """What the list leaves out, for people."""


class GatewayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Status of all replicas, and the statistics of their engines."""

    replicas: Sequence[AnyReplicaStatus]
    engines: dict[str, EngineStats]
    """Statistics by the engine's URL."""
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""


class PolicyStates(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of all engines after a switch."""

    engines: dict[str, PolicyState]
    """Policy by the engine's URL."""
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
    """Number of engines that are up, by role (``prefill`` or ``decode``); absent without roles."""
    read_side: str | UnsetType = UNSET
    """Name of the policy that chooses which engine of a pair reads KV from storage; absent: unknown."""
    refused: Mapping[str, str] | UnsetType = UNSET
    """Addresses of engines that answer but get no requests, with the reasons."""
