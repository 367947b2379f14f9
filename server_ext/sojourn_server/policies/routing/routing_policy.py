"""The routing question: which replica serves a request?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .replica_views import ReplicaView, RoutingDecision, RoutingView


class RoutingPolicy(Protocol):
    """Chooses the replica for a request.

    ``replicas`` are those that are up, in a fixed order. A replica with ``takes_new`` False serves only
    programs whose home it is. Optional attributes: ``reads_residents``: the policy gets
    ``RoutingView.residents`` and ``turns_left`` for programs without KV, and then sees only the few replicas
    with the most free memory. ``resident_for_s``: seconds for which a program without a request counts as
    resident after its last activity; without it, for ever. ``reasons``: all reasons that its decisions may
    give, so that metrics count each of them from 0.
    """

    reads_prefixes: bool
    """Whether to fill ``RoutingView.prefix_tokens``, which requires an index of computed prefixes."""

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision: ...
