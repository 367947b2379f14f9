"""Finds programs whose KV their engines have dropped: they may use any replica again (MORI §4.3.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import aiohttp
import msgspec

from ...policies.placement.placement_views import Tier
from ...routing import routing_events
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import RoutingBackend

RESIDENCY_POLL_S = 5.0
"""MORI's tick."""
MAX_PROGRAMS_PER_POLL = 1000
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _PlacedProgram(msgspec.Struct):
    program_id: str
    placed: str | None = None


class _PlacedPrograms(msgspec.Struct):
    programs: list[_PlacedProgram]


_decoder = msgspec.json.Decoder(_PlacedPrograms)


class ResidencyTracker:
    """Polls engines that place programs in tiers."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        names: ProgramIdMapper,
        session: Callable[[], aiohttp.ClientSession],
        speaks: Callable[[ReplicaAddress], bool],
        *,
        engine_key: str | None = None,
    ) -> None:
        """``speaks``: whether an engine has the route."""
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._names = names
        self._session = session
        self._speaks = speaks
        self._headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(RESIDENCY_POLL_S)
            await self.look()

    async def look(self) -> None:
        """Poll each engine once."""
        # With several ranks at one address, an answer does not tell its rank.
        asked = [one for one in self._replicas if one.rank is None and self._speaks(one)]
        found = await asyncio.gather(*(self._dropped(engine) for engine in asked))
        for engine, dropped in zip(asked, found, strict=True):
            for tenant, program_id in filter(None, map(self._names.key, dropped)):
                if self._routing_backend.home(tenant, program_id) == engine.replica_id:
                    self._routing_backend.tell(
                        routing_events.KvDropped(program_id, tenant, engine.replica_id)
                    )

    async def _dropped(self, engine: ReplicaAddress) -> Iterable[str]:
        url = f"{engine.url}/sojourn/v1/programs?limit={MAX_PROGRAMS_PER_POLL}"
        try:
            async with self._session().get(url, headers=self._headers, timeout=_TIMEOUT) as answer:
                if answer.status != 200:
                    return ()
                told = _decoder.decode(await answer.read())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, msgspec.DecodeError):
            return ()
        return [program.program_id for program in told.programs if program.placed == Tier.WAITING.value]
