"""A gateway on one machine: the core in the process, engines at addresses that were named."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from starlette.applications import Starlette

from ...policy.cluster_preset import ClusterPreset
from ..core.from_preset import core_of, reasons_of
from ..core.limits import CoreLimits
from .app import Gateway, GatewayOptions
from .books import Books
from .census import Census
from .decider import LocalDecider
from .kept_state import KeptState
from .replicas import Address, Replicas
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
    state: Path | None = None,
) -> tuple[Gateway, Starlette]:
    """The gateway before some engines, and its ASGI application. ``state``: file that outlives it."""
    books = Books(reasons_of(preset))
    replicas = Replicas()
    decider = LocalDecider(core_of(preset, limits))
    decider.on_decided = books.decided
    gateway = Gateway(decider, replicas, tenants, options, books, uses=decider.uses)
    watch = Watch(urls, decider, replicas, gateway.session, engine_key=options.engine_key, poll_s=poll_s)
    gateway.watch = watch

    def speaks(address: Address) -> bool:
        told = watch.describes(address.replica_id)
        return told is not None and told.speaks_sojourn

    names = gateway.news.names
    census = Census(decider, replicas, names, gateway.session, speaks, engine_key=options.engine_key)
    kept = KeptState(state, decider.core) if state is not None else None
    if kept is not None:
        kept.restore()

    def beside() -> list[Awaitable[None]]:
        tasks: list[Awaitable[None]] = [watch.run(), decider.run(), census.run()]
        return [*tasks, kept.run()] if kept is not None else tasks

    return gateway, gateway.app(beside, watch.look)
