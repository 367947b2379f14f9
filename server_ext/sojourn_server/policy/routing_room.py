"""Which replica a program moves into: where there is room for all of it, else it waits (MORI §4.3.1, M7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .replica_views import NOBODY, ReplicaView, Route, RouteView, waits_for_room

SIZES = ("peak", "context")
FITS = ("most-room", "least-room")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomForAll:
    """Home while its KV is there, on the device or below; else the replica with the most room for it.

    ``size_by``: a program counts for the longest context it is expected to have (``peak``), or for the
    present one as MORI prints it, which takes in young programs that then outgrow the replica. ``fit``:
    ``most-room`` first, as MORI says, or the tightest that holds it (``least-room``), which is what best fit
    means elsewhere. A program that no replica could ever hold goes where most room is as soon as nobody is at
    home there. Raises ``ValueError`` for other words.
    """

    size_by: str = "peak"
    fit: str = "most-room"
    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("home", "near_parent", "fits", "returns")

    def __post_init__(self) -> None:
        if self.size_by not in SIZES or self.fit not in FITS:
            raise ValueError(
                f"size_by {self.size_by!r}, fit {self.fit!r}; expected one of {SIZES} and one of {FITS}"
            )

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        if view.home is not None and view.cached:
            return Route(view.home.replica_id, "home")
        size = view.size_tokens if self.size_by == "peak" else view.context_tokens
        near = view.parent_home
        if near is not None and near.takes_new and near.room_tokens >= size:
            return Route(near.replica_id, "near_parent")
        best: ReplicaView | None = None
        most_room = self.fit == "most-room"
        anybody = False
        for replica in replicas:
            if not replica.takes_new:
                continue
            anybody = True
            room = replica.room_tokens
            if room < size and replica.homed:
                continue
            if best is None or (room > best.room_tokens) is most_room:
                best = replica
        if best is None:
            return waits_for_room(size) if anybody else NOBODY
        return Route(best.replica_id, "fits" if view.home is None else "returns")
