"""Session affinity with a load bound (SAGA §5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .replica_views import NO_REPLICA, ReplicaView, RoutingDecision, RoutingView


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinityRouting:
    """Routes to the replica with the program's KV. If that replica is overloaded, routes to the least loaded
    replica.

    This is equation 7 of SAGA §5.1. A replica is overloaded if its load is at least ``most_load``. A new
    sub-agent goes to its parent's replica unless that replica is overloaded. A program leaves its replica
    only for a replica whose load is lower by at least ``leaves_for`` (0 in the paper). A move recomputes the
    KV, and gains nothing if all replicas are full. Raises ``ValueError`` for ``most_load`` ≤ 0 or
    ``leaves_for`` < 0.
    """

    most_load: float = 0.8
    leaves_for: float = 0.0
    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = (
        "home", "near_parent", "least_loaded", "home_too_full", "home_all_full",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.most_load > 0:
            raise ValueError(f"most_load is {self.most_load}; expected > 0")
        if not self.leaves_for >= 0:
            raise ValueError(f"leaves_for is {self.leaves_for}; expected ≥ 0")

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        home = view.home if view.cached else None
        if home is not None and home.load < self.most_load:
            return RoutingDecision(home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new and near.load < self.most_load:
            return RoutingDecision(near.replica_id, "near_parent")
        least: ReplicaView | None = None
        for replica in replicas:
            # Equal loads: the replica with fewer resident programs, since programs return from their tools.
            if replica.takes_new and (
                least is None or (replica.load, replica.homed) < (least.load, least.homed)
            ):
                least = replica
        if least is None:
            return RoutingDecision(home.replica_id, "home") if home is not None else NO_REPLICA
        if home is not None and home.load - least.load < self.leaves_for:
            return RoutingDecision(home.replica_id, "home_all_full")
        return RoutingDecision(least.replica_id, "least_loaded" if home is None else "home_too_full")
