"""Stock vLLM, and every server we know nothing about: the header only.

A body field would reach ``SamplingParams.extra_args`` there for nothing, and
servers that refuse unknown fields would fail the agent's request.
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .header import session_header


class VllmDialect:
    """``X-Session-ID`` and nothing else."""

    name = "vllm"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        return {}, session_header(context.program_id)

    def courier(self, road: Road) -> None:
        return None
