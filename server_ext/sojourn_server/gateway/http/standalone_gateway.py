"""Builds a gateway: a routing core in this process, and a monitor of its engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ...policies.cluster_preset import ClusterPreset
from ...routing.routing_core import RoutingCore
from ...routing.routing_events import PairRole
from ...routing.routing_from_preset import (
    PAIR_REASONS,
    PrefillDecodeRules,
    build_pair_core,
    build_routing_core,
    routing_reasons,
)
from ...routing.routing_limits import RoutingLimits
from .engine_monitor import POLL_S, EngineMonitor
from .gateway_app import Gateway, GatewayApplication, GatewayOptions
from .gateway_metrics import GatewayMetrics
from .peers import Peers
from .replica_addresses import ReplicaAddresses
from .routing_backend import RoutingBackend
from .tenant_keys import TenantKeys


def build_gateway(
    urls: Sequence[str],
    preset: ClusterPreset,
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
    peers: Peers | None = None,
) -> tuple[Gateway, GatewayApplication]:
    """Build a gateway in front of the engines at ``urls``. Return it with its ASGI application.

    ``limits``: bounds of the routing core; ``None``: the defaults. ``poll_s``: seconds between two polls of
    an engine. ``peers``: the other gateways; ``None``: there are none.
    """
    core = build_routing_core(preset, limits)
    gateway, backend = _build(core, tenants, options, routing_reasons(preset), peers)
    return _run(gateway, backend, dict.fromkeys(urls), options, poll_s)


def build_prefill_decode_gateway(
    prefill: Sequence[str],
    decode: Sequence[str],
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    rules: PrefillDecodeRules | None = None,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
    expects_engines: bool = False,
    peers: Peers | None = None,
) -> tuple[Gateway, GatewayApplication]:
    """Build a gateway in front of prefill and decode engines. Return it with its ASGI application.

    ``prefill``, ``decode``: URLs of the engines. ``rules``: how pairs are chosen; ``None``: the defaults of
    ``PrefillDecodeRules``. ``limits``: bounds of the routing core; ``None``: the defaults. ``poll_s``:
    seconds between two polls of an engine. ``expects_engines``: whether further engines may be named later,
    so that requests wait for them. ``peers``: the other gateways; ``None``: there are none. Raises
    ``ValueError`` if URLs are missing or repeated, or for wrong rules."""
    rules = rules or PrefillDecodeRules()
    core = build_pair_core(rules, limits, expects_engines=expects_engines)
    roles = {**dict.fromkeys(prefill, PairRole.PREFILL), **dict.fromkeys(decode, PairRole.DECODE)}
    is_incomplete = not (prefill and decode) and not expects_engines
    if is_incomplete or len(roles) < len(prefill) + len(decode):
        raise ValueError("expected addresses of prefill engines and of decode engines, each address once")
    options = dataclasses.replace(options, in_pairs=True, read_side=rules.read_side)
    gateway, backend = _build(core, tenants, options, PAIR_REASONS, peers)
    return _run(gateway, backend, roles, options, poll_s)


def _run(
    gateway: Gateway,
    backend: RoutingBackend,
    engines: Mapping[str, PairRole | None],
    options: GatewayOptions,
    poll_s: float,
) -> tuple[Gateway, GatewayApplication]:
    """Give a gateway the monitor of its engines: URL → role. The first poll also tells which programs of a
    former gateway have their KV where."""
    monitor = EngineMonitor(
        engines,
        backend,
        gateway.replicas,
        gateway.events.names,
        gateway.session,
        engine_key=options.engine_key,
        poll_s=poll_s,
    )
    backend.links_of = monitor.links_of
    gateway.monitor = monitor
    gateway.starts.append(monitor.poll_all)
    gateway.tasks += [monitor.run, backend.run]
    return gateway, gateway.app()


def _build(
    core: RoutingCore,
    tenants: TenantKeys,
    options: GatewayOptions,
    reasons: Iterable[str],
    peers: Peers | None,
) -> tuple[Gateway, RoutingBackend]:
    metrics = GatewayMetrics(reasons)
    backend = RoutingBackend(core)
    backend.on_action = metrics.decided
    return Gateway(backend, ReplicaAddresses(), tenants, options, metrics, peers), backend
