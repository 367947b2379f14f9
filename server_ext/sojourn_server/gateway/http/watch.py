"""Looking after engines: whether they are there, what they can hold, and whether they are still the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec
from sojourn.wire import CAPABILITIES_PATH

from ...metrics.vllm_page import CachePool, cache_pools, started, whole
from ..core import facts
from .decider import Decider
from .replicas import Address, Replicas, addresses

logger = logging.getLogger(__name__)

POLL_S = 2.0
ANSWER_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 10.0
"""A replica that is slow but alive must be believed for so long."""
MOST_PROBES_LOST = 3
MOST_ILL = 2
MOST_LOOKS = 3
"""After so many an engine is taken as it describes itself, though not all of it was answered."""
DESCRIBE_EVERY = 15
"""Polls between two looks at what an engine can hold."""
_GONE = {
    "refused": "its connections are refused, or it says that it is not well",
    "silent": "it does not answer",
}
"""In the log, why."""
UNKNOWN_CAPACITY_TOKENS = 1 << 20
"""Of an engine that tells no size: enough for loads to be told apart by requests, and nothing else."""


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine tells of itself; of each of its ranks."""

    ranks: int
    instance: str
    capacity_tokens: int
    host_tokens: int
    max_running: int
    max_context_tokens: int
    shares_disk: bool
    speaks_sojourn: bool
    model: str = ""
    """The first name under which it serves one; empty: not told."""
    pair_role: str = ""
    """What it does of requests, where it was started as one of a pair."""

    def seen_as(self, replica_id: str) -> facts.ReplicaSeen:
        """The fact that one of its ranks is there."""
        return facts.ReplicaSeen(
            replica_id,
            self.instance,
            self.capacity_tokens,
            host_tokens=self.host_tokens,
            max_running=self.max_running,
            max_context_tokens=self.max_context_tokens,
        )


@dataclass(slots=True)
class Watched:
    """One address, and what is there."""

    url: str
    description: Description | None = None
    polls: int = 0
    ill: int = 0
    """Health checks in a row that were answered with an error."""
    looks: int = 0
    """Descriptions in a row that were not whole."""
    answered: frozenset[str] = frozenset()
    """Parts of its description that it told: of one that is known all of them are told each time."""
    noted: bool = False
    """It has been said in the log that nobody is there, or that a key is missing."""
    probes_lost: int = 0
    life: int = 0
    """Counted up each time it was gone: an engine that tells no start is another one afterwards."""
    places: list[Address] = field(default_factory=list)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineWatch(Protocol):
    """What a gateway asks whoever looks after its engines."""

    def probe(self, told: facts.Probe) -> None:
        """Somebody doubts that a replica lives: look now."""
        ...

    def describes(self, replica_id: str) -> Description | None:
        """What the engine of a replica last told."""
        ...

    def missing(self) -> list[str]:
        """Addresses at which no engine answers."""
        ...

    def refused(self) -> Mapping[str, str]:
        """Addresses of engines that answer and are sent nothing, with what is wrong with them."""
        ...


class Watch:
    """Tells a decider of the engines at some addresses."""

    def __init__(
        self,
        urls: Iterable[str],
        decider: Decider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._watched = {url: Watched(url) for url in urls}
        self._decider = decider
        self._replicas = replicas
        self._session = session
        self._headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}
        self._poll_s = poll_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look after all of them, until cancelled."""
        await asyncio.gather(*(self._look_after(watched) for watched in self._watched.values()))

    async def look(self) -> None:
        """Once at each."""
        await asyncio.gather(*(self._check(watched) for watched in self._watched.values()))

    def probe(self, told: facts.Probe) -> None:
        """Somebody doubts that a replica lives: look now."""
        address = self._replicas.get(told.replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        if watched is None:
            # Of an earlier life of this gateway: its engine has not been seen in this one, or is not named.
            self._decider.tell(facts.ReplicaGone(told.replica_id, told.instance, "not seen"))
        else:
            task = asyncio.ensure_future(self._probe(watched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def describes(self, replica_id: str) -> Description | None:
        """What the engine of a replica last told."""
        address = self._replicas.get(replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        return watched.description if watched is not None else None

    def missing(self) -> list[str]:
        """Addresses at which no engine answers."""
        return [watched.url for watched in self._watched.values() if watched.description is None]

    def refused(self) -> Mapping[str, str]:
        """None: an engine that tells nothing of itself serves as well."""
        return {}

    async def _look_after(self, watched: Watched) -> None:
        if watched.polls:  # ``look`` came first
            await asyncio.sleep(self._poll_s)
        while True:
            try:
                await self._check(watched)
            except Exception:
                logger.exception("looking after %s failed; please report this", watched.url)
            await asyncio.sleep(self._poll_s)

    async def _check(self, watched: Watched) -> None:
        async with watched.checking:
            alive = await self._lives(watched, ANSWER_TIMEOUT_S)
            if alive is None:
                return  # no answer yet: the core notices its silence and has it probed
            if not alive:
                self._gone(watched, "refused")
                if not watched.noted:
                    logger.warning("no engine answers at %s yet", watched.url)
                    watched.noted = True
                return
            watched.probes_lost = 0
            if watched.description is None or watched.polls % DESCRIBE_EVERY == 0:
                described = await self._describe(watched)
                if described is not None:
                    self._described(watched, described)
            watched.polls += 1
            await self._ask_more(watched)
            self._seen(watched)

    async def _probe(self, watched: Watched) -> None:
        async with watched.checking:
            alive = await self._lives(watched, PROBE_TIMEOUT_S)
            if alive:
                watched.probes_lost = 0
                # It may be another one by now, under the same address.
                described = await self._describe(watched)
                if described is not None:
                    self._described(watched, described)
                self._seen(watched)
                return
            watched.probes_lost += 1
            if alive is False or watched.probes_lost >= MOST_PROBES_LOST:
                self._gone(watched, "refused" if alive is False else "silent")

    async def _ask_more(self, watched: Watched) -> None:
        """What is asked of an engine that lives, each time."""

    async def _lives(self, watched: Watched, timeout_s: float) -> bool | None:
        """``None``: it does not say. A connection that is refused says no, and so do two errors in a row."""
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
                    return None  # somebody between us and it
                watched.ill += 1
                return False if watched.ill >= MOST_ILL else None
        except aiohttp.ClientConnectorError as error:
            # Nobody listens there. A name that cannot be resolved, or no route, may be our own trouble.
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def _describe(self, watched: Watched) -> Description | None:
        """``None``: not now. An engine that is known is never described anew by half an answer: what is
        missing would look like another engine."""
        paths = (CAPABILITIES_PATH, "/metrics", "/v1/models")
        found = await asyncio.gather(*(self._text(watched.url + path) for path in paths))
        statuses = {status for status, _ in found}
        if 401 in statuses and not watched.noted:
            logger.warning("%s asks for a key: without --engine-key little is known of it", watched.url)
            watched.noted = True
        answered = {path for path, (status, _) in zip(paths, found, strict=True) if status == 200}
        fewer = watched.description is not None and not answered >= watched.answered
        if 0 in statuses or fewer:
            watched.looks += 1
            if watched.description is not None or watched.looks < MOST_LOOKS:
                return None
        watched.looks, watched.answered = 0, frozenset(answered)
        capabilities, metrics, models = (text for _, text in found)
        return self._read(table(capabilities), metrics, table(models), watched.life)

    def _read(
        self, capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
    ) -> Description:
        return describe(capabilities, metrics, models, life)

    async def _text(self, url: str) -> tuple[int, str]:
        """Status and text of an answer; 0: there was none, or the engine was not up to it."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        try:
            async with self._session().get(url, headers=self._headers, timeout=timeout) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return 200, text
                return (0 if answer.status >= 500 else answer.status), ""
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, UnicodeDecodeError):
            return 0, ""

    def _described(self, watched: Watched, described: Description) -> None:
        known = watched.description
        if known is not None and known.instance != described.instance:
            logger.warning("%s was started anew: nothing that it held is left", watched.url)
        if known is None:
            self._say_up(watched.url, described)
        if known is None or known.ranks != described.ranks:
            self._forget(watched, "described_anew")
            watched.places = addresses(watched.url, described.ranks)
        watched.description = described
        watched.noted = False

    def _say_up(self, url: str, described: Description) -> None:
        logger.info(
            "%s is up: KV for %d tokens on the device, %d in host memory",
            url,
            described.capacity_tokens,
            described.host_tokens,
        )
        if described.pair_role:
            logger.warning(
                "%s is a %s engine of a pair, and is sent requests as any other: there clients could name KV "
                "of others. Start the gateway with --prefill and --decode, or the engine without --role",
                url,
                described.pair_role,
            )

    def _seen(self, watched: Watched) -> None:
        told = watched.description
        if told is None:
            return
        for address in watched.places:
            self._replicas.add(address)
            self._decider.tell(told.seen_as(address.replica_id))

    def _gone(self, watched: Watched, reason: str) -> None:
        if watched.description is None:
            return
        why = _GONE.get(reason, reason)
        logger.warning("%s is gone (%s); %s", watched.url, why, self._without(watched))
        self._forget(watched, reason)
        watched.description = None
        watched.life += 1
        watched.polls = watched.probes_lost = 0

    def _without(self, watched: Watched) -> str:
        """What comes of its being gone."""
        nobody = all(other is watched or other.description is None for other in self._watched.values())
        return "no engine is left, requests wait for one" if nobody else "its programs go on elsewhere"

    def _forget(self, watched: Watched, reason: str) -> None:
        told = watched.description
        for address in watched.places:
            self._replicas.remove(address.replica_id)
            if told is not None:
                self._decider.tell(facts.ReplicaGone(address.replica_id, told.instance, reason))
        watched.places = []


def describe(
    capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
) -> Description:
    """What can be learnt of an engine: of one with sojourn everything, of plain vLLM the size of its KV."""
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
    return Description(
        ranks=ranks,
        # An engine that tells no start is known to be another one only by having been gone.
        instance=started(metrics) or f"life {life}",
        # vLLM keeps one block for itself.
        capacity_tokens=(blocks - 1) * block_size if blocks > 1 else UNKNOWN_CAPACITY_TOKENS,
        host_tokens=host_blocks * block_size,
        max_running=whole(engine.get("max_num_seqs")) or 0,
        max_context_tokens=whole(served.get("max_model_len")) or 0,
        shares_disk=isinstance(disk, dict) and disk.get("shared") is True,
        speaks_sojourn=capabilities.get("name") == "sojourn",
        model=name if isinstance(name := served.get("id"), str) else "",
        # Another program's text, which goes into the log.
        pair_role=role if role in ("prefill", "decode") else "",
    )


def table(text: str) -> dict[str, Any]:
    """A JSON object; of anything else an empty one."""
    try:
        found = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
