"""The routing question: which replica serves a request?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .replica_views import ReplicaView, RoutingDecision, RoutingView


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
