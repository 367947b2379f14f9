"""A gateway on one machine: the core in the process, engines at addresses that were named."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette

from ...policy.cluster_preset import ClusterPreset
from ..core.from_preset import core_of
from ..core.limits import CoreLimits
from .app import Gateway, GatewayOptions
from .books import Books
from .decider import LocalDecider
from .replicas import Replicas
from .tenants import Tenants
from .watch import POLL_S, Watch


def build(
    urls: Sequence[str],
    preset: ClusterPreset,
    tenants: Tenants,
    options: GatewayOptions,
    *,
    limits: CoreLimits | None = None,
    poll_s: float = POLL_S,
) -> tuple[Gateway, Starlette]:
    """The gateway before some engines, and its ASGI application."""
    books = Books()
    replicas = Replicas()
    decider = LocalDecider(core_of(preset, limits), tenants.names)
    decider.on_decided = books.decided
    gateway = Gateway(decider, replicas, tenants, options, books, uses=decider.uses)
    watch = Watch(urls, decider, replicas, gateway.session, engine_key=options.engine_key, poll_s=poll_s)
    gateway.watch = watch
    return gateway, gateway.app(lambda: [watch.run(), decider.run()])
