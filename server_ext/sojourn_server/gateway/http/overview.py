"""Questions about all replicas at once: each engine is asked, and what they say is put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from ...web import answers
from .replicas import Address, Replicas

TIMEOUT_S = 15.0


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

    async def ask(self, path: str, authorization: str | None) -> tuple[dict[str, Any], list[str]]:
        """What each engine answers to a GET, by its address, and the addresses of those that do not."""
        engines = self._replicas.engines()
        found = await asyncio.gather(*(self._get(engine, path, authorization) for engine in engines))
        answered = {e.url: answer for e, answer in zip(engines, found, strict=True) if answer is not None}
        return answered, [engine.url for engine in engines if engine.url not in answered]

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """As one engine's, so that a client need not know that there are several."""
        found, silent = await self.ask("/sojourn/v1/capabilities", authorization)
        if not found:
            return {}
        merged = answers.merge_capabilities(list(found.values()))
        engines = sum(one.get("engines", 1) for one in found.values())
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
        except msgspec.DecodeError:
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
