"""Queries all engines at once and merges their answers; finds programs whose KV the engines have dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ...api import response_merging
from ...policies.placement.placement_views import Tier
from ...routing.routing_events import KvDropped
from .engine_client import EngineReply, ask_engine, bearer
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import RoutingBackend

QUERY_TIMEOUT_S = 15.0
RESIDENCY_POLL_S = 5.0
"""Interval of ``ResidencyTracker``'s polls, equal to MORI's control interval."""
MAX_PROGRAMS_PER_POLL = 1000
STRAGGLER_WAIT_S = 0.5
"""Seconds to wait for further answers after the first success, for routes that need only one answer. Their
clients give up after one or two seconds."""


class EngineReplies(NamedTuple):
    """Answers of engines, by address."""

    documents: dict[str, dict[str, Any]]
    stock: list[str]
    """Addresses of engines without this route: they run without sojourn."""
    silent: list[str]
    """Addresses of engines that gave no usable answer."""


class EngineQueries:
    """Queries engines. Results from several engines name those that did not answer.

    ``authorization`` is the client's header. Engines get it unless the gateway has a key of its own for them.
    """

    def __init__(
        self,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._engine_key = engine_key

    async def ask(
        self,
        path: str,
        authorization: str | None,
        *,
        others_s: float | None = None,
        of: Callable[[ReplicaAddress], bool] = lambda engine: True,
    ) -> EngineReplies:
        """Send a GET to the engines for which ``of`` is true, and return their answers.

        ``others_s``: how long to wait for the other engines after the first success; ``None``: until all have
        answered.
        """
        engines = [engine for engine in self._replicas.engines() if of(engine)]
        asked = {e.url: asyncio.ensure_future(self._get(e, path, authorization)) for e in engines}
        await _gather_replies(set(asked.values()), others_s)
        replies = EngineReplies({}, [], [])
        for url, task in asked.items():
            answer = task.result() if task.done() and not task.cancelled() else None
            if answer is not None and (document := answer.document) is not None:
                replies.documents[url] = document
            else:
                is_stock = answer is not None and answer.status == 404
                (replies.stock if is_stock else replies.silent).append(url)
        return replies

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """Capabilities of all engines, merged into one document of the format that an engine returns, so that
        clients see a single server. Empty if no engine runs sojourn."""
        found = await self.ask("/sojourn/v1/capabilities", authorization, others_s=STRAGGLER_WAIT_S)
        # A proxy in front of an engine may answer 200 to anything.
        ours = {url: one for url, one in found.documents.items() if one.get("name") == "sojourn"}
        if not ours:
            return {}
        merged = response_merging.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # ``paths`` describes one engine; for a fleet, ``pairs`` counts the engines of each role.
            roles = Counter(str(paths.get("role")) for paths in map(_paths, ours.values()) if paths)
            merged["pairs"] = dict(sorted(roles.items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent = [*found.silent, *(url for url in found.documents if url not in ours)]
        return {**merged, "engines": engines, "gateway": True, "stock": found.stock, "silent": silent}

    async def graphs(self, authorization: str | None) -> dict[str, Any]:
        """All graphs that the engines know."""
        found = await self.ask("/sojourn/v1/graphs", authorization)
        graphs = (
            response_merging.merge_graphs(list(found.documents.values()))
            if found.documents
            else {"graphs": []}
        )
        return {**graphs, "stock": found.stock, "silent": found.silent}

    async def first(self, path: str, authorization: str | None) -> EngineReply | None:
        """The first successful answer, in the order of the engines; ``None``: there is none."""
        for engine in self._replicas.engines():
            found = await self._get(engine, path, authorization)
            if found is not None and found.status == 200:
                return found
        return None

    async def one(
        self,
        replica_id: str,
        path: str,
        authorization: str | None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> EngineReply | None:
        """The answer of one replica, unchanged; ``None``: the replica is unknown or does not answer.
        ``headers`` are added to the query."""
        address = self._replicas.get(replica_id)
        return await self._get(address, path, authorization, headers) if address is not None else None

    async def _get(
        self,
        engine: ReplicaAddress,
        path: str,
        authorization: str | None,
        headers: Mapping[str, str] | None = None,
    ) -> EngineReply | None:
        return await ask_engine(
            self._session(),
            engine.url + path,
            authorization=bearer(self._engine_key, authorization),
            headers=headers,
            timeout_s=QUERY_TIMEOUT_S,
        )


class _PlacedProgram(msgspec.Struct):
    program_id: str
    placed: str | None = None


class _PlacedPrograms(msgspec.Struct):
    programs: list[_PlacedProgram]


class ResidencyTracker:
    """Polls engines for programs whose KV they have dropped. Such a program may use any replica again (MORI
    §4.3.1)."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        names: ProgramIdMapper,
        queries: EngineQueries,
        speaks: Callable[[ReplicaAddress], bool],
    ) -> None:
        """``speaks``: whether an engine has the route that is polled."""
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._names = names
        self._queries = queries
        self._speaks = speaks

    async def run(self) -> None:
        """Poll the engines regularly, until cancelled."""
        while True:
            await asyncio.sleep(RESIDENCY_POLL_S)
            await self.poll_all()

    async def poll_all(self) -> None:
        """Poll each engine once."""
        # Skip engines with several ranks: an answer does not tell which rank has a program.
        path = f"/sojourn/v1/programs?limit={MAX_PROGRAMS_PER_POLL}"
        asked = await self._queries.ask(path, None, of=lambda one: one.rank is None and self._speaks(one))
        at = {one.url: one.replica_id for one in self._replicas}
        for url, document in asked.documents.items():
            for tenant, program_id in filter(None, map(self._names.key, _dropped(document))):
                replica_id = at.get(url)
                if replica_id is not None and self._routing_backend.home(tenant, program_id) == replica_id:
                    self._routing_backend.tell(KvDropped(program_id, tenant, replica_id))


def _dropped(document: dict[str, Any]) -> list[str]:
    try:
        placed = msgspec.convert(document, _PlacedPrograms)
    except msgspec.ValidationError:
        return []
    return [program.program_id for program in placed.programs if program.placed == Tier.WAITING.value]


def _paths(capabilities: dict[str, Any]) -> dict[str, Any]:
    paths = capabilities.get("paths")
    return paths if isinstance(paths, dict) else {}


async def _gather_replies(asked: set[asyncio.Future[EngineReply | None]], others_s: float | None) -> None:
    """Wait for all replies. With ``others_s``, wait only that many seconds after the first success. Then
    cancel the rest."""
    try:
        until_s, left = None, asked
        now = asyncio.get_running_loop().time
        while left:
            timeout_s = None if until_s is None else max(0.0, until_s - now())
            done, left = await asyncio.wait(left, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if (
                others_s is not None
                and until_s is None
                and any(
                    (answer := task.result()) is not None and answer.document is not None for task in done
                )
            ):
                until_s = now() + others_s
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
