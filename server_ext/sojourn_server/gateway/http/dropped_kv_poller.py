"""Finds programs whose KV the engines have dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ...routing.routing_events import KvDropped
from .multi_engine_queries import EngineQueries
from .program_id_mapper import ProgramIdMapper
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import RoutingBackend

DROPPED_KV_POLL_S = 5.0
"""Seconds between two polls of ``DroppedKVPoller``, equal to MORI's control interval."""
MAX_DROPPED_KV_PAGES = 16
"""Maximum number of pages of dropped programs that one poll reads from an engine. A page has up to 5,000
programs. By default, an engine remembers up to 20,000 programs."""


class _DroppedPrograms(msgspec.Struct):
    """An engine's answer to ``/sojourn/v1/dropped``: one page."""

    engines: list[list[str]] = []
    """Ids of programs whose KV is in no tier, for each data-parallel rank."""
    next: int | None = None
    """``skip`` of the next page; ``None``: this is the last page."""


class DroppedKVPoller:
    """Polls engines for programs whose KV they have dropped, and reports these programs to the routing core
    (``KvDropped``). Such a program may use any replica again (MORI §4.3.1)."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        names: ProgramIdMapper,
        queries: EngineQueries,
        speaks: Callable[[ReplicaAddress], bool],
    ) -> None:
        """``speaks`` returns whether an engine runs sojourn. Only such engines have the route that is
        polled."""
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._names = names
        self._queries = queries
        self._speaks = speaks

    async def run(self) -> None:
        """Poll the engines regularly, until cancelled."""
        while True:
            await asyncio.sleep(DROPPED_KV_POLL_S)
            await self.poll_all()

    async def poll_all(self) -> None:
        """Poll each engine that runs sojourn once: all ranks, and up to ``MAX_DROPPED_KV_PAGES`` pages."""
        skips: dict[str | None, int] = {None: 0}
        for _ in range(MAX_DROPPED_KV_PAGES):
            pages = [self._poll_page(url, skip) for url, skip in skips.items()]
            following = [found for page in await asyncio.gather(*pages) for found in page.items()]
            skips = {url: skip for url, skip in following if skip is not None}
            if not skips:
                break

    async def _poll_page(self, url: str | None, skip: int) -> dict[str, int | None]:
        """Poll one page of the engine at ``url``; ``None``: of each engine. Report each listed program to the
        core if its home is the replica that has dropped its KV.

        Return the ``skip`` of the next page for each engine's URL; ``None``: the engine has no further page.
        """

        def is_asked(one: ReplicaAddress) -> bool:
            return url in (None, one.url) and self._speaks(one)

        asked = await self._queries.ask(f"/sojourn/v1/dropped?skip={skip}", None, only=is_asked)
        at = {(one.url, one.rank or 0): one.replica_id for one in self._replicas}
        following: dict[str, int | None] = {}
        for engine, document in asked.documents.items():
            page = _dropped(document)
            following[engine] = page.next if page.next is not None and page.next > skip else None
            for rank, names in enumerate(page.engines):
                for tenant, program_id in filter(None, map(self._names.key, names)):
                    replica_id = at.get((engine, rank))
                    if (
                        replica_id is not None
                        and self._routing_backend.home(tenant, program_id) == replica_id
                    ):
                        self._routing_backend.tell(KvDropped(program_id, tenant, replica_id))
        return following


def _dropped(document: dict[str, Any]) -> _DroppedPrograms:
    """Return the page of dropped programs in an engine's answer. It is empty if the answer cannot be read."""
    try:
        return msgspec.convert(document, _DroppedPrograms)
    except msgspec.ValidationError:
        return _DroppedPrograms()
