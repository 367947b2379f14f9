"""The map: places, and roads between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Road:
    """A way from one place to another."""

    start: str
    end: str
    km: float
    toll: float = 0.0

    def cost(self, price_per_km: float) -> float:
        """What driving it costs in money."""
        return self.km * price_per_km + self.toll


class Map:
    """All roads by the place they start from."""

    def __init__(self) -> None:
        self._from: dict[str, list[Road]] = {}
        self._closed: set[tuple[str, str]] = set()

    def add(self, start: str, end: str, km: float, toll: float = 0.0, one_way: bool = False) -> None:
        """Add a road, in both directions unless it is one-way."""
        if km <= 0 or toll < 0:
            raise ValueError(f"{start} to {end}: {km} km and a toll of {toll} make no road")
        self._from.setdefault(start, []).append(Road(start, end, km, toll))
        self._from.setdefault(end, [])
        if not one_way:
            self._from[end].append(Road(end, start, km, toll))

    def close(self, start: str, end: str) -> None:
        """Close a road in one direction."""
        self._closed.add((start, end))

    def leaving(self, place: str) -> Iterator[Road]:
        """Open roads out of ``place``. Raises ``KeyError`` for an unknown place."""
        for road in self._from[place]:
            if (road.start, road.end) not in self._closed:
                yield road

    def __contains__(self, place: str) -> bool:
        return place in self._from
