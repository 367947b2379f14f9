"""ThunderAgent (github.com/ThunderAgent-org/ThunderAgent): ``program_id`` in the body, release at the end.

It takes no priority and no other hint. Requests without an id share one program
called ``default``, so even the implicit program of a process is named here.
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .farewell import Farewell
from .header import session_header


class ThunderAgentDialect:
    """``program_id`` at the top level: ThunderAgent takes it out before the request reaches the engine."""

    name = "thunderagent"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        return {"program_id": context.program_id}, session_header(context.program_id)

    def courier(self, road: Road) -> Farewell:
        return Farewell(road, "/programs/release", "program_id")
