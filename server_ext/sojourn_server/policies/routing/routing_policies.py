"""The routing question, session affinity with a load bound (SAGA §5.1), and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Protocol

from .replica_views import NO_REPLICA, ReplicaView, RoutingDecision, RoutingView


class RoutingPolicy(Protocol):
    """Which replica a request goes to.

    ``replicas`` are those that are up, in a fixed order. A replica with ``takes_new`` False serves only the
    programs that live there. Optional attributes: a policy with ``reads_residents`` gets
    ``RoutingView.residents`` and ``turns_left`` for programs without KV, and then sees only the few replicas
    with the most room. ``resident_for_s``: a program without a request counts as resident for this long after
    its last activity; without it, for ever. ``reasons``: all reasons its decisions may give, so that metrics
    count each of them from 0.
    """

    reads_prefixes: bool
    """True: fill ``RoutingView.prefix_tokens``, which takes an index of computed prefixes."""

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRouting:
    """A random replica for each request, drawn from its id: a load balancer without sessions."""

    seed: int = 0
    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("random",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NO_REPLICA
        chosen = open_ones[stable_hash(self.seed, view.request_id, len(open_ones))]
        return RoutingDecision(chosen.replica_id, "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinRouting:
    """Replicas in turn, request by request."""

    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("in_turn",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NO_REPLICA
        return RoutingDecision(open_ones[view.number % len(open_ones)].replica_id, "in_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinityRouting:
    """The replica with the session's KV while its load is below ``most_load``, else the least loaded one
    (SAGA §5.1, equation 7).

    A sub-agent whose prompt starts like its parent's goes to its parent's replica by the same rule. A session
    leaves a full home only for a replica whose load is lower by at least ``leaves_for``: moving recomputes
    its KV, which gains nothing if all replicas are full. The paper has 0. Raises ``ValueError`` for
    ``most_load`` ≤ 0 or ``leaves_for`` < 0."""

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


def stable_hash(seed: int, what: str, many: int) -> int:
    """A number from 0 to ``many`` - 1, uniform, and independent for different ``what``."""
    digest = blake2b(f"{seed}/{what}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % many
