"""The protocol of routing policies: which replica serves a request?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .replica_views import ReplicaView, RoutingDecision, RoutingView


class RoutingPolicy(Protocol):
    """Chooses the replica for a request.

    ``replicas`` are all registered replicas (but see ``reads_residents``), in order of registration. A
    replica with ``takes_new`` False serves only programs whose home it is. A policy may have three more
    attributes:

    - ``reads_residents``: if true, the policy gets ``RoutingView.residents`` and ``turns_left`` for programs
      without KV. For these programs, ``replicas`` has only the few replicas with the most free memory.
    - ``resident_for_s``: seconds for which a program without a request counts as resident after its last
      activity (default: for ever).
    - ``reasons``: all reasons of its decisions, so that metrics can start each count at 0.
    """

    reads_prefixes: bool
    """Whether the policy uses ``RoutingView.prefix_tokens``, which needs an index of computed prefixes."""

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision: ...
