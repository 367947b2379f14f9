"""Polls engines. Registers living ones with the routing core, reports their load and the programs whose KV
they have, and reports dead or restarted engines as gone.

Each poll asks for ``/health``, and engines that run sojourn for their load too. Engines describe themselves
at the first of ``DESCRIBE_EVERY_POLLS`` polls. An engine is dead if it refuses connections, reports twice
that it is unhealthy, or does not answer for ``SILENT_DEAD_S``.

Engines with configured roles are prefill and decode engines. Only those of one kind are accepted, with the
same model and KV format. The served kind changes when it lacks a role and another kind has both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta
from sojourn.wire_codec import CAPABILITIES_PATH

from ...core.engine_answers import EngineLoad, LinkStats
from ...metrics.vllm_metrics_page import CachePool, cache_pools, process_start_time, whole
from ...routing.routing_events import (
    KvReported,
    NicQueueReported,
    PairEngineRegistered,
    PairRole,
    ProbeReplica,
    ReplicaGone,
    ReplicaRegistered,
    ResidentKv,
)
from .engine_client import EngineReply, ask_engine, bearer
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses, rank_addresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)

POLL_S = 2.0
ANSWER_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 10.0
"""Long enough for a slow but living engine."""
SILENT_DEAD_S = 30.0
"""Seconds without an answer after which an engine counts as dead."""
MAX_ERROR_POLLS = 2
"""Number of health checks in a row with status 500 or 503 after which an engine counts as dead."""
DESCRIBE_EVERY_POLLS = 15
PARTIAL_POLLS = 3
"""Number of polls after which even an incomplete description of a new engine is accepted."""
DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Assumed KV capacity, in tokens, of an engine that reports none. All such engines count as equally large."""
STORAGE_READ = "storage read"
"""Name of the link whose queue decides which engine of a pair reads KV from storage."""
DEFAULT_BLOCK_S = 0.001
"""Assumed seconds in which an engine that has measured nothing reads one Full Block."""
LOAD_PATH = "/sojourn/v1/load"
_DESCRIPTION_PATHS = (CAPABILITIES_PATH, "/metrics", "/v1/models")
_Name = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\S")]
_Size = Annotated[int, Meta(ge=1)]


EngineKind = tuple[str, str, int, int, str]
"""What both engines of a pair have in common: the values of ``_MUST_BE_EQUAL``. Empty: not reported."""


class PairCapabilities(msgspec.Struct, frozen=True):
    """The field ``paths`` of a prefill or decode engine's capabilities."""

    role: PairRole
    peer: _Name
    """Address of the engine's KV transfer manager."""
    node: _Name
    """Name of the engine's machine."""
    epoch: _Name
    """Id of the KV transfer manager, another one after each restart."""
    block_bytes: _Size
    block_tokens: _Size
    block_s: Annotated[float, Meta(ge=0.0)] | None = None
    """Seconds in which the node's storage NIC reads one Full Block; ``None``: not measured."""
    kv: str = ""
    shape: str = ""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine reports about itself."""

    registered: ReplicaRegistered
    """Event that registers a replica, without ``replica_id``; sizes are per data-parallel rank. ``instance``
    is the start time of the process, or the number of engines lost at the address before; of an engine of a
    pair also the epoch of its KV transfer manager, which a restart leaves without KV."""
    ranks: int = 1
    shares_disk: bool = False
    """Whether the engine keeps KV on a disk that other engines use too."""
    speaks_sojourn: bool = False
    paths: PairCapabilities | None = None
    """``None``: missing or invalid."""
    kind: EngineKind | None = None
    """``None``: the engine can be in no pair, and ``unfit`` says why if it was started for pairs."""
    unfit: str = ""


def describe_engine(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int, in_pair: bool = False
) -> EngineDescription:
    """Read an engine's answers, of which plain vLLM gives some. ``life``: number of engines lost at this
    address before. ``in_pair``: whether the engine is to serve as a prefill or decode engine."""
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
                kind = (model, paths.shape, paths.block_bytes, paths.block_tokens, paths.kv)
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
            **{**msgspec.structs.asdict(registered), "host_tokens": 0, "role": paths.role},
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


def incompatibility(kind: EngineKind, ours: EngineKind) -> str:
    """Return why engines of a kind cannot work with ``ours``; empty if they can."""
    for (what, how), theirs, own in zip(_MUST_BE_EQUAL, kind, ours, strict=True):
        if theirs != own and (what == "model" or (theirs and own)):
            return f"its {what} is {theirs!r}; expected {own!r}, as the other engines have{how}"
    return ""


_MUST_BE_EQUAL = (
    ("model", ""),
    ("split over workers", " (--tensor-parallel-size, --pipeline-parallel-size)"),
    ("Full Block in bytes", ""),
    ("Full Block in tokens", ""),
    ("KV format", "; start all with the same --block-size, --kv-cache-dtype and weights, in one release"),
)
"""(name in errors, how it becomes equal) of each value of an ``EngineKind``."""


def dominant_kind(
    engines: Iterable[tuple[EngineKind, PairRole]], ours: EngineKind | None
) -> EngineKind | None:
    """Choose the kind to serve: one with both roles, if possible ``ours``, the served kind, else one with the
    most engines."""
    roles: dict[EngineKind, list[PairRole]] = {}
    for kind, role in engines:
        roles.setdefault(kind, []).append(role)
    return max(roles, key=lambda kind: (len({*roles[kind]}), kind == ours, len(roles[kind])), default=None)


def nic_queue_event(node: str, engines: Iterable[Mapping[str, LinkStats]]) -> NicQueueReported | None:
    """Return the queue of a node's storage NIC, the sum of its engines' queues. ``None``, for the core's own
    estimate, if no engine reports one, or one of unknown length."""
    reported = [links[STORAGE_READ].queued_s for links in engines if STORAGE_READ in links]
    known = [seconds for seconds in reported if seconds is not None]
    return NicQueueReported(node, sum(known)) if reported and len(known) == len(reported) else None


class _Loads(msgspec.Struct):
    engines: list[EngineLoad]


@dataclass(slots=True, eq=False)
class MonitoredEngine:
    """A configured address, and the engine there, if any. Times are on the monitor's clock."""

    url: str
    role: PairRole | None
    answered_s: float
    """Time of the engine's last answer."""
    description: EngineDescription | None = None
    """The last accepted one; ``None``: no engine answers at the address."""
    errors: int = 0
    """Number of consecutive health checks with an error."""
    polls: int = 0
    """Number of successful polls since the engine was last lost."""
    lives: int = 0
    """Number of engines lost at this address."""
    places: list[ReplicaAddress] = field(default_factory=list)
    """Registered replicas, one per data-parallel rank."""
    instance: str = ""
    """Instance under which these replicas are registered."""
    refused: str = ""
    """Why the engine gets no requests; empty: it gets some."""
    loads: list[EngineLoad] = field(default_factory=list)
    """The report by rank that is to be passed on, requested at ``asked_s``."""
    asked_s: float = 0.0
    links: dict[str, LinkStats] = field(default_factory=dict)
    polling: asyncio.Task[None] | None = None
    is_warned: bool = False
    """Whether the log already warns that no engine answers here yet."""


class EngineMonitor:
    """Registers engines with a routing backend. ``engines``: URL → role (``None``: it serves whole requests).
    ``poll_s``: seconds between two polls. ``clock``: time in seconds."""

    def __init__(
        self,
        engines: Mapping[str, PairRole | None],
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        names: ProgramIdMapper,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = routing_backend.tell
        self._replicas = replicas
        self._names = names
        self._session = session
        self._authorization = bearer(engine_key)
        self._poll_s = poll_s
        self._clock = clock
        self._watched: dict[str, MonitoredEngine] = {}
        self._kind: EngineKind | None = None
        """The served kind of prefill and decode engines; ``None``: not chosen yet."""
        self._absent: tuple[str, ...] = ()
        self.watch(engines)

    def watch(self, engines: Mapping[str, PairRole | None], absent: Iterable[str] = ()) -> None:
        """Monitor these engines, and those that still answer. ``absent``: names for ``missing``."""
        self._absent = tuple(absent)
        for watched in [*self._watched.values()]:
            if watched.url not in engines and watched.description is None:
                del self._watched[watched.url]
                if watched.polling is not None:
                    watched.polling.cancel()
        for url, role in engines.items():
            if url not in self._watched:
                self._watched[url] = MonitoredEngine(url, role, self._clock())

    async def run(self) -> None:
        """Poll all engines regularly, until cancelled."""
        try:
            while True:
                for watched in self._watched.values():
                    self._start_poll(watched)
                await asyncio.sleep(self._poll_s)
        finally:
            polls = [one.polling for one in self._watched.values() if one.polling is not None]
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    async def poll_all(self) -> None:
        """Poll all engines once, then register them."""
        engines = list(self._watched.values())
        await asyncio.gather(*(self._check(watched) for watched in engines))
        for watched in engines:
            self._register(watched)

    def probe(self, action: ProbeReplica) -> None:
        """Poll a replica's engine now, unless a poll is in progress."""
        watched = self._engine_of(action.replica_id)
        if watched is None:
            self._tell(ReplicaGone(action.replica_id, action.instance))
        else:
            watched.polls = 0  # another engine may have been started at the same address
            self._start_poll(watched)

    # -- queries ----------------------------------------------------------------------

    def _engine_of(self, replica_id: str) -> MonitoredEngine | None:
        address = self._replicas.get(replica_id)
        return self._watched.get(address.url) if address is not None else None

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """Return what a replica's engine says of itself; ``None``: unknown."""
        watched = self._engine_of(replica_id)
        return watched.description if watched is not None else None

    def links_of(self, replica_id: str) -> Mapping[str, LinkStats]:
        watched = self._engine_of(replica_id)
        return watched.links if watched is not None else {}

    def missing(self) -> list[str]:
        """Return the addresses at which no engine answers, and the names of absent engines."""
        return [*(one.url for one in self._watched.values() if one.description is None), *self._absent]

    def refused(self) -> Mapping[str, str]:
        """Return the URLs of engines that answer but get no requests, with the reasons."""
        return {watched.url: watched.refused for watched in self._watched.values() if watched.refused}

    # -- polls --------------------------------------------------------------------------

    def _start_poll(self, watched: MonitoredEngine) -> None:
        if watched.polling is None or watched.polling.done():
            watched.polling = asyncio.ensure_future(self._poll(watched))

    async def _poll(self, watched: MonitoredEngine) -> None:
        await self._check(watched)
        self._register(watched)

    async def _check(self, watched: MonitoredEngine) -> None:
        """Query an engine. Report it as gone if it is dead."""
        alive = await self._is_alive(watched)
        if alive:
            watched.answered_s, watched.errors = self._clock(), 0
            if watched.description is None or watched.polls % DESCRIBE_EVERY_POLLS == 0:
                await self._describe(watched)
            watched.polls += 1
            await self._ask_load(watched)
        elif alive is False:
            self._gone(watched, "it refuses connections or reports that it is unhealthy")
            if not watched.is_warned and not watched.lives:
                logger.warning("no engine answers at %s yet", watched.url)
                watched.is_warned = True
        elif self._clock() - watched.answered_s >= SILENT_DEAD_S:
            self._gone(watched, "it does not answer")

    async def _is_alive(self, watched: MonitoredEngine) -> bool | None:
        """Check an engine's health; ``None``: unknown."""
        headers = {"Authorization": self._authorization} if self._authorization else {}
        url, timeout = f"{watched.url}/health", aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._session().get(url, headers=headers, timeout=timeout) as answer:
                await answer.read()
        except aiohttp.ClientConnectorError as error:
            # Nothing listens there. A failed name resolution or route may be a local problem.
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        if answer.status < 300:
            return True
        # Any other status is that of a proxy in between.
        watched.errors = watched.errors + 1 if answer.status in (500, 503) else 0
        return False if watched.errors >= MAX_ERROR_POLLS else None

    async def _get(self, url: str) -> EngineReply | None:
        """Send a GET. ``None``: there is no answer, or a server error (5xx)."""
        key = self._authorization
        reply = await ask_engine(self._session(), url, authorization=key, timeout_s=ANSWER_TIMEOUT_S)
        return reply if reply is not None and reply.status < 500 else None

    async def _describe(self, watched: MonitoredEngine) -> None:
        """Update a description, but not to an incomplete one, which would look like another engine."""
        replies = await asyncio.gather(*(self._get(watched.url + path) for path in _DESCRIPTION_PATHS))
        known, is_partial = watched.description, None in replies
        asks_key = any(one is not None and one.status == 401 for one in replies)
        if (known and (is_partial or asks_key)) or (is_partial and watched.polls < PARTIAL_POLLS - 1):
            return
        capabilities, metrics, models = (one or _NOTHING for one in replies)
        page = metrics.body.decode(errors="replace") if metrics.status == 200 else ""
        described = describe_engine(
            capabilities.document or {}, page, models.document or {}, watched.lives, watched.role is not None
        )
        watched.description = described
        if known is None:
            if asks_key:
                logger.warning("%s asks for a key: without --engine-key its sizes are unknown", watched.url)
            sizes = (described.registered.capacity_tokens, described.registered.host_tokens)
            logger.info("%s is up: KV for %d tokens on the device, %d in host memory", watched.url, *sizes)
            if described.paths is not None and watched.role is None:
                why = "so clients could read others' KV; start the gateway with --prefill and --decode"
                role = described.paths.role.value
                logger.warning("%s was started with --role %s and gets all, %s", watched.url, role, why)
        elif known.registered.instance != described.registered.instance:
            logger.warning("%s was restarted: its KV is lost", watched.url)

    async def _ask_load(self, watched: MonitoredEngine) -> None:
        described = watched.description
        if described is None or not (described.speaks_sojourn or watched.role):
            return
        watched.asked_s = self._clock()
        reply = await self._get(watched.url + LOAD_PATH)
        try:
            watched.loads = msgspec.convert(reply.document if reply is not None else None, _Loads).engines
        except msgspec.ValidationError:
            watched.loads = []
        if watched.loads and (one := watched.loads[0]).links:
            watched.links = one.links
            if described.paths is None or described.paths.epoch != one.epoch:
                await self._describe(watched)  # its KV transfer manager was restarted

    # -- results ------------------------------------------------------------------------

    def _register(self, watched: MonitoredEngine) -> None:
        """Register a living engine's replicas, with their load, or refuse the engine."""
        described, in_pair = watched.description, watched.role is not None
        if described is None:
            return
        why = self._why_refused(watched, described) if in_pair else ""
        if why and watched.refused != why:
            logger.warning("%s gets no requests: %s", watched.url, why)
        watched.refused = why
        places = rank_addresses(watched.url, described.ranks) if not why else []
        if watched.places != places:
            self._forget(watched)
            watched.places = places
            if places:
                logger.info("%s takes requests; %s", watched.url, self._numbers())
        watched.instance = described.registered.instance
        for address in places:
            self._replicas[address.replica_id] = address
            self._tell(msgspec.structs.replace(described.registered, replica_id=address.replica_id))
        self._report_loads(watched)
        if in_pair and described.paths is not None and places:
            node = described.paths.node
            there = [
                one.links
                for one in self._watched.values()
                if one.places and (its := one.description) and its.paths and its.paths.node == node
            ]
            if (queue := nic_queue_event(node, there)) is not None:
                self._tell(queue)

    def _report_loads(self, watched: MonitoredEngine) -> None:
        key = self._names.key
        loads, watched.loads = watched.loads, []
        for address, load in zip(watched.places, loads, strict=False):
            programs = tuple(
                ResidentKv(*found, one.tokens, one.context_tokens, one.idle_s, one.steps_left)
                for one in load.programs
                if (found := key(one.program_id)) is not None
            )
            self._tell(
                KvReported(
                    replica_id=address.replica_id,
                    instance=watched.instance,
                    programs=programs,
                    waiting=tuple(found for name in load.waiting if (found := key(name)) is not None),
                    complete=load.complete,
                    requests=load.requests,
                    request_tokens=load.request_tokens,
                    age_s=self._clock() - watched.asked_s,
                )
            )

    def _why_refused(self, watched: MonitoredEngine, described: EngineDescription) -> str:
        """Return why an engine of a role is not accepted. May change the served kind."""
        assert watched.role is not None
        if described.unfit or described.kind is None or described.paths is None:
            return described.unfit or "it reports no KV paths; expected an engine started with --role"
        if (role := described.paths.role) is not watched.role:
            return f"it is a {role.value} engine; expected a {watched.role.value} engine, as listed"
        there = [
            (found.kind, one.role)
            for one in self._watched.values()
            if (found := one.description) and found.kind and found.paths and found.paths.role is one.role
        ]
        self._kind = dominant_kind(there, self._kind)
        return incompatibility(described.kind, self._kind) if self._kind is not None else ""

    def _gone(self, watched: MonitoredEngine, why: str) -> None:
        """Report an engine as gone, if one was there, and log the loss."""
        if watched.description is None:
            return
        self._forget(watched)
        logger.warning("%s is gone (%s); %s", watched.url, why, self._numbers())
        watched.description, watched.refused, watched.links = None, "", {}
        watched.polls = watched.errors = 0
        watched.lives += 1

    def _numbers(self) -> str:
        """Return the number of engines that take requests, in words, by role if they have one."""
        counts: dict[str, int] = {}
        for one in self._watched.values():
            name = f"{one.role.value} engines" if one.role is not None else "engines"
            counts[name] = counts.get(name, 0) + bool(one.places)
        return ", ".join(f"{name}: {number}" for name, number in counts.items())

    def _forget(self, watched: MonitoredEngine) -> None:
        """Report an engine's replicas as gone, and remove their addresses."""
        for address in watched.places:
            self._replicas.pop(address.replica_id, None)
            self._tell(ReplicaGone(address.replica_id, watched.instance))
        watched.places = []


_NOTHING = EngineReply(404, b"", "")
