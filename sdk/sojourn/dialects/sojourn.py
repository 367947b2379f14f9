"""A server that runs the sojourn plugin: everything we know, under the field vLLM lets through."""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext
from sojourn.wire import encode

from .header import session_header


class SojournDialect:
    """``vllm_xargs.agentic_context``: a JSON *string*, since vLLM allows only flat values there."""

    name = "sojourn"
    carries_events = True

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        body = {"vllm_xargs": {"agentic_context": encode(context).decode()}}
        return body, session_header(context.program_id)
