"""NVIDIA Dynamo (github.com/ai-dynamo/dynamo): program ids in headers, hints in ``nvext.agent_hints``.

Dynamo answers 400 to an unknown body field and to a number out of range, both inside and outside of ``nvext``
(tried with ai-dynamo 1.6.1). Tool events are sent over ZeroMQ if the user names an endpoint
(``dynamo_events.py``).
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .event_transport import EventTransport, TransportContext
from .server_dialects import I32_MAX, U32_MAX, clip, header_text

SESSION_HEADER = "X-Dynamo-Session-ID"
PARENT_HEADER = "X-Dynamo-Parent-Session-ID"
FINAL_HEADER = "X-Dynamo-Session-Final"


class DynamoDialect:
    """Dynamo's dialect. A *higher* priority is more important, as in sojourn; Dynamo converts it for its
    engines."""

    name = "dynamo"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        ours = context.sojourn
        headers: dict[str, str] = {}
        # An implicit program is a whole process. Session affinity would pin all its requests to one worker.
        if ours is None or not ours.implicit:
            headers[SESSION_HEADER] = header_text(context.program_id)
            if context.parent_program_id:
                headers[PARENT_HEADER] = header_text(context.parent_program_id)
            if ours is not None and ours.final:
                headers[FINAL_HEADER] = "true"
        # ``strict_priority`` is never sent, since only the operator may put a request above all others.
        hints: dict[str, Any] = {}
        if context.priority is not None:
            hints["priority"] = clip(context.priority, I32_MAX)
        if context.expected_output_length is not None:
            hints["osl"] = max(0, clip(context.expected_output_length, U32_MAX))
        if context.expected_resume:
            # When this turn ends, Dynamo then prefills the prefix that it expects in the next turn.
            hints["speculative_prefill"] = True
        return {"nvext": {"agent_hints": hints}} if hints else {}, headers

    def text_fields(self, program_id: str, context: str) -> tuple[dict[str, Any], dict[str, str]]:
        raise NotImplementedError("this server takes no events with a request")

    def event_transport(self, transport_context: TransportContext) -> EventTransport | None:
        if transport_context.tool_events is None:
            return None
        from .dynamo_events import ToolEventTransport

        return ToolEventTransport(transport_context, transport_context.tool_events)
