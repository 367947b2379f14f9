"""Descriptions of prefill and decode engines, and whether two of them can form a pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...routing.routing_events import NicQueueReported, PairEngineRegistered, PairRole
from ...routing.routing_status import LinkStats
from .engine_monitor import EngineDescription, describe_engine
from .pair_capabilities import (
    STORAGE_READ,
    InvalidPairEngine,
    PairCapabilities,
    parse_pair_capabilities,
)

EngineCompatibility = tuple[str, int, int, str]
"""What both engines of a pair share: model name, bytes and tokens of a Full Block, and a digest of all that
KV depends on, which is empty if an engine does not report it."""


@dataclass(frozen=True, slots=True)
class PairEngineDescription(EngineDescription):
    """A prefill or decode engine."""

    paths: PairCapabilities | None = None
    unfit: str = ""
    """Why it cannot be in any pair; empty: it can."""

    @property
    def kind(self) -> EngineCompatibility | None:
        """``None``: it cannot be in any pair."""
        return engine_compatibility(self, self.paths) if self.paths is not None else None


def describe_pair(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> PairEngineDescription:
    """As ``describe_engine``, with the members for pairs."""
    told = describe_engine(capabilities, metrics, models, life)
    values = {field.name: getattr(told, field.name) for field in dataclasses.fields(told)}
    try:
        paths = parse_pair_capabilities(capabilities)
    except InvalidPairEngine as error:
        return PairEngineDescription(**values, unfit=str(error))
    # A restarted traffic manager has lost its KV, even if the engine process is the same.
    values["instance"] = f"{told.instance} {paths.epoch}"
    ranks = "it has data-parallel ranks, which share one address of KV; expected one engine"
    return PairEngineDescription(**values, paths=paths, unfit=ranks if told.ranks > 1 else "")


def engine_compatibility(told: EngineDescription, paths: PairCapabilities) -> EngineCompatibility:
    """An engine's kind."""
    return told.model, paths.block_bytes, paths.block_tokens, paths.kv


def incompatibility(kind: EngineCompatibility, ours: EngineCompatibility) -> str:
    """Why an engine of ``kind`` cannot form a pair with one of ``ours``; empty: it can."""
    (model, size, tokens, kv), (our_model, our_size, our_tokens, our_kv) = kind, ours
    if kind[:3] == ours[:3]:
        if kv == our_kv or not kv or not our_kv:
            return ""
        return (
            "its KV is of another kind than the others', which they would refuse: weights, block size of the "
            "engine (--block-size), data type of KV, hash seed or release differ; expected engines that are "
            "started alike, from the same weights"
        )
    if model != our_model:
        return f"it serves {model!r}; expected {our_model!r}, as the others do"
    return (
        f"its Full Blocks are of {size:,} bytes and {tokens} tokens; expected {our_size:,} and "
        f"{our_tokens}, as the others have"
    )


def dominant_compatibility(
    engines: Iterable[tuple[EngineCompatibility, PairRole]], ours: EngineCompatibility | None
) -> EngineCompatibility | None:
    """The kind that is to be served; ``None``: there are no engines.

    That is the kind with most engines, among kinds that have both roles. ``ours`` is served now; it wins a
    tie, and stays if no kind has both roles.
    """
    roles: dict[EngineCompatibility, list[PairRole]] = {}
    for kind, role in engines:
        roles.setdefault(kind, []).append(role)

    def weight(kind: EngineCompatibility) -> tuple[bool, int, bool, int]:
        mine = roles[kind]
        pairs = len(set(mine)) == len(PairRole)
        return pairs, len(mine) if pairs else 0, kind == ours, len(mine)

    return max(roles, key=weight, default=None)


def registration_event(
    replica_id: str, told: EngineDescription, paths: PairCapabilities
) -> PairEngineRegistered:
    """The registration of an engine."""
    return PairEngineRegistered(
        replica_id,
        told.instance,
        paths.role,
        paths.node,
        told.capacity_tokens,
        paths.block_s,
        paths.peer,
        told.max_context_tokens,
        paths.epoch,
        told.max_running,
    )


def nic_queue_event(node: str, engines: Iterable[Mapping[str, LinkStats]]) -> NicQueueReported | None:
    """The queue of a node's storage NIC: the sum over its engines, which share it. ``None``: an engine does
    not know its queue, or none reports one; the core's own estimate stays valid then."""
    told = [links[STORAGE_READ].queued_s for links in engines if STORAGE_READ in links]
    known = [seconds for seconds in told if seconds is not None]
    return NicQueueReported(node, sum(known)) if told and len(known) == len(told) else None
