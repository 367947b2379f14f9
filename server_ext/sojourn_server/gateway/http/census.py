"""Whose KV engines no longer have: such a program may wait for any replica again (MORI §4.3.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import aiohttp
import msgspec

from ...policy.placement_views import Tier
from ..core import facts
from .decider import Decider
from .engine_names import EngineNames
from .replicas import Address, Replicas

EVERY_S = 5.0
"""MORI's tick."""
MOST_PROGRAMS = 1000
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _Program(msgspec.Struct):
    program_id: str
    placed: str | None = None


class _Programs(msgspec.Struct):
    programs: list[_Program]


_decoder = msgspec.json.Decoder(_Programs)


class Census:
    """Asks engines that place programs in tiers, every few seconds."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        names: EngineNames,
        session: Callable[[], aiohttp.ClientSession],
        speaks: Callable[[Address], bool],
        *,
        engine_key: str | None = None,
    ) -> None:
        """``speaks``: whether an engine can be asked."""
        self._decider = decider
        self._replicas = replicas
        self._names = names
        self._session = session
        self._speaks = speaks
        self._headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Once at each engine."""
        # Of several ranks behind one address an answer does not say which one it is of.
        asked = [one for one in self._replicas if one.rank is None and self._speaks(one)]
        found = await asyncio.gather(*(self._dropped(engine) for engine in asked))
        for engine, dropped in zip(asked, found, strict=True):
            for tenant, program_id in filter(None, map(self._names.key, dropped)):
                if self._decider.home(tenant, program_id) == engine.replica_id:
                    self._decider.tell(facts.KvDropped(program_id, tenant, engine.replica_id))

    async def _dropped(self, engine: Address) -> Iterable[str]:
        url = f"{engine.url}/sojourn/v1/programs?limit={MOST_PROGRAMS}"
        try:
            async with self._session().get(url, headers=self._headers, timeout=_TIMEOUT) as answer:
                if answer.status != 200:
                    return ()
                told = _decoder.decode(await answer.read())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, msgspec.DecodeError):
            return ()
        return [program.program_id for program in told.programs if program.placed == Tier.WAITING.value]
