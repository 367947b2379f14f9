"""Questions about all replicas at once: each engine is asked, and what they say is put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ...web import answers
from .replicas import Address, Replicas

TIMEOUT_S = 15.0
FOR_THE_OTHERS_S = 0.5
"""Where an answer like any other's is enough, so long the others are waited for once one is there: whoever
asks what is spoken here gives up after one or two seconds."""


class Answered(NamedTuple):
    """An engine's answer as it is."""

    status: int
    body: bytes
    media_type: str

    @property
    def document(self) -> dict[str, Any] | None:
        """Of a good answer, if it is one."""
        if self.status != 200:
            return None
        try:
            document = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return document if isinstance(document, dict) else None


class Told(NamedTuple):
    """What engines said, each by its address."""

    documents: dict[str, dict[str, Any]]
    stock: list[str]
    """Who has no such route: an engine without sojourn."""
    silent: list[str]
    """Who does not answer, or with nothing of use."""


class Overview:
    """Asks engines. One that does not answer is left out, and named."""

    def __init__(
        self,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._engine_key = engine_key

    async def ask(self, path: str, authorization: str | None, *, others_s: float | None = None) -> Told:
        """What each engine answers to a GET.

        ``others_s``: with one answer there, the rest is waited for so long; ``None``: as long as the first.
        """
        engines = self._replicas.engines()
        asked = {e.url: asyncio.ensure_future(self._get(e, path, authorization)) for e in engines}
        await _wait(set(asked.values()), others_s)
        told = Told({}, [], [])
        for url, task in asked.items():
            answer = task.result() if task.done() and not task.cancelled() else None
            if answer is not None and (document := answer.document) is not None:
                told.documents[url] = document
            else:
                is_stock = answer is not None and answer.status == 404
                (told.stock if is_stock else told.silent).append(url)
        return told

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """As one engine's, so that a client need not know that there are several. Empty where none speaks
        sojourn."""
        found = await self.ask("/sojourn/v1/capabilities", authorization, others_s=FOR_THE_OTHERS_S)
        # Something before an engine may answer 200 to anything.
        ours = {url: told for url, told in found.documents.items() if told.get("name") == "sojourn"}
        if not ours:
            return {}
        merged = answers.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # Of one engine; what matters of a fleet is how many there are of each.
            roles = Counter(str(paths.get("role")) for paths in map(_paths, ours.values()) if paths)
            merged["pairs"] = dict(sorted(roles.items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent = [*found.silent, *(url for url in found.documents if url not in ours)]
        return {**merged, "engines": engines, "gateway": True, "stock": found.stock, "silent": silent}

    async def graphs(self, authorization: str | None) -> dict[str, Any]:
        """Every graph that an engine knows."""
        found = await self.ask("/sojourn/v1/graphs", authorization)
        graphs = answers.merge_graphs(list(found.documents.values())) if found.documents else {"graphs": []}
        return {**graphs, "stock": found.stock, "silent": found.silent}

    async def first(self, path: str, authorization: str | None) -> Answered | None:
        """The first good answer of any engine, in their order; ``None``: there is none."""
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
    ) -> Answered | None:
        """A replica's answer as it is; ``None``: it gives none. ``headers`` are shown to it as well."""
        address = self._replicas.get(replica_id)
        return await self._get(address, path, authorization, headers) if address is not None else None

    async def _get(
        self,
        engine: Address,
        path: str,
        authorization: str | None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered | None:
        shown = f"Bearer {self._engine_key}" if self._engine_key is not None else authorization
        try:
            async with self._session().get(
                engine.url + path,
                headers={**(headers or {}), **({"Authorization": shown} if shown is not None else {})},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as answer:
                return Answered(answer.status, await answer.read(), answer.content_type)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None


def _paths(told: dict[str, Any]) -> dict[str, Any]:
    paths = told.get("paths")
    return paths if isinstance(paths, dict) else {}


async def _wait(asked: set[asyncio.Future[Answered | None]], others_s: float | None) -> None:
    """For all, or with ``others_s`` until so long after the first good answer; what is left is given up."""
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
