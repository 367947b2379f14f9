"""How identity and advice are said to each kind of server. One file per dialect.

context of a turn ── fields() ──▶ body fields and headers of its request
events ── courier() ──▶ what this server takes of them, its own way; None: it takes none
"""

from __future__ import annotations

from typing import Any, Protocol

from sojourn.hints import AgenticContext

from .aibrix import AibrixDialect
from .courier import Batch, Courier, Delivery, Road
from .dynamo import DynamoDialect
from .llm_d import LlmDDialect
from .sglang import SglangDialect
from .sojourn import SojournCourier, SojournDialect
from .thunderagent import ThunderAgentDialect
from .vllm import VllmDialect
from .vllm_priority import VllmPriorityDialect
from .vllm_router import VllmRouterDialect


class Dialect(Protocol):
    """Translates one turn's context; holds no state."""

    @property
    def name(self) -> str: ...

    @property
    def carries_events(self) -> bool:
        """Unsent events may ride along in the body."""

    @property
    def yields_to(self) -> frozenset[str]:
        """Body fields of the user's own beside which the server would refuse ours: none is added then."""

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        """Body fields and headers for one request. The caller owns both. Raises ``WireError`` for a context
        that is too long, as its events may make it."""

    def courier(self, road: Road) -> Courier | None:
        """A fresh courier for this server's events; ``None`` where it has no use for any."""


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
"""By name."""

__all__ = ["DIALECTS", "Batch", "Courier", "Delivery", "Dialect", "Road", "SojournCourier"]
