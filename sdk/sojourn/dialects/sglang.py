"""SGLang (github.com/sgl-project/sglang): ``session_id`` and ``priority`` at the top level.

``session_id`` keeps KV only where the server runs with ``--enable-session-radix-cache``,
and ``priority`` orders only with ``--enable-priority-scheduling``; elsewhere both are
ignored, except by a server told to ``--abort-on-priority-when-disabled``.
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .farewell import Farewell
from .header import session_header
from .numbers import i32


class SglangDialect:
    """In SGLang the *higher* number goes first, as here, unless it was started with
    ``--schedule-low-priority-values-first``."""

    name = "sglang"
    carries_events = False
    yields_to = frozenset({"session_params"})
    """SGLang refuses a request that has both this and ``session_id``."""

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        body: dict[str, Any] = {}
        if context.sojourn is None or not context.sojourn.implicit:
            body["session_id"] = context.program_id
        if context.priority is not None:
            body["priority"] = i32(context.priority)
        return body, session_header(context.program_id)

    def courier(self, road: Road) -> Farewell:
        return Farewell(road, "/close_session", "session_id")
