"""A gateway on one machine before prefill and decode engines at addresses that were named."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence

from starlette.applications import Starlette

from ...policy.pd_pairs import PairScheduler
from ...policy.pd_read_side import PrefillSide, ReadSidePolicy, ShorterQueue, WaterFilled
from ..core.limits import CoreLimits
from ..http.app import Gateway, GatewayOptions
from ..http.books import Books
from ..http.replicas import Replicas
from ..http.tenants import Tenants
from ..http.watch import POLL_S
from .core import PdCore
from .decider import PdDecider
from .facts import Role
from .watch import PairWatch

POLICY = "dualpath"
"""What a gateway of pairs calls its policy."""
REASONS = ("pair",)
READ_SIDES: dict[str, type[ReadSidePolicy]] = {
    "shorter": ShorterQueue,
    "split": WaterFilled,
    "prefill": PrefillSide,
}
"""By the name that an operator gives."""


def build_pairs(
    prefill: Sequence[str],
    decode: Sequence[str],
    tenants: Tenants,
    options: GatewayOptions,
    *,
    read_side: str = "shorter",
    limits: CoreLimits | None = None,
    poll_s: float = POLL_S,
) -> tuple[Gateway, Starlette]:
    """The gateway before engines at these addresses, and its ASGI application. Raises ``ValueError``."""
    if read_side not in READ_SIDES:
        raise ValueError(f"read_side is {read_side!r}; expected {', '.join(READ_SIDES)}")
    roles = {**dict.fromkeys(prefill, Role.PREFILL), **dict.fromkeys(decode, Role.DECODE)}
    if not prefill or not decode or len(roles) < len(prefill) + len(decode):
        raise ValueError("expected addresses of prefill engines and of decode engines, each address once")
    books = Books(REASONS)
    replicas = Replicas()
    decider = PdDecider(PdCore(PairScheduler(side=READ_SIDES[read_side]()), limits))
    decider.on_decided = books.decided
    options = dataclasses.replace(options, in_pairs=True, read_side=read_side)
    gateway = Gateway(decider, replicas, tenants, options, books)
    gateway.answered_by = decider.answered_by
    watch = PairWatch(roles, decider, replicas, gateway.session, engine_key=options.engine_key, poll_s=poll_s)
    decider.links_of = watch.links_of
    gateway.watch = watch

    def beside() -> list[Awaitable[None]]:
        return [watch.run(), decider.run()]

    return gateway, gateway.app(beside, watch.look)
