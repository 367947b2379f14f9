"""What engines report about themselves: sizes and role. Finds out which can form pairs of a prefill and a
decode engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ...core.engine_answers import LinkStats
from ...metrics.vllm_metrics_page import CachePool, cache_pools, process_start_time, whole
from ...routing.routing_events import NicQueueReported, PairEngineRegistered, PairRole, ReplicaRegistered

DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Assumed KV capacity, in tokens, of an engine that reports none. All such engines count as equally large."""
STORAGE_READ = "storage read"
"""Name of the link whose queue decides which engine of a pair reads KV from storage."""
DEFAULT_BLOCK_S = 0.001
"""Assumed seconds to read one Full Block, for an engine that has not measured its link."""

_Name = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\S")]
_Size = Annotated[int, Meta(ge=1)]


class EngineCompatibility(NamedTuple):
    """Values that both engines of a pair have in common. ``kv`` and ``shape`` are empty if not reported."""

    model: str
    block_bytes: int
    block_tokens: int
    """Size of a Full Block, the unit of KV storage."""
    kv: str
    """Digest of the KV format, equal for engines that accept each other's KV."""
    shape: str
    """How the model is split over the engine's workers."""


class PairCapabilities(msgspec.Struct, frozen=True):
    """The field ``paths`` of a prefill or decode engine's capabilities."""

    role: PairRole
    peer: _Name
    """Address at which other engines reach the engine's KV transfer manager."""
    node: _Name
    """Name of the engine's machine."""
    epoch: _Name
    """Id of the engine's KV transfer manager; changes with each restart of the manager."""
    block_bytes: _Size
    block_tokens: _Size
    block_s: float | None = None
    """Seconds in which the node's storage NIC reads one Full Block; ``None``: not measured."""
    kv: str | None = None
    shape: str | None = None


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine reports about itself."""

    registered: ReplicaRegistered
    """Event that registers a replica of the engine, without ``replica_id``; sizes are per data-parallel rank.
    ``instance`` is the start time of the process, or the number of engines lost at the address before; of an
    engine of a pair also the epoch of its KV transfer manager, which a restart leaves without KV."""
    ranks: int = 1
    """Number of data-parallel ranks."""
    shares_disk: bool = False
    """Whether the engine keeps KV on a disk that other engines use too."""
    speaks_sojourn: bool = False
    """Whether the engine runs sojourn."""
    paths: PairCapabilities | None = None
    """Role, addresses and KV format of a prefill or decode engine; ``None``: missing or invalid."""
    kind: EngineCompatibility | None = None
    """What must equal the values of a partner in a pair; ``None``: the engine can be in no pair."""
    unfit: str = ""
    """Why the engine cannot be part of any pair; empty if it can."""

    @property
    def pair_role(self) -> PairRole | None:
        """The role with which the engine was started."""
        return self.paths.role if self.paths is not None else None


def describe_engine(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int, in_pair: bool = False
) -> EngineDescription:
    """Build a description from an engine's answers to ``/capabilities``, ``/metrics`` and ``/v1/models``;
    plain vLLM reports only some of its values. ``life``: number of engines lost at this address before.
    ``in_pair``: whether the engine is to serve as a prefill or decode engine."""
    engine, tiers = _table(capabilities.get("engine")), _table(capabilities.get("tiers"))
    if not tiers.get("on", True):
        tiers = {}
    pools = cache_pools(metrics)
    pool = pools[0] if pools else CachePool()
    block_size = whole(engine.get("block_size")) or pool.block_size or 16
    blocks = whole(engine.get("num_blocks")) or pool.num_blocks or 0
    data = models.get("data")
    served = _table(data[0] if isinstance(data, list) and data else None)
    model = name if isinstance(name := served.get("id"), str) else ""
    ranks = max(len({pool.engine for pool in pools}), whole(capabilities.get("engines")) or 1)
    paths, kind, unfit = None, None, ""
    try:
        if capabilities.get("paths") is not None:
            paths = msgspec.convert(capabilities["paths"], PairCapabilities)
            if ranks > 1:
                unfit = "it has data-parallel ranks, which share one address of KV; expected one engine"
            else:
                kind = EngineCompatibility(
                    model, paths.block_bytes, paths.block_tokens, paths.kv or "", paths.shape or ""
                )
    except msgspec.ValidationError as error:
        unfit = f"what it reports of its KV paths is invalid: {error}"
    # Without a start time, another engine at this address is noticed only after the loss of the first.
    started = process_start_time(metrics) or f"life {life}"
    registered = ReplicaRegistered(
        replica_id="",
        instance=f"{started} {paths.epoch}" if paths is not None else started,
        # vLLM reserves one block.
        capacity_tokens=(blocks - 1) * block_size if blocks > 1 else DEFAULT_CAPACITY_TOKENS,
        host_tokens=(whole(_table(tiers.get("host")).get("blocks")) or 0) * block_size,
        max_running=whole(engine.get("max_num_seqs")) or 0,
        max_context_tokens=whole(served.get("max_model_len")) or 0,
    )
    if in_pair and paths is not None:
        registered = PairEngineRegistered(
            **{**msgspec.structs.asdict(registered), "host_tokens": 0},
            role=paths.role,
            node=paths.node,
            block_s=paths.block_s or DEFAULT_BLOCK_S,
            peer=paths.peer,
            epoch=paths.epoch,
        )
    return EngineDescription(
        registered,
        ranks,
        shares_disk=_table(tiers.get("disk")).get("shared") is True,
        speaks_sojourn=capabilities.get("name") == "sojourn",
        paths=paths,
        kind=kind,
        unfit=unfit,
    )


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def incompatibility(kind: EngineCompatibility, ours: EngineCompatibility) -> str:
    """Return why engines of a kind cannot work with the served ones, ``ours``; empty if they can. An empty
    ``kv`` or ``shape`` matches any value."""
    for field, (what, how) in _MUST_BE_EQUAL.items():
        theirs, own = getattr(kind, field), getattr(ours, field)
        if theirs != own and (field == "model" or (theirs and own)):
            return f"its {what} is {theirs!r}; expected {own!r}, as the other engines have{how}"
    return ""


_MUST_BE_EQUAL = {
    "model": ("model", ""),
    "shape": ("split over workers", " (--tensor-parallel-size, --pipeline-parallel-size)"),
    "block_bytes": ("Full Block in bytes", ""),
    "block_tokens": ("Full Block in tokens", ""),
    "kv": (
        "KV format",
        "; start all with the same flags (--block-size, --kv-cache-dtype) and weights, in one release",
    ),
}
"""Field of ``EngineCompatibility`` → (its name in errors, how it becomes equal)."""


def dominant_kind(
    engines: Iterable[tuple[EngineCompatibility, PairRole]], ours: EngineCompatibility | None
) -> EngineCompatibility | None:
    """Choose the kind to serve; ``None``: there are no engines. ``ours``, the served kind, stays while it has
    both roles. Else it is the kind with the most engines, those with both roles first."""
    roles: dict[EngineCompatibility, list[PairRole]] = {}
    for kind, role in engines:
        roles.setdefault(kind, []).append(role)

    def weight(kind: EngineCompatibility) -> tuple[bool, bool, int]:
        has_both = len(set(roles[kind])) == len(PairRole)
        return has_both, has_both and kind == ours, len(roles[kind]) * 2 + (kind == ours)

    return max(roles, key=weight, default=None)


def nic_queue_event(node: str, engines: Iterable[Mapping[str, LinkStats]]) -> NicQueueReported | None:
    """Return the event of the queue of a node's storage NIC, the sum of its engines' queues by their links.
    ``None``, for the core's own estimate, if no engine reports one, or one of unknown length."""
    reported = [links[STORAGE_READ].queued_s for links in engines if STORAGE_READ in links]
    known = [seconds for seconds in reported if seconds is not None]
    return NicQueueReported(node, sum(known)) if reported and len(known) == len(reported) else None
