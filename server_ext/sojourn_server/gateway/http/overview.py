"""Questions about all replicas at once: each engine is asked, and what they say is put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from ...web import answers
from .replicas import Address, Replicas

TIMEOUT_S = 15.0
FOR_THE_OTHERS_S = 0.5
"""Where an answer like any other's is enough, so long the others are waited for once one is there: whoever
asks what is spoken here gives up after one or two seconds."""


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

    async def ask(
        self, path: str, authorization: str | None, *, others_s: float | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """What each engine answers to a GET, by its address, and the addresses of those that do not.

        ``others_s``: with one answer there, the rest is waited for so long; ``None``: as long as the first.
        """
        engines = self._replicas.engines()
        asked = {e.url: asyncio.ensure_future(self._get(e, path, authorization)) for e in engines}
        await _wait(set(asked.values()), others_s)
        answered = {
            url: answer
            for url, task in asked.items()
            if task.done() and not task.cancelled() and (answer := task.result()) is not None
        }
        return answered, [url for url in asked if url not in answered]

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """As one engine's, so that a client need not know that there are several. Empty where none speaks
        sojourn."""
        found, silent = await self.ask("/sojourn/v1/capabilities", authorization, others_s=FOR_THE_OTHERS_S)
        # Something before an engine may answer 200 to anything.
        ours = {url: told for url, told in found.items() if told.get("name") == "sojourn"}
        if not ours:
            return {}
        merged = answers.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # Of one engine; what matters of a fleet is how many there are of each.
            roles = Counter(str(paths.get("role")) for paths in map(_paths, ours.values()) if paths)
            merged["pairs"] = dict(sorted(roles.items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent += [url for url in found if url not in ours]
        return {**merged, "engines": engines, "gateway": True, "silent": silent}

    async def graphs(self, authorization: str | None) -> dict[str, Any]:
        """Every graph that an engine knows."""
        found, silent = await self.ask("/sojourn/v1/graphs", authorization)
        return {**(answers.merge_graphs(list(found.values())) if found else {"graphs": []}), "silent": silent}

    async def first(self, path: str, authorization: str | None) -> tuple[int, bytes] | None:
        """The first good answer of any engine, in their order; ``None``: there is none."""
        for engine in self._replicas.engines():
            found = await self._get_raw(engine, path, authorization)
            if found is not None and found[0] == 200:
                return found
        return None

    async def one(self, replica_id: str, path: str, authorization: str | None) -> tuple[int, bytes] | None:
        """A replica's answer as it is; ``None``: it gives none."""
        address = self._replicas.get(replica_id)
        return await self._get_raw(address, path, authorization) if address is not None else None

    async def _get(self, engine: Address, path: str, authorization: str | None) -> dict[str, Any] | None:
        found = await self._get_raw(engine, path, authorization)
        if found is None or found[0] != 200:
            return None
        try:
            document = msgspec.json.decode(found[1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    async def _get_raw(
        self, engine: Address, path: str, authorization: str | None
    ) -> tuple[int, bytes] | None:
        shown = f"Bearer {self._engine_key}" if self._engine_key is not None else authorization
        try:
            async with self._session().get(
                engine.url + path,
                headers={"Authorization": shown} if shown is not None else {},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None


def _paths(told: dict[str, Any]) -> dict[str, Any]:
    paths = told.get("paths")
    return paths if isinstance(paths, dict) else {}


async def _wait(asked: set[asyncio.Future[dict[str, Any] | None]], others_s: float | None) -> None:
    """For all, or with ``others_s`` until so long after the first good answer; what is left is given up."""
    try:
        until_s, left = None, asked
        now = asyncio.get_running_loop().time
        while left:
            timeout_s = None if until_s is None else max(0.0, until_s - now())
            done, left = await asyncio.wait(left, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if others_s is not None and until_s is None and any(task.result() is not None for task in done):
                until_s = now() + others_s
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
