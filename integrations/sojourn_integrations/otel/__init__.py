"""OpenTelemetry in both directions: ``source`` reads the spans of instrumented agents, ``export`` writes
spans.

    from sojourn_integrations import otel
    otel.install()           # no patches needed: spans become programs, nodes and tool calls
    otel.export_spans()      # GenAI-convention spans with the server's outcome of each request

Needs the extra ``sojourn[otel]``; its packages are imported at first use.

``meaning_of`` says what a span stands for, by three attribute conventions: the GenAI semantic conventions
(``gen_ai.*``), OpenInference (``openinference.span.kind``, ``llm.*``) and OpenLLMetry (``traceloop.*``). It
needs no package of OpenTelemetry, since the server's import of recorded spans calls it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from sojourn.errors import install_command

_HOMES = {"install": "source", "SojournSpanProcessor": "source", "export_spans": "export"}

__all__ = ["SojournSpanProcessor", "export_spans", "install"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import opentelemetry.sdk.trace  # noqa: F401  -- without it spans would silently go nowhere
    except ImportError as error:
        raise ImportError(f"OpenTelemetry's SDK is not installed: {install_command('otel')}") from error
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


AGENT, WORKFLOW, CHAIN, TOOL, MODEL = "agent", "workflow", "chain", "tool", "model"
"""Kinds of spans. A chain is OpenInference's word for any step; the outermost chain is the run."""
_OPERATIONS = {
    "invoke_agent": AGENT, "invoke_workflow": WORKFLOW, "execute_tool": TOOL,
    "chat": MODEL, "text_completion": MODEL, "generate_content": MODEL,
}  # fmt: skip
_KINDS = {
    "openinference.span.kind": {"agent": AGENT, "chain": CHAIN, "tool": TOOL, "llm": MODEL},
    "traceloop.span.kind": {"workflow": WORKFLOW, "agent": AGENT, "tool": TOOL},
    "llm.request.type": {"chat": MODEL, "completion": MODEL},
}
_HINTS = {
    "gen_ai.tool.name": TOOL, "gen_ai.usage.input_tokens": MODEL, "gen_ai.usage.prompt_tokens": MODEL,
}  # fmt: skip
"""Attributes by which a span is recognised if it names no operation, as in older instrumentations."""
_NAMED_BY_SPAN = frozenset({"invoke_agent", "invoke_workflow", "execute_tool"})
"""Operations recognised by the span's name. ``chat`` is missing, since many other names begin with it."""
_NAMES = {
    AGENT: ("gen_ai.agent.name", "agent.name", "graph.node.name", "graph.node.id", "traceloop.entity.name"),
    WORKFLOW: ("gen_ai.workflow.name", "traceloop.entity.name", "traceloop.workflow.name"),
    CHAIN: ("graph.node.name", "graph.node.id"),
    TOOL: ("gen_ai.tool.name", "tool.name", "traceloop.entity.name"),
    MODEL: (),
}


class SpanMeaning(NamedTuple):
    """What a span stands for, such as an agent's run or a tool call."""

    kind: str
    name: str | None
    """Name of the agent, workflow, node or tool."""
    call_id: str | None = None
    tool_type: str | None = None
    is_node: bool = True
    """Whether the span can be a node of a graph. False for a chain whose attributes name no node."""


def meaning_of(span_name: str, attributes: Mapping[str, Any] | None) -> SpanMeaning | None:
    """Return what a span stands for, by its attributes or else by its name; ``None`` for an unknown span."""
    attributes = attributes or {}
    first, _, rest = span_name.partition(" ")
    operation = attributes.get("gen_ai.operation.name")
    convention = next((name for name in _KINDS if attributes.get(name) is not None), "")
    by_name: str | None = span_name
    if operation is not None:
        kind = _OPERATIONS.get(str(operation))
        by_name = rest if first == operation else span_name
    elif convention:
        kind = _KINDS[convention].get(str(attributes[convention]).lower())
        if convention == "traceloop.span.kind":
            by_name = span_name.rpartition(".")[0] or span_name
    elif first in _NAMED_BY_SPAN:  # some instrumentations set the attributes later
        kind, by_name = _OPERATIONS[first], rest
    else:
        kind, by_name = next((kind for name, kind in _HINTS.items() if name in attributes), None), None
    if kind is None:
        return None
    name = text(attributes, *_NAMES[kind])
    return SpanMeaning(
        kind,
        name or by_name or None,
        text(attributes, "gen_ai.tool.call.id", "tool_call.id", "tool.id"),
        text(attributes, "gen_ai.tool.type"),
        kind != CHAIN or name is not None,
    )


def text(attributes: Mapping[str, Any], *names: str) -> str | None:
    """Return the first text among the attributes ``names``; ``None`` if there is none."""
    found = (attributes.get(name) for name in names)
    return next((value for value in found if isinstance(value, str) and value), None)
