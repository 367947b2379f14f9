"""Routing without sessions: random, round robin, and by prompt prefix."""

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
    """Sends request number n to replica n modulo the number of replicas. Only replicas that accept programs
    count."""

    reads_prefixes: bool = False
    reasons: ClassVar[tuple[str, ...]] = ("in_turn",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NO_REPLICA
        return RoutingDecision(open_ones[view.number % len(open_ones)].replica_id, "in_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAffinityRouting:
    """Routes to the replica that has computed the longest prefix of the prompt, if the prefix is long enough.

    This is the rule of SGLang's and vLLM's routers. The prefix must be at least the share ``least_match`` of
    the prompt, and loads must not differ too much. Otherwise the replica with the fewest requests is chosen.
    Loads differ too much if one replica has over ``most_ahead`` requests more than another, and over
    ``most_ratio`` times as many. Only replicas that accept programs are considered. Raises ``ValueError`` for
    ``least_match`` outside 0 to 1, ``most_ahead`` < 0 or ``most_ratio`` < 1.
    """

    least_match: float = 0.5
    most_ahead: int = 64
    most_ratio: float = 1.5
    reads_prefixes: bool = True
    reasons: ClassVar[tuple[str, ...]] = ("prefix", "fewest_requests", "unbalanced")

    def __post_init__(self) -> None:
        if not (0 <= self.least_match <= 1 and self.most_ahead >= 0 and self.most_ratio >= 1):
            raise ValueError(
                f"least_match {self.least_match}, most_ahead {self.most_ahead}, most_ratio "
                f"{self.most_ratio}; expected 0 to 1, ≥ 0, ≥ 1"
            )

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        open_ones = [replica for replica in replicas if replica.takes_new]
        if not open_ones:
            return NO_REPLICA
        fewest = open_ones[0]
        least = most = fewest.in_flight + fewest.queued
        for replica in open_ones:
            requests = replica.in_flight + replica.queued
            if requests < least:
                fewest, least = replica, requests
            elif requests > most:
                most = requests
        if most - least > self.most_ahead and most > self.most_ratio * least:
            return RoutingDecision(fewest.replica_id, "unbalanced")
        if view.prefix_tokens:
            matching = max(open_ones, key=lambda replica: view.prefix_tokens.get(replica.replica_id, 0))
            matched = view.prefix_tokens.get(matching.replica_id, 0)
            if matched and matched >= self.least_match * view.context_tokens:
                return RoutingDecision(matching.replica_id, "prefix")
        return RoutingDecision(fewest.replica_id, "fewest_requests")


def stable_hash(seed: int, what: str, many: int) -> int:
    """Hash ``seed`` and ``what`` to a number from 0 to ``many`` - 1, the same in every process."""
    digest = blake2b(f"{seed}/{what}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % many
