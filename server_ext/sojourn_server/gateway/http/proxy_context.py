"""Objects that all proxied requests of a gateway share."""

from __future__ import annotations

import time
from collections.abc import Callable

from .client_apis import (
    GATEWAY_FAILED,
    AsgiSend,
    ClientApi,
    RequestRejected,
    send_internal_error,
    send_rejection,
)
from .engine_connection_pool import EngineConnectionPool
from .event_forwarder import EventForwarder
from .gateway_metrics import GatewayMetrics
from .generation_request import PromptSizeEstimator
from .program_event_records import TenantBoundedCache
from .program_migrator import ProgramMigrator
from .replica_addresses import ReplicaAddresses
from .routing_backend import RoutingBackend

MAX_RESPONSE_IDS = 100_000
"""Maximum number of remembered answer ids of the responses API. A later request may name such an id to
continue the conversation. If there are more ids, the tenant with the most ids loses its oldest ones."""


class ProxyContext:
    """Objects that all requests of a gateway share."""

    def __init__(
        self,
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        connections: EngineConnectionPool,
        forwarder: EventForwarder,
        migrator: ProgramMigrator,
        metrics: GatewayMetrics,
        *,
        engine_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine_key``: key sent to engines instead of the client's own; ``None``: the client's key is
        sent."""
        self.routing_backend = routing_backend
        self.replicas = replicas
        self.connections = connections
        self.forwarder = forwarder
        self.migrator = migrator
        self.metrics = metrics
        self.engine_key = engine_key
        self.clock = clock
        self.sizes = PromptSizeEstimator()
        self.conversations: TenantBoundedCache[str] = TenantBoundedCache(MAX_RESPONSE_IDS)
        """The program to which each answer of the responses API belongs, by tenant and answer id."""

    async def refuse(self, send: AsgiSend, api: ClientApi, refused: RequestRejected) -> None:
        """Answer a request with the error ``refused``, and count the error unless it is counted already."""
        if not refused.is_counted:
            self.metrics.refused(refused.code)
        await send_rejection(send, api, refused)

    async def send_internal_error(self, send: AsgiSend, api: ClientApi) -> None:
        """Count an internal error and answer with it. Call this in an ``except`` block, before any part of an
        answer was sent."""
        self.metrics.refused(GATEWAY_FAILED)
        await send_internal_error(send, api)
