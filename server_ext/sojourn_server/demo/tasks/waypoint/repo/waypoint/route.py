"""The cheapest route between two places."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from .roads import Map, Road


class NoRoute(LookupError):
    """There is no way from one place to the other."""


@dataclass(frozen=True)
class Route:
    """Roads in driving order, and their total weight."""

    roads: tuple[Road, ...]
    weight: float

    @property
    def places(self) -> list[str]:
        """Where the route leads, first place to last."""
        if not self.roads:
            return []
        return [self.roads[0].start, *(road.end for road in self.roads)]


def shortest(roads: Map, start: str, end: str, weight: Callable[[Road], float] | None = None) -> Route:
    """The route of least weight (kilometres by default). Raises ``NoRoute``."""
    weigh = weight or (lambda road: road.km)
    for place in (start, end):
        if place not in roads:
            raise NoRoute(f"{place} is not on the map")
    arrived: dict[str, Road] = {}
    best = {start: 0.0}
    seen = {start}
    queue: list[tuple[float, str]] = [(0.0, start)]
    while queue:
        so_far, place = heapq.heappop(queue)
        if place == end:
            return Route(_trace(arrived, start, end), so_far)
        for road in roads.leaving(place):
            total = so_far + weigh(road)
            if road.end in seen:
                continue
            seen.add(road.end)
            best[road.end] = total
            arrived[road.end] = road
            heapq.heappush(queue, (total, road.end))
    raise NoRoute(f"no open road leads from {start} to {end}")


def _trace(arrived: dict[str, Road], start: str, end: str) -> tuple[Road, ...]:
    roads = []
    place = end
    while place != start:
        road = arrived[place]
        roads.append(road)
        place = road.start
    return tuple(reversed(roads))
