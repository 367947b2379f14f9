"""Dialects: how each kind of server receives program ids, hints and events.

context of a turn ── fields() ──▶ body fields and headers of its request
events ── event_transport() ──▶ separate requests, if the server accepts events

This package imports the wire format, the event queue and the HTTP transport. Start reading at ``Dialect`` and
``sojourn``.
"""

from __future__ import annotations

from typing import Any, Protocol

from sojourn.hints import AgenticContext

from .dynamo import DynamoDialect
from .event_transport import DeliveryResult, EventTransport, PendingBatch, TransportContext
from .server_dialects import (
    AibrixDialect,
    LlmDDialect,
    SglangDialect,
    ThunderAgentDialect,
    VllmDialect,
    VllmPriorityDialect,
)
from .sojourn import SojournDialect, SojournEventTransport
from .vllm_router import VllmRouterDialect


class Dialect(Protocol):
    """Translates the hints and the program id of one LLM request for one kind of server. Holds no state."""

    @property
    def name(self) -> str: ...

    @property
    def carries_events(self) -> bool:
        """True if the body of a request can carry unsent events."""

    @property
    def yields_to(self) -> frozenset[str]:
        """Body fields that the server does not accept together with this dialect's fields. If the user's body
        has one of these fields, only headers are added."""

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the body fields and headers of one request; the caller may change both. Raises ``WireError``
        if ``context`` is too long, for instance because of its events."""

    def text_fields(self, program_id: str, context: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the same as ``fields``, for the program ``program_id`` and a context that is already encoded
        as JSON. Called only if ``carries_events`` is true."""

    def event_transport(self, transport_context: TransportContext) -> EventTransport | None:
        """Return a new transport for this server's events; ``None`` if the server accepts no events."""


_ALL: tuple[Dialect, ...] = (
    SojournDialect(),
    VllmDialect(),
    VllmPriorityDialect(),
    VllmRouterDialect(),
    DynamoDialect(),
    ThunderAgentDialect(),
    SglangDialect(),
    LlmDDialect(),
    AibrixDialect(),
)

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
"""Dialects by name."""

__all__ = [
    "DIALECTS",
    "DeliveryResult",
    "Dialect",
    "EventTransport",
    "PendingBatch",
    "SojournEventTransport",
    "TransportContext",
]
