"""Asks engines for their load and the programs whose KV they have, and reports both to the routing core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from ...core.engine_answers import EngineLoad
from ...routing.routing_events import KvReported, ResidentKv
from .engine_descriptions import EngineDescription
from .multi_engine_queries import EngineQueries
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import RoutingBackend

DROPPED_KV_POLL_S = 5.0
"""Seconds between two polls, equal to MORI's control interval."""


class _Loads(msgspec.Struct):
    """An engine's answer to ``/sojourn/v1/load``: one entry for each data-parallel rank."""

    engines: list[EngineLoad]


class DroppedKVPoller:
    """Polls the engines that run sojourn. A program whose KV an engine has dropped may use any replica
    again (MORI §4.3.1). A gateway that has just started learns from the engines where programs have their
    KV."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        names: ProgramIdMapper,
        queries: EngineQueries,
        description_of: Callable[[str], EngineDescription | None],
    ) -> None:
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._names = names
        self._queries = queries
        self._description_of = description_of

    async def run(self) -> None:
        """Poll the engines regularly, until cancelled."""
        while True:
            await asyncio.sleep(DROPPED_KV_POLL_S)
            await self.poll_all()

    async def poll_all(self) -> None:
        """Poll each engine that runs sojourn once."""
        asked_s, key = time.monotonic(), self._names.key
        asked = await self._queries.ask("/sojourn/v1/load", None, only=self._speaks)
        for address in list(self._replicas):
            described = self._description_of(address.replica_id)
            try:
                load = msgspec.convert(asked.documents.get(address.url), _Loads).engines[address.rank or 0]
            except (msgspec.ValidationError, IndexError):
                continue
            if described is None:
                continue
            programs = (
                ResidentKv(*found, one.tokens, one.context_tokens, one.idle_s, one.steps_left)
                for one in load.programs
                if (found := key(one.program_id)) is not None
            )
            self._routing_backend.tell(
                KvReported(
                    replica_id=address.replica_id,
                    instance=described.instance,
                    programs=tuple(programs),
                    waiting=tuple(found for name in load.waiting if (found := key(name)) is not None),
                    complete=load.complete,
                    requests=load.requests,
                    request_tokens=load.request_tokens,
                    age_s=time.monotonic() - asked_s,
                )
            )

    def _speaks(self, address: ReplicaAddress) -> bool:
        described = self._description_of(address.replica_id)
        return described is not None and described.speaks_sojourn
