"""Parses what engines report about themselves: sizes, role and links. Finds out which engines can form pairs.

A pair is a prefill engine and a decode engine. For each of them, ``/sojourn/v1/capabilities`` reports its
role, peer address, node, epoch (id of its KV transfer manager) and the size of a Full Block, the unit of KV
storage. ``/sojourn/v1/stats`` reports the queues of its links to storage and to other engines. Reports are
untrusted, so they are checked.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...metrics.vllm_metrics_page import CachePool, cache_pools, process_start_time, whole
from ...routing.routing_events import NicQueueReported, PairEngineRegistered, PairRole, ReplicaRegistered
from ...routing.routing_status import LinkStats

DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Assumed KV capacity, in tokens, of an engine that reports none. All such engines count as equally large. So
routing compares them only by their numbers of requests."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine reports about itself. Sizes are per data-parallel rank."""

    ranks: int
    """Number of data-parallel ranks."""
    instance: str
    """Id that changes with each restart of the engine. It is the start time of the engine's process. If this
    time is unknown, it is the number of engines lost at the address before. On Ray, it is
    ``EngineProcess.instance``. For a prefill or decode engine, the epoch of its KV transfer manager is
    appended."""
    capacity_tokens: int
    """KV capacity of the device in tokens."""
    host_tokens: int
    """KV capacity of host memory in tokens; 0: none or unknown."""
    max_running: int
    """Maximum number of requests that run at once; 0: unknown."""
    max_context_tokens: int
    """Maximum length of a context in tokens; 0: unknown."""
    shares_disk: bool
    """Whether the engine keeps KV on a disk that other engines use too."""
    speaks_sojourn: bool
    """Whether the engine runs sojourn."""
    model: str = ""
    """The first model name that the engine serves; empty: unknown."""
    pair_role: str = ""
    """``prefill`` or ``decode``, if the engine was started with this role; empty: without a role."""


def describe_engine(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> EngineDescription:
    """Build a description from an engine's answers to ``/capabilities``, ``/metrics`` and ``/v1/models``.

    An engine with sojourn reports all values of a description. Plain vLLM reports only some, such as its KV
    capacity. ``life``: number of engines lost at this address before. It identifies an engine whose start
    time is unknown.
    """
    engine = capabilities.get("engine")
    engine = engine if isinstance(engine, dict) else {}
    pools = cache_pools(metrics)
    pool = pools[0] if pools else CachePool()
    block_size = whole(engine.get("block_size")) or pool.block_size or 16
    blocks = whole(engine.get("num_blocks")) or pool.num_blocks or 0
    tiers = capabilities.get("tiers")
    tiers = tiers if isinstance(tiers, dict) and tiers.get("on", True) else {}
    host, disk = tiers.get("host"), tiers.get("disk")
    host_blocks = whole(host.get("blocks")) or 0 if isinstance(host, dict) else 0
    paths = capabilities.get("paths")
    role = paths.get("role") if isinstance(paths, dict) else None
    data = models.get("data")
    served = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    ranks = max(len({pool.engine for pool in pools}), whole(capabilities.get("engines")) or 1, 1)
    return EngineDescription(
        ranks=ranks,
        # Without a start time, another engine at this address is noticed only after the loss of the first.
        instance=process_start_time(metrics) or f"life {life}",
        # vLLM reserves one block.
        capacity_tokens=(blocks - 1) * block_size if blocks > 1 else DEFAULT_CAPACITY_TOKENS,
        host_tokens=host_blocks * block_size,
        max_running=whole(engine.get("max_num_seqs")) or 0,
        max_context_tokens=whole(served.get("max_model_len")) or 0,
        shares_disk=isinstance(disk, dict) and disk.get("shared") is True,
        speaks_sojourn=capabilities.get("name") == "sojourn",
        model=name if isinstance(name := served.get("id"), str) else "",
        # The reported role is untrusted and goes into the log, so only known roles are accepted.
        pair_role=role if role in ("prefill", "decode") else "",
    )


STATS_PATH = "/sojourn/v1/stats"
STORAGE_READ = "storage read"
"""Name of the link whose queue decides which engine of a pair reads KV from storage."""
DEFAULT_BLOCK_S = 0.001
"""Assumed seconds to read one Full Block, for an engine that has not measured its link."""
MAX_LINKS = 16
"""Maximum number of links in a report. A report with more links is ignored."""
MAX_TEXT_BYTES = 4096
"""Maximum bytes of a text in a report."""


class InvalidPairEngine(ValueError):
    """An engine cannot be part of a pair. The text says what the engine reported, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCapabilities:
    """Role and addresses of a prefill or decode engine, and the format of its KV."""

    role: PairRole
    peer: str
    """Address at which other engines reach the engine's KV transfer manager."""
    node: str
    """Name of the engine's machine."""
    epoch: str
    """Id of the engine's KV transfer manager; changes with each restart of the manager."""
    block_s: float
    """Seconds in which the node's storage NIC reads one Full Block."""
    block_bytes: int
    """Bytes of a Full Block."""
    block_tokens: int
    """Tokens of a Full Block."""
    kv: str = ""
    """Digest of the KV format, equal for engines that accept each other's KV; empty: unknown."""
    shape: str = ""
    """How the model is split over the engine's workers; empty: unknown."""


def parse_pair_capabilities(capabilities: Mapping[str, Any]) -> PairCapabilities:
    """Parse the field ``paths`` of a prefill or decode engine's answer to ``/capabilities``. Raises
    ``InvalidPairEngine``."""
    reported = capabilities.get("paths")
    if not isinstance(reported, Mapping):
        raise InvalidPairEngine("it reports no KV paths; expected an engine started with --role")
    roles = [role for role in PairRole if role.value == reported.get("role")]
    if not roles:
        raise InvalidPairEngine(f"its role is {reported.get('role')!r:.80}; expected prefill or decode")
    peer, node, epoch = (_text(reported, name) for name in ("peer", "node", "epoch"))
    sizes = [reported.get(name) for name in ("block_bytes", "block_tokens")]
    for name, size in zip(("block_bytes", "block_tokens"), sizes, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidPairEngine(f"its {name} is {size!r:.80}; expected a number above 0")
    block_s = _seconds(reported.get("block_s"))
    return PairCapabilities(
        role=roles[0],
        peer=peer,
        node=node,
        epoch=epoch,
        block_s=block_s or DEFAULT_BLOCK_S,
        block_bytes=int(sizes[0] or 0),
        block_tokens=int(sizes[1] or 0),
        kv=_text(reported, "kv") if reported.get("kv") else "",
        shape=_text(reported, "shape") if reported.get("shape") else "",
    )


def parse_link_stats(stats: Mapping[str, Any]) -> dict[str, LinkStats] | None:
    """Parse the links in an answer to ``/stats``. Return them by name; ``None``: missing or invalid."""
    reported = stats.get("paths")
    links = reported.get("links") if isinstance(reported, Mapping) else None
    if not isinstance(links, Mapping) or len(links) > MAX_LINKS:
        return None
    found = {}
    for name, link in links.items():
        if not isinstance(link, Mapping):
            return None
        queued_s, queued, moved = (link.get(key) for key in ("queued_s", "queued_bytes", "moved_bytes"))
        seconds = _seconds(queued_s)
        if seconds is None and queued_s is not None:
            return None
        found[str(name)] = LinkStats(_count(queued), seconds, _count(moved))
    return found


def _text(reported: Mapping[str, Any], name: str) -> str:
    """Return the text in the field ``name``. Raises ``InvalidPairEngine`` unless it is a non-empty text of at
    most ``MAX_TEXT_BYTES``."""
    value = reported.get(name)
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value.encode(errors="replace")) > MAX_TEXT_BYTES
    ):
        raise InvalidPairEngine(
            f"its {name} is {value!r:.80}; expected a text of at most {MAX_TEXT_BYTES} bytes"
        )
    return value


def _seconds(value: object) -> float | None:
    """Return ``value`` if it is a finite number of at least 0; ``None`` for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None


def _count(value: object) -> int:
    """Return ``value`` if it is an integer of at least 0, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


class EngineCompatibility(NamedTuple):
    """Values that both engines of a pair must have in common. ``kv`` and ``shape`` are empty if not
    reported."""

    model: str
    """Name of the model."""
    block_bytes: int
    """Bytes of a Full Block."""
    block_tokens: int
    """Tokens of a Full Block."""
    kv: str
    """``PairCapabilities.kv``."""
    shape: str
    """``PairCapabilities.shape``."""


@dataclass(frozen=True, slots=True)
class PairEngineDescription(EngineDescription):
    """Description of a prefill or decode engine."""

    paths: PairCapabilities | None = None
    """Role, addresses and KV format that the engine reported; ``None``: missing or invalid."""
    unfit: str = ""
    """Why the engine cannot be part of any pair; empty if it can."""


def describe_pair(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> PairEngineDescription:
    """Build the description of a prefill or decode engine from its answers to ``/capabilities``, ``/metrics``
    and ``/v1/models``. If the engine cannot be part of a pair, the result's ``unfit`` says why. ``life``:
    number of engines lost at this address before."""
    reported = describe_engine(capabilities, metrics, models, life)
    values = {field.name: getattr(reported, field.name) for field in dataclasses.fields(reported)}
    try:
        paths = parse_pair_capabilities(capabilities)
    except InvalidPairEngine as error:
        return PairEngineDescription(**values, unfit=str(error))
    # A restarted KV transfer manager has lost its KV, even if the engine process is the same.
    values["instance"] = f"{reported.instance} {paths.epoch}"
    ranks = "it has data-parallel ranks, which share one address of KV; expected one engine"
    return PairEngineDescription(**values, paths=paths, unfit=ranks if reported.ranks > 1 else "")


def engine_compatibility(reported: EngineDescription, paths: PairCapabilities) -> EngineCompatibility:
    """Return the values of an engine that must equal those of its partner in a pair. ``reported``: the
    engine's description. ``paths``: its role, addresses and KV format."""
    return EngineCompatibility(reported.model, paths.block_bytes, paths.block_tokens, paths.kv, paths.shape)


def incompatibility(kind: EngineCompatibility, ours: EngineCompatibility) -> str:
    """Return why engines with the values ``kind`` cannot form a pair with the served engines, which have the
    values ``ours``. Empty if they can. An empty ``kv`` or ``shape`` matches any value."""
    if kind.model != ours.model:
        return f"it serves {kind.model!r}; expected {ours.model!r}, as the others do"
    if kind.shape and ours.shape and kind.shape != ours.shape:
        return (
            f"its workers are {kind.shape}, and the other engines' {ours.shape}; expected the same "
            "--tensor-parallel-size and --pipeline-parallel-size, because each worker exchanges its part of "
            "KV with the one of its rank"
        )
    if (kind.block_bytes, kind.block_tokens) != (ours.block_bytes, ours.block_tokens):
        return (
            f"its Full Blocks are of {kind.block_bytes:,} bytes and {kind.block_tokens} tokens; expected "
            f"{ours.block_bytes:,} and {ours.block_tokens}, as the others have"
        )
    if kind.kv and ours.kv and kind.kv != ours.kv:
        return (
            "its KV cannot be exchanged with the other engines': weights, block size of the "
            "engine (--block-size), data type of KV, hash seed or release differ; expected engines "
            "started with the same flags, from the same weights"
        )
    return ""


def dominant_compatibility(
    engines: Iterable[tuple[EngineCompatibility, PairRole]], ours: EngineCompatibility | None
) -> EngineCompatibility | None:
    """Choose the kind of engines to serve; ``None``: there are no engines. Engines of one kind have equal
    ``EngineCompatibility``. ``ours`` is the kind that is served now.

    Among the kinds with both roles, choose the one with the most engines. ``ours`` wins a tie. If no kind has
    both roles, choose ``ours`` if it still has an engine, otherwise the kind with the most engines.
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
    replica_id: str, described: EngineDescription, paths: PairCapabilities | None = None
) -> ReplicaRegistered | PairEngineRegistered:
    """Return the event that registers a replica with the routing core. ``paths``: role, addresses and KV
    format of a prefill or decode engine; ``None`` for other engines."""
    if paths is None:
        return ReplicaRegistered(
            replica_id,
            described.instance,
            described.capacity_tokens,
            host_tokens=described.host_tokens,
            max_running=described.max_running,
            max_context_tokens=described.max_context_tokens,
        )
    return PairEngineRegistered(
        replica_id,
        described.instance,
        described.capacity_tokens,
        max_running=described.max_running,
        max_context_tokens=described.max_context_tokens,
        role=paths.role,
        node=paths.node,
        block_s=paths.block_s,
        peer=paths.peer,
        epoch=paths.epoch,
    )


def nic_queue_event(node: str, engines: Iterable[Mapping[str, LinkStats]]) -> NicQueueReported | None:
    """Return the event that reports the queue of a node's storage NIC. ``engines``: the links of each engine
    on the node. They share the NIC, so their queues are added up.

    Return ``None`` if no engine reports a queue, or if a reported queue has an unknown length. Then the core
    keeps its own estimate.
    """
    reported = [links[STORAGE_READ].queued_s for links in engines if STORAGE_READ in links]
    known = [seconds for seconds in reported if seconds is not None]
    return NicQueueReported(node, sum(known)) if reported and len(known) == len(reported) else None
