"""Routing without sessions: random and round robin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from .replica_views import NO_REPLICA, ReplicaView, RoutingDecision, RoutingView


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRouting:
    """Picks a random replica by a hash of the request's id, like a load balancer without sessions."""

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
    """Sends requests to the replicas that accept programs, one after the other, by the request's number."""

    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("in_turn",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NO_REPLICA
        return RoutingDecision(open_ones[view.number % len(open_ones)].replica_id, "in_turn")


def stable_hash(seed: int, what: str, many: int) -> int:
    """Hash ``seed`` and ``what`` to a number from 0 to ``many`` - 1, the same in every process."""
    digest = blake2b(f"{seed}/{what}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % many
