"""Builds a gateway: a routing core in this process, and a monitor of its engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ...policies.cluster_preset import ClusterPreset
from ...routing.routing_events import PairRole
from ...routing.routing_from_preset import (
    PAIR_POLICY,
    PrefillDecodeRules,
    build_pair_core,
    build_routing_core,
    routing_reasons,
)
from ...routing.routing_limits import RoutingLimits
from .engine_monitor import POLL_S
from .gateway_app import Gateway, GatewayApplication, GatewayOptions
from .gateway_metrics import GatewayMetrics
from .peers import Peers
from .routing_backend import RoutingBackend
from .tenant_keys import TenantKeys


def build_gateway(
    engines: Iterable[str] | Mapping[str, PairRole | None],
    rules: ClusterPreset | PrefillDecodeRules,
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
    expects_engines: bool = False,
    peers: Peers | None = None,
) -> tuple[Gateway, GatewayApplication]:
    """Build a gateway. Return it with its ASGI application.

    ``engines``: their URLs; with the roles of prefill and decode engines. ``rules``: how requests are routed,
    a cluster preset or rules for pairs. ``options``: those that follow from ``rules`` are set here.
    ``limits``: bounds of the routing core; ``None``: the defaults. ``poll_s``: seconds between two polls of
    an engine. ``expects_engines``: whether further engines of pairs may be named later, so that requests wait
    for them. ``peers``: the other gateways; ``None``: there are none. Raises ``ValueError`` for wrong rules.
    """
    if isinstance(rules, PrefillDecodeRules):
        core = build_pair_core(rules, limits, expects_engines=expects_engines)
        options = dataclasses.replace(options, policy=PAIR_POLICY, in_pairs=True, read_side=rules.read_side)
    else:
        core = build_routing_core(rules, limits)
        options = dataclasses.replace(
            options,
            policy=rules.name,
            reads_prefixes=rules.routing.reads_prefixes,
            reads_deadlines=rules.sharing.divides_capacity,
        )
    metrics = GatewayMetrics(routing_reasons(rules))
    backend = RoutingBackend(core)
    roles = engines if isinstance(engines, Mapping) else dict.fromkeys(engines)
    gateway = Gateway(roles, backend, tenants, options, metrics, peers or Peers(), poll_s)
    return gateway, gateway.app()
