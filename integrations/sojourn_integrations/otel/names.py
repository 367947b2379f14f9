"""The names OpenTelemetry's GenAI conventions give things, and the older spellings in use: read and written
here only, since all of them are still in development.

Sources: the GenAI semantic conventions (``gen_ai.*``), OpenInference (``openinference.span.kind``,
``tool.name``, ``agent.name``, ``graph.node.id``) and OpenLLMetry (``traceloop.*``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

MISSING = "OpenTelemetry's SDK is not installed: pip install 'sojourn[otel]'"
NO_PROVIDER = (
    "OpenTelemetry has no TracerProvider yet: call trace.set_tracer_provider(TracerProvider()) first"
)
SCOPE = "sojourn"
"""Instrumentation scope of the spans we write. The source passes them over, so that nothing echoes."""

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
"""Kinds of spans that mean something here. A chain is OpenInference's word for any step: the outermost one
is the run."""

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


class Meaning(NamedTuple):
    """What a span is about."""

    kind: str
    name: str | None
    """Of the agent, workflow, node or tool."""
    call_id: str | None = None
    tool_type: str | None = None
    conversation: str | None = None
    is_node: bool = True
    """False for a chain that names no node of a graph."""


def meaning(span_name: str, attributes: Mapping[str, Any] | None) -> Meaning | None:
    """What the span's attributes say it is, else its name; ``None`` for spans of other things."""
    told = attributes or {}
    kind, by_name = _kind(span_name, told)
    if kind is None:
        return None
    if kind == MODEL:
        return _A_MODEL
    name = _first(told, _SPELLINGS[kind])
    is_node = kind != CHAIN or name is not None
    if name is None:
        name = by_name
    if kind == TOOL:
        return Meaning(kind, name, _first(told, _CALL_IDS), _text(told.get(TOOL_TYPE)))
    return Meaning(kind, name, conversation=_text(told.get(CONVERSATION)), is_node=is_node)


_A_MODEL = Meaning(MODEL, None)


def _kind(span_name: str, told: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The kind, and the name that the span's own name gives the thing."""
    operation = told.get(OPERATION)
    if operation is not None:
        return _OPERATIONS.get(operation), _after(span_name, operation)
    word = told.get("openinference.span.kind")
    if word is not None:
        return _OPENINFERENCE.get(str(word).upper()), span_name
    word = told.get("traceloop.span.kind")
    if word is not None:
        return _TRACELOOP.get(str(word)), span_name.rpartition(".")[0] or span_name
    if TOOL_NAME in told:
        return TOOL, None  # older releases of some instrumentations leave the operation out
    # The conventions fix the span's name too, and some set the attributes only later.
    first, _, rest = span_name.partition(" ")
    if first in _NAMED:
        return _OPERATIONS[first], rest or None
    return None, None


_NAMED = frozenset({"invoke_agent", "invoke_workflow", "execute_tool"})
"""Not ``chat``: too common a word to begin a name."""


def _after(span_name: str, operation: Any) -> str | None:
    first, _, rest = span_name.partition(" ")
    return (rest or None) if first == operation else span_name


def _first(told: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        text = _text(told.get(name))
        if text:
            return text
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


class _Telling(threading.local):
    span: Any = None


telling = _Telling()
"""The span that the source reports at this moment on this thread: the export writes no second one for it."""
