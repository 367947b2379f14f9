"""Polls engines: whether they are alive, what they can hold, and whether they were restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec
from sojourn.wire import CAPABILITIES_PATH

from ...metrics.vllm_metrics_page import CachePool, cache_pools, process_start_time, whole
from ...routing import routing_events
from .replica_addresses import ReplicaAddress, ReplicaAddresses, rank_addresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)

POLL_S = 2.0
ANSWER_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 10.0
"""A slow but living replica has to answer within this time."""
MAX_LOST_PROBES = 3
MAX_ERROR_POLLS = 2
MAX_PARTIAL_DESCRIPTIONS = 3
"""Incomplete descriptions before an engine is accepted with what it reported."""
DESCRIBE_EVERY_POLLS = 15
"""Polls between two descriptions of an engine."""
_LOSS_TEXTS = {
    "refused": "its connections are refused, or it says that it is not well",
    "silent": "it does not answer",
}
"""Log texts, by reason."""
DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Used for an engine that reports no size: loads then compare by requests alone."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine's description of itself; sizes are per rank."""

    ranks: int
    instance: str
    capacity_tokens: int
    host_tokens: int
    max_running: int
    max_context_tokens: int
    shares_disk: bool
    speaks_sojourn: bool
    model: str = ""
    """The first model name that it serves; empty: unknown."""
    pair_role: str = ""
    """Its role, if it was started as one of a pair."""

    def registration_event(self, replica_id: str) -> routing_events.ReplicaRegistered:
        """The registration of one of its ranks."""
        return routing_events.ReplicaRegistered(
            replica_id,
            self.instance,
            self.capacity_tokens,
            host_tokens=self.host_tokens,
            max_running=self.max_running,
            max_context_tokens=self.max_context_tokens,
        )


@dataclass(slots=True)
class MonitoredEngine:
    """One address, and the engine there."""

    url: str
    description: EngineDescription | None = None
    polls: int = 0
    ill: int = 0
    """Consecutive health checks that were answered with an error."""
    looks: int = 0
    """Consecutive incomplete descriptions."""
    answered: frozenset[str] = frozenset()
    """Endpoints that answered in its description: a known engine has to answer all of them again."""
    noted: bool = False
    """The log already reports that no engine answers, or that a key is missing."""
    probes_lost: int = 0
    life: int = 0
    """Number of losses: an engine that reports no start time counts as a new one after each."""
    places: list[ReplicaAddress] = field(default_factory=list)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineMonitorProtocol(Protocol):
    """Monitor of a gateway's engines."""

    def probe(self, told: routing_events.ProbeReplica) -> None:
        """Check now whether a replica is alive."""
        ...

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """The last description of a replica's engine."""
        ...

    def missing(self) -> list[str]:
        """Addresses at which no engine answers."""
        ...

    def refused(self) -> Mapping[str, str]:
        """Addresses of engines that answer and are sent nothing, with the reasons."""
        ...


class EngineMonitor:
    """Registers the engines at given addresses with a routing backend."""

    def __init__(
        self,
        urls: Iterable[str],
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._watched = {url: MonitoredEngine(url) for url in urls}
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._session = session
        self._headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}
        self._poll_s = poll_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Poll all engines, until cancelled."""
        await asyncio.gather(*(self._look_after(watched) for watched in self._watched.values()))

    async def look(self) -> None:
        """Poll all engines once."""
        await asyncio.gather(*(self._check(watched) for watched in self._watched.values()))

    def probe(self, told: routing_events.ProbeReplica) -> None:
        """Check now whether a replica is alive."""
        address = self._replicas.get(told.replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        if watched is None:
            # A replica from a saved state: its engine has not been seen yet, or its address was removed.
            self._routing_backend.tell(routing_events.ReplicaGone(told.replica_id, told.instance, "not seen"))
        else:
            task = asyncio.ensure_future(self._probe(watched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """The last description of a replica's engine."""
        address = self._replicas.get(replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        return watched.description if watched is not None else None

    def missing(self) -> list[str]:
        """Addresses at which no engine answers."""
        return [watched.url for watched in self._watched.values() if watched.description is None]

    def refused(self) -> Mapping[str, str]:
        """Empty: an engine without sojourn is used as well."""
        return {}

    async def _look_after(self, watched: MonitoredEngine) -> None:
        if watched.polls:  # ``look`` has polled it already
            await asyncio.sleep(self._poll_s)
        while True:
            try:
                await self._check(watched)
            except Exception:
                logger.exception("polling %s failed; please report this", watched.url)
            await asyncio.sleep(self._poll_s)

    async def _check(self, watched: MonitoredEngine) -> None:
        async with watched.checking:
            alive = await self._lives(watched, ANSWER_TIMEOUT_S)
            if alive is None:
                return  # no answer yet: the core notices the silence and probes
            if not alive:
                self._gone(watched, "refused")
                if not watched.noted:
                    logger.warning("no engine answers at %s yet", watched.url)
                    watched.noted = True
                return
            watched.probes_lost = 0
            if watched.description is None or watched.polls % DESCRIBE_EVERY_POLLS == 0:
                described = await self._describe(watched)
                if described is not None:
                    self._described(watched, described)
            watched.polls += 1
            await self._ask_more(watched)
            self._seen(watched)

    async def _probe(self, watched: MonitoredEngine) -> None:
        async with watched.checking:
            alive = await self._lives(watched, PROBE_TIMEOUT_S)
            if alive:
                watched.probes_lost = 0
                # It may have been restarted at the same address.
                described = await self._describe(watched)
                if described is not None:
                    self._described(watched, described)
                self._seen(watched)
                return
            watched.probes_lost += 1
            if alive is False or watched.probes_lost >= MAX_LOST_PROBES:
                self._gone(watched, "refused" if alive is False else "silent")

    async def _ask_more(self, watched: MonitoredEngine) -> None:
        """Hook: further questions to a living engine, at each poll."""

    async def _lives(self, watched: MonitoredEngine, timeout_s: float) -> bool | None:
        """``None``: unknown. A refused connection means no, and so do two errors in a row."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session().get(
                f"{watched.url}/health", headers=self._headers, timeout=timeout
            ) as answer:
                await answer.read()
                if answer.status < 300:
                    watched.ill = 0
                    return True
                if answer.status not in (500, 503):
                    return None  # answered by a proxy in between
                watched.ill += 1
                return False if watched.ill >= MAX_ERROR_POLLS else None
        except aiohttp.ClientConnectorError as error:
            # Nothing listens there. A failed name resolution or route may be a local problem.
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def _describe(self, watched: MonitoredEngine) -> EngineDescription | None:
        """``None``: not available now. An incomplete description never replaces that of a known engine: it
        would look like another engine."""
        paths = (CAPABILITIES_PATH, "/metrics", "/v1/models")
        found = await asyncio.gather(*(self._text(watched.url + path) for path in paths))
        statuses = {status for status, _ in found}
        if 401 in statuses and not watched.noted:
            logger.warning("%s asks for a key: without --engine-key its sizes are unknown", watched.url)
            watched.noted = True
        answered = {path for path, (status, _) in zip(paths, found, strict=True) if status == 200}
        fewer = watched.description is not None and not answered >= watched.answered
        if 0 in statuses or fewer:
            watched.looks += 1
            if watched.description is not None or watched.looks < MAX_PARTIAL_DESCRIPTIONS:
                return None
        watched.looks, watched.answered = 0, frozenset(answered)
        capabilities, metrics, models = (text for _, text in found)
        return self._read(parse_json_object(capabilities), metrics, parse_json_object(models), watched.life)

    def _read(
        self, capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
    ) -> EngineDescription:
        return describe_engine(capabilities, metrics, models, life)

    async def _text(self, url: str) -> tuple[int, str]:
        """Status and text of an answer; 0: there was none, or the engine was overloaded."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        try:
            async with self._session().get(url, headers=self._headers, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return 200, text
                return (0 if answer.status >= 500 else answer.status), ""
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, UnicodeDecodeError):
            return 0, ""

    def _described(self, watched: MonitoredEngine, described: EngineDescription) -> None:
        known = watched.description
        if known is not None and known.instance != described.instance:
            logger.warning("%s was restarted: its KV is lost", watched.url)
        if known is None:
            self._log_engine_up(watched.url, described)
        if known is None or known.ranks != described.ranks:
            self._forget(watched, "described_anew")
            watched.places = rank_addresses(watched.url, described.ranks)
        watched.description = described
        watched.noted = False

    def _log_engine_up(self, url: str, described: EngineDescription) -> None:
        logger.info(
            "%s is up: KV for %d tokens on the device, %d in host memory",
            url,
            described.capacity_tokens,
            described.host_tokens,
        )
        if described.pair_role:
            logger.warning(
                "%s is a %s engine of a pair and is sent any request: clients could name KV of others there. "
                "Start the gateway with --prefill and --decode, or the engine without --role",
                url,
                described.pair_role,
            )

    def _seen(self, watched: MonitoredEngine) -> None:
        told = watched.description
        if told is None:
            return
        for address in watched.places:
            self._replicas.add(address)
            self._routing_backend.tell(told.registration_event(address.replica_id))

    def _gone(self, watched: MonitoredEngine, reason: str) -> None:
        if watched.description is None:
            return
        why = _LOSS_TEXTS.get(reason, reason)
        logger.warning("%s is gone (%s); %s", watched.url, why, self._without(watched))
        self._forget(watched, reason)
        watched.description = None
        watched.life += 1
        watched.polls = watched.probes_lost = 0

    def _without(self, watched: MonitoredEngine) -> str:
        """Consequence of its loss, for the log."""
        nobody = all(other is watched or other.description is None for other in self._watched.values())
        return "no engine is left, requests wait for one" if nobody else "its programs go on elsewhere"

    def _forget(self, watched: MonitoredEngine, reason: str) -> None:
        told = watched.description
        for address in watched.places:
            self._replicas.remove(address.replica_id)
            if told is not None:
                self._routing_backend.tell(
                    routing_events.ReplicaGone(address.replica_id, told.instance, reason)
                )
        watched.places = []


def describe_engine(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> EngineDescription:
    """Combines an engine's answers: everything from one with sojourn, the size of the KV from plain vLLM."""
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
        # Without a start time, only a loss tells that an engine is another one.
        instance=process_start_time(metrics) or f"life {life}",
        # vLLM reserves one block.
        capacity_tokens=(blocks - 1) * block_size if blocks > 1 else DEFAULT_CAPACITY_TOKENS,
        host_tokens=host_blocks * block_size,
        max_running=whole(engine.get("max_num_seqs")) or 0,
        max_context_tokens=whole(served.get("max_model_len")) or 0,
        shares_disk=isinstance(disk, dict) and disk.get("shared") is True,
        speaks_sojourn=capabilities.get("name") == "sojourn",
        model=name if isinstance(name := served.get("id"), str) else "",
        # Untrusted text that goes into the log.
        pair_role=role if role in ("prefill", "decode") else "",
    )


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
