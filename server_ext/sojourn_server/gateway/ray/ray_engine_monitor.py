"""The engine monitor of a gateway with a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...routing import routing_events
from ..http.engine_monitor import EngineDescription
from .coordinated_routing_backend import CoordinatedRoutingBackend


class RayEngineMonitor:
    """Probes replicas for the coordinator, and returns the descriptions that it reported."""

    def __init__(
        self, routing_backend: CoordinatedRoutingBackend, lives: Callable[[str], Awaitable[bool]]
    ) -> None:
        """``lives``: whether an engine at this URL answers."""
        self._routing_backend = routing_backend
        self._lives = lives
        self._tasks: set[asyncio.Task[None]] = set()

    def probe(self, told: routing_events.ProbeReplica) -> None:
        """Check now whether a replica is alive."""
        task = asyncio.ensure_future(self._probe(told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, told: routing_events.ProbeReplica) -> None:
        place = self._routing_backend.place(told.replica_id)
        if place is not None:
            alive = await self._lives(place.url)
            self._routing_backend.probed(told.replica_id, told.instance, alive)

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """The last description of a replica's engine."""
        place = self._routing_backend.place(replica_id)
        return place.description if place is not None else None

    def missing(self) -> list[str]:
        """Empty: no addresses are configured."""
        return []

    def refused(self) -> dict[str, str]:
        """Empty: all engines are of one deployment."""
        return {}
