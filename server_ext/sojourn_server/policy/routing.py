"""Which replica computes a request: by session and load (SAGA §5.1), and the baselines of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .lots import lot
from .replica_views import NOBODY, ReplicaView, Route, RouteView


class RoutingPolicy(Protocol):
    """Where a request goes.

    ``replicas`` are those that are up, in a fixed order; one that ``takes_new`` nobody goes on with the
    programs that are at home there. A policy that ``reads_residents``, an attribute that is true, is told of
    ``RouteView.residents`` and ``turns_left`` where a program's KV is nowhere yet, and then of many replicas
    only the few with the most room are shown. With ``resident_for_s`` a program that has no request is there
    for so many seconds after it was last heard of, else for ever. One that lists ``reasons``, all that its
    routes to a replica give, has them counted from 0 on.
    """

    reads_prefixes: bool
    """``RouteView.prefix_tokens`` is filled only if so: it takes an index of what was computed where."""

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyReplica:
    """One at random for each request, drawn from its id: what a plain load balancer makes of sessions."""

    seed: int = 0
    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("random",)

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NOBODY
        chosen = open_ones[lot(self.seed, view.request_id, len(open_ones))]
        return Route(chosen.replica_id, "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Each in turn."""

    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("in_turn",)

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NOBODY
        return Route(open_ones[view.number % len(open_ones)].replica_id, "in_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinity:
    """The replica that has the session's KV while its load is below ``most_load``, else the least loaded
    (SAGA §5.1, equation 7).

    A sub-agent that begins as its parent did goes where its parent is, by the same rule. A home that is too
    full is left only for a replica whose load is less by at least ``leaves_for``: what the session has there
    would be computed again, and where all replicas are as full, for nothing. The paper has 0. Raises
    ``ValueError`` for ``most_load`` ≤ 0 or ``leaves_for`` < 0.
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

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        home = view.home if view.cached else None
        if home is not None and home.load < self.most_load:
            return Route(home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new and near.load < self.most_load:
            return Route(near.replica_id, "near_parent")
        least: ReplicaView | None = None
        for replica in replicas:
            # Of two that are equally loaded, where fewer are at home: programs come back from their tools.
            if replica.takes_new and (
                least is None or (replica.load, replica.homed) < (least.load, least.homed)
            ):
                least = replica
        if least is None:
            return Route(home.replica_id, "home") if home is not None else NOBODY
        if home is not None and home.load - least.load < self.leaves_for:
            return Route(home.replica_id, "home_all_full")
        return Route(least.replica_id, "least_loaded" if home is None else "home_too_full")
