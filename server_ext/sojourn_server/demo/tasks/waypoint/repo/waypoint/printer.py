"""Routes for people."""

from __future__ import annotations

from .route import Route


def directions(route: Route) -> str:
    """One line for each road and a last one with the sum."""
    if not route.roads:
        return "You are there."
    lines = []
    for number, road in enumerate(route.roads, start=1):
        toll = f", toll {road.toll:.2f}" if road.toll else ""
        lines.append(f"{number}. {road.start} -> {road.end}: {road.km:g} km{toll}")
    total_km = sum(road.km for road in route.roads)
    total_toll = sum(road.toll for road in route.roads)
    lines.append(f"Total {total_km:g} km, toll {total_toll:.2f}.")
    return "\n".join(lines)
