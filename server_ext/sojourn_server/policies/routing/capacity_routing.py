"""Routing by capacity: a program goes to a replica with free memory for all of its KV, or waits (MORI §4.3.1;
mechanism M7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .replica_views import NO_REPLICA, ReplicaView, RoutingDecision, RoutingView, wait_for_capacity

SIZE_MEASURES = ("peak", "context")
"""Values of ``CapacityRouting.size_by``."""
FIT_RULES = ("most-room", "least-room")
"""Values of ``CapacityRouting.fit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRouting:
    """Routes a program to the replica that has its KV in any tier, or else to a replica with enough free
    memory.

    ``size_by`` defines a program's size: its expected longest context (``peak``), or its present context as
    in MORI (``context``). With ``context``, a replica may accept young programs that later outgrow the
    replica. ``fit`` selects among replicas with enough free memory: the replica with the most free memory, as
    in MORI (``most-room``), or the replica with the least (``least-room``). The parent's replica is preferred
    for a new sub-agent. A replica that is no program's home accepts a program of any size. If no replica
    fits, the program waits. Raises ``ValueError`` for other values of ``size_by`` or ``fit``.
    """

    size_by: str = "peak"
    fit: str = "most-room"
    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("home", "near_parent", "fits", "returns")

    def __post_init__(self) -> None:
        if self.size_by not in SIZE_MEASURES or self.fit not in FIT_RULES:
            raise ValueError(
                f"size_by {self.size_by!r}, fit {self.fit!r}; expected one of {SIZE_MEASURES} "
                f"and one of {FIT_RULES}"
            )

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if view.home is not None and view.cached:
            return RoutingDecision(view.home.replica_id, "home")
        size = view.size_tokens if self.size_by == "peak" else view.context_tokens
        near = view.parent_home
        if near is not None and near.takes_new and near.room_tokens >= size:
            return RoutingDecision(near.replica_id, "near_parent")
        open_ones = [replica for replica in replicas if replica.takes_new]
        # An empty replica admits its first program whatever its size.
        possible = [replica for replica in open_ones if replica.room_tokens >= size or not replica.homed]
        if not possible:
            return wait_for_capacity(size) if open_ones else NO_REPLICA
        sign = 1.0 if self.fit == "most-room" else -1.0
        best = max(possible, key=lambda replica: (replica.room_tokens >= size, sign * replica.room_tokens))
        return RoutingDecision(best.replica_id, "fits" if view.home is None else "returns")
