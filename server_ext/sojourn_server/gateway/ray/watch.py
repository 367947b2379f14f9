"""A gateway's eyes where a coordinator decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..core import facts
from ..http.watch import Description
from .decider import RayDecider


class RayWatch:
    """Looks at replicas for the coordinator, and knows what their engines told of themselves."""

    def __init__(self, decider: RayDecider, lives: Callable[[str], Awaitable[bool]]) -> None:
        """``lives``: whether an engine at this URL answers."""
        self._decider = decider
        self._lives = lives
        self._tasks: set[asyncio.Task[None]] = set()

    def probe(self, told: facts.Probe) -> None:
        """Somebody doubts that a replica lives: look now."""
        task = asyncio.ensure_future(self._probe(told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, told: facts.Probe) -> None:
        place = self._decider.place(told.replica_id)
        if place is not None:
            alive = await self._lives(place.url)
            self._decider.probed(told.replica_id, told.instance, alive)

    def describes(self, replica_id: str) -> Description | None:
        """What the engine of a replica last told."""
        place = self._decider.place(replica_id)
        return place.description if place is not None else None

    def missing(self) -> list[str]:
        """No engine is named by hand here, so none is missed."""
        return []

    def refused(self) -> dict[str, str]:
        """None: they are all of one deployment."""
        return {}
