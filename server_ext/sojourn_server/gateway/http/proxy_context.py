"""Objects that all proxied requests of a gateway share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .client_apis import GATEWAY_FAILED, AsgiSend, ClientApi, RequestRejected, send_rejection
from .engine_connection_pool import EngineConnectionPool
from .event_forwarder import EventForwarder
from .gateway_metrics import GatewayMetrics
from .generation_request import PromptSizeEstimator
from .program_event_records import TenantBoundedCache
from .program_migrator import ProgramMigrator
from .replica_addresses import ReplicaAddresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)

MAX_RESPONSE_IDS = 100_000
"""Maximum number of remembered answer ids of the responses API. A later request may name such an id to
continue the conversation. Beyond this number, the tenant with the most ids loses its oldest ones."""


@dataclass(slots=True, kw_only=True)
class ProxyContext:
    """Objects that all proxied requests of a gateway share."""

    routing_backend: RoutingBackend
    replicas: ReplicaAddresses
    connections: EngineConnectionPool
    forwarder: EventForwarder
    migrator: ProgramMigrator
    metrics: GatewayMetrics
    engine_key: str | None
    """Key sent to engines in place of the client's; ``None``: the client's key is sent."""
    sizes: PromptSizeEstimator = field(default_factory=PromptSizeEstimator)
    conversations: TenantBoundedCache[str] = field(
        default_factory=lambda: TenantBoundedCache(MAX_RESPONSE_IDS)
    )
    """The program to which each answer of the responses API belongs, by tenant and answer id."""

    async def refuse(self, send: AsgiSend, api: ClientApi, refused: RequestRejected) -> None:
        """Answer a request with the error ``refused``. Count the error if it is not counted yet."""
        if not refused.is_counted:
            self.metrics.refused(refused.code)
        await send_rejection(send, api, refused)

    async def send_internal_error(self, send: AsgiSend, api: ClientApi) -> None:
        """Log the current exception, and answer a request with an internal error. Call this in an ``except``
        block, before any part of an answer was sent."""
        logger.exception("the gateway failed at a request; please report this")
        message = "the gateway failed; see its log"
        await self.refuse(send, api, RequestRejected(500, GATEWAY_FAILED, message))
