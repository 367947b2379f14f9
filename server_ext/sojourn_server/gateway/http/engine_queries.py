"""Queries to all engines at once, with their answers merged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ...api import response_merging
from .replica_addresses import ReplicaAddress, ReplicaAddresses

QUERY_TIMEOUT_S = 15.0
STRAGGLER_WAIT_S = 0.5
"""Where one answer is enough, the others are awaited this long after it: clients of these routes give up
after one or two seconds."""


class EngineReply(NamedTuple):
    """An engine's answer, unchanged."""

    status: int
    body: bytes
    media_type: str

    @property
    def document(self) -> dict[str, Any] | None:
        """The JSON object of a successful answer, if it is one."""
        if self.status != 200:
            return None
        try:
            document = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return document if isinstance(document, dict) else None


class EngineReplies(NamedTuple):
    """Engines' answers, by address."""

    documents: dict[str, dict[str, Any]]
    stock: list[str]
    """Engines without this route: they run without sojourn."""
    silent: list[str]
    """Engines that gave no usable answer."""


class EngineQueries:
    """Queries engines. One that does not answer is left out, and named."""

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
        self, path: str, authorization: str | None, *, others_s: float | None = None
    ) -> EngineReplies:
        """Each engine's answer to a GET.

        ``others_s``: how long the rest is awaited after the first answer; ``None``: as long as the first.
        """
        engines = self._replicas.engines()
        asked = {e.url: asyncio.ensure_future(self._get(e, path, authorization)) for e in engines}
        await _gather_replies(set(asked.values()), others_s)
        told = EngineReplies({}, [], [])
        for url, task in asked.items():
            answer = task.result() if task.done() and not task.cancelled() else None
            if answer is not None and (document := answer.document) is not None:
                told.documents[url] = document
            else:
                is_stock = answer is not None and answer.status == 404
                (told.stock if is_stock else told.silent).append(url)
        return told

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """Capabilities in the format of one engine, so that clients see one. Empty if no engine has
        sojourn."""
        found = await self.ask("/sojourn/v1/capabilities", authorization, others_s=STRAGGLER_WAIT_S)
        # A proxy in front of an engine may answer 200 to anything.
        ours = {url: told for url, told in found.documents.items() if told.get("name") == "sojourn"}
        if not ours:
            return {}
        merged = response_merging.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # These belong to one engine; a fleet reports how many there are of each.
            roles = Counter(str(paths.get("role")) for paths in map(_paths, ours.values()) if paths)
            merged["pairs"] = dict(sorted(roles.items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent = [*found.silent, *(url for url in found.documents if url not in ours)]
        return {**merged, "engines": engines, "gateway": True, "stock": found.stock, "silent": silent}

    async def graphs(self, authorization: str | None) -> dict[str, Any]:
        """All graphs that engines know."""
        found = await self.ask("/sojourn/v1/graphs", authorization)
        graphs = (
            response_merging.merge_graphs(list(found.documents.values()))
            if found.documents
            else {"graphs": []}
        )
        return {**graphs, "stock": found.stock, "silent": found.silent}

    async def first(self, path: str, authorization: str | None) -> EngineReply | None:
        """The first successful answer, in the order of engines; ``None``: there is none."""
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
        """One replica's answer, unchanged; ``None``: it gives none. ``headers`` are sent to it as well."""
        address = self._replicas.get(replica_id)
        return await self._get(address, path, authorization, headers) if address is not None else None

    async def _get(
        self,
        engine: ReplicaAddress,
        path: str,
        authorization: str | None,
        headers: Mapping[str, str] | None = None,
    ) -> EngineReply | None:
        shown = f"Bearer {self._engine_key}" if self._engine_key is not None else authorization
        try:
            async with self._session().get(
                engine.url + path,
                headers={**(headers or {}), **({"Authorization": shown} if shown is not None else {})},
                timeout=aiohttp.ClientTimeout(total=QUERY_TIMEOUT_S),
            ) as answer:
                return EngineReply(answer.status, await answer.read(), answer.content_type)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None


def _paths(told: dict[str, Any]) -> dict[str, Any]:
    paths = told.get("paths")
    return paths if isinstance(paths, dict) else {}


async def _gather_replies(asked: set[asyncio.Future[EngineReply | None]], others_s: float | None) -> None:
    """Wait for all, or with ``others_s`` until that long after the first success; cancel the rest."""
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
