"""Attribute names of OpenTelemetry's GenAI conventions, and other spellings that are in use. The conventions
may still change. So all such names are in this file.

Sources: the GenAI semantic conventions (``gen_ai.*``), OpenInference (``openinference.span.kind``,
``tool.name``, ``agent.name``, ``graph.node.id``) and OpenLLMetry (``traceloop.*``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from sojourn.errors import install_command

SDK_MISSING_MESSAGE = f"OpenTelemetry's SDK is not installed: {install_command('otel')}"
NO_PROVIDER_MESSAGE = (
    "OpenTelemetry has no TracerProvider yet: call trace.set_tracer_provider(TracerProvider()) first"
)
SCOPE = "sojourn"
"""Instrumentation scope of the spans that ``export`` writes; ``source`` ignores them."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
AGENT_ID = "gen_ai.agent.id"
WORKFLOW_NAME = "gen_ai.workflow.name"
CONVERSATION = "gen_ai.conversation.id"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

AGENT, WORKFLOW, CHAIN, TOOL, MODEL = "agent", "workflow", "chain", "tool", "model"
"""Kinds of spans that ``source`` reads. A chain is OpenInference's word for any step; the outermost chain is
the run."""

_OPERATIONS = {
    "invoke_agent": AGENT,
    "invoke_workflow": WORKFLOW,
    "execute_tool": TOOL,
    "chat": MODEL,
    "text_completion": MODEL,
    "generate_content": MODEL,
}
_OPENINFERENCE = {"AGENT": AGENT, "CHAIN": CHAIN, "TOOL": TOOL, "LLM": MODEL}
_TRACELOOP = {"workflow": WORKFLOW, "agent": AGENT, "tool": TOOL}

_SPELLINGS = {
    AGENT: (AGENT_NAME, "agent.name", "graph.node.name", "graph.node.id", "traceloop.entity.name"),
    WORKFLOW: (WORKFLOW_NAME, "traceloop.entity.name", "traceloop.workflow.name"),
    CHAIN: ("graph.node.name", "graph.node.id"),
    TOOL: (TOOL_NAME, "tool.name", "traceloop.entity.name"),
}
_CALL_IDS = (TOOL_CALL_ID, "tool_call.id", "tool.id")


class SpanMeaning(NamedTuple):
    """What a span stands for, such as an agent's run or a tool call."""

    kind: str
    name: str | None
    """Name of the agent, workflow, node or tool."""
    call_id: str | None = None
    tool_type: str | None = None
    conversation: str | None = None
    is_node: bool = True
    """Whether the span can be a node of a graph. False for a chain whose attributes name no node."""


def meaning(span_name: str, attributes: Mapping[str, Any] | None) -> SpanMeaning | None:
    """Return what a span stands for, by its attributes or else by its name; ``None`` for an unknown span."""
    attributes = attributes or {}
    kind, by_name = _kind(span_name, attributes)
    if kind is None:
        return None
    if kind == MODEL:
        return _A_MODEL
    name = _first(attributes, _SPELLINGS[kind])
    is_node = kind != CHAIN or name is not None
    if name is None:
        name = by_name
    if kind == TOOL:
        return SpanMeaning(kind, name, _first(attributes, _CALL_IDS), _text(attributes.get(TOOL_TYPE)))
    return SpanMeaning(kind, name, conversation=_text(attributes.get(CONVERSATION)), is_node=is_node)


_A_MODEL = SpanMeaning(MODEL, None)


def _kind(span_name: str, attributes: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the kind of a span and the name of its agent, workflow or tool, each ``None`` if unknown."""
    operation = attributes.get(OPERATION)
    if operation is not None:
        return _OPERATIONS.get(operation), _after(span_name, operation)
    word = attributes.get("openinference.span.kind")
    if word is not None:
        return _OPENINFERENCE.get(str(word).upper()), span_name
    word = attributes.get("traceloop.span.kind")
    if word is not None:
        return _TRACELOOP.get(str(word)), span_name.rpartition(".")[0] or span_name
    if TOOL_NAME in attributes:
        return TOOL, None  # older releases of some instrumentations leave the operation out
    # The conventions define the span's name too, and some instrumentations set the attributes later.
    first, _, rest = span_name.partition(" ")
    if first in _NAMED:
        return _OPERATIONS[first], rest or None
    return None, None


_NAMED = frozenset({"invoke_agent", "invoke_workflow", "execute_tool"})
"""Operations recognised by the span's name. ``chat`` is missing, since many other names begin with it."""


def _after(span_name: str, operation: Any) -> str | None:
    first, _, rest = span_name.partition(" ")
    return (rest or None) if first == operation else span_name


def _first(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        text = _text(attributes.get(name))
        if text:
            return text
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


class _CurrentReport(threading.local):
    span: Any = None


current_report = _CurrentReport()
"""While ``source`` reports a program or tool call on this thread, ``current_report.span`` is the framework's
span that ``source`` reads. ``export`` then writes no second span. Otherwise ``current_report.span`` is
``None``."""
