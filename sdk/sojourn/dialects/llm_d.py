"""llm-d's router (github.com/llm-d/llm-d-router): headers only.

``x-llm-d-inference-objective`` names a resource of the cluster, which no client
can make up from a number; so no priority is said.
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .header import header_text, session_header

FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
"""Requests with the same value share one flow; those without it share ``default-flow``."""


class LlmDDialect:
    """``X-Session-ID``, and whose flow it is: the tenant's where one is known, else the agent's."""

    name = "llm_d"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        headers = session_header(context.program_id)
        ours = context.sojourn
        flow = None if ours is None else ours.tenant
        if flow is None and not (ours is not None and ours.implicit):
            flow = context.root_program_id or context.program_id
        if flow:
            headers[FAIRNESS_HEADER] = header_text(flow)
        return {}, headers

    def courier(self, road: Road) -> None:
        return None
