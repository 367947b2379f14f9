"""Parsers of span attributes in three conventions: GenAI (``gen_ai.*``, current and older names),
OpenInference (``openinference.span.kind``, ``llm.*``) and OpenLLMetry (``traceloop.*``).

``kind_of`` finds the same kinds as ``sojourn_integrations.otel.semantic_conventions``. A test compares the
two, because this package must not import that module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..trace_schema import MAX_TOKENS

AGENT, WORKFLOW, CHAIN, TOOL, MODEL = "agent", "workflow", "chain", "tool", "model"

CONVERSATION = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
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
_NAMED = ("invoke_agent", "invoke_workflow", "execute_tool")
_USAGE_HINTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_REQUEST_TYPES = ("chat", "completion")

_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_CACHED = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "gen_ai.usage.input_tokens.cached",
    "gen_ai.usage.details.cache_read_tokens",
    "gen_ai.usage.details.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
)
_CREATED = (
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens",
    "gen_ai.usage.cache_write_input_tokens",
    "gen_ai.usage.input_tokens.cache_write",
    "gen_ai.usage.details.cache_write_tokens",
    "gen_ai.usage.details.cache_creation_input_tokens",
    "llm.token_count.prompt_details.cache_write",
)
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
_TOOL_NAME = ("gen_ai.tool.name", "tool.name", "traceloop.entity.name")
_AGENT_NAME = ("gen_ai.agent.name", "agent.name", "graph.node.name", "traceloop.entity.name")


class SpanTokenUsage(NamedTuple):
    """Token counts of one model call. ``cached`` counts prompt tokens from the provider's cache; ``None`` if
    it was not reported."""

    prompt: int
    output: int
    cached: int | None
    created: int = 0
    """Prompt tokens that the call wrote to the provider's cache."""

    def with_cache(self) -> SpanTokenUsage:
        """Return a copy whose ``prompt`` includes the cached and the created tokens. Use it for a call whose
        reported prompt excludes them (``input_excludes_cache``)."""
        return self._replace(prompt=self.prompt + (self.cached or 0) + self.created)


def kind_of(span_name: str, attributes: Mapping[str, Any]) -> str | None:
    """Return a span's kind: ``agent``, ``workflow``, ``chain``, ``tool`` or ``model``; ``None`` for other
    spans. ``span_name`` is used only if no attribute gives the kind."""
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return _OPERATIONS.get(str(operation))
    word = attributes.get("openinference.span.kind")
    if word is not None:
        return _OPENINFERENCE.get(str(word).upper())
    word = attributes.get("traceloop.span.kind")
    if word is not None:
        return _TRACELOOP.get(str(word))
    if "gen_ai.tool.name" in attributes:
        return TOOL
    request = attributes.get("llm.request.type")
    if request is not None:
        return MODEL if request in _REQUEST_TYPES else None
    if any(hint in attributes for hint in _USAGE_HINTS):
        return MODEL
    first = span_name.partition(" ")[0]
    return _OPERATIONS[first] if first in _NAMED else None


def usage_of(attributes: Mapping[str, Any]) -> SpanTokenUsage | None:
    """Return the token counts that a model call reports. ``None`` if the prompt's or the output's count is
    missing, or if the prompt has no tokens. ``input_excludes_cache`` says whether the prompt's count includes
    cached tokens."""
    prompt, output, cached, created = (
        _count(attributes, names) for names in (_INPUT, _OUTPUT, _CACHED, _CREATED)
    )
    if prompt is None or output is None:
        return None
    usage = SpanTokenUsage(prompt, output, cached, created or 0)
    return usage if usage.with_cache().prompt > 0 else None


def input_excludes_cache(usages: Iterable[SpanTokenUsage]) -> bool:
    """Return whether the input tokens of one program's calls exclude cached and created tokens.

    The conventions require that input tokens include both. Some instrumentations of Anthropic and Bedrock
    report the provider's own count, which excludes both. A call with more cached and created tokens than
    input tokens proves this. One such call decides for all calls of the program.
    """
    return any((usage.cached or 0) + usage.created > usage.prompt for usage in usages)


def conversation_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the id of the span's conversation; ``None`` if it has none."""
    return _text(attributes, CONVERSATION)


def model_of(attributes: Mapping[str, Any]) -> str | None:
    """Return the model that answered, or else the requested model; ``None`` if the span names neither."""
    return _text(attributes, _MODEL)


def tool_of(span_name: str, attributes: Mapping[str, Any]) -> str:
    """Return the name of the tool from the attributes, or else ``span_name`` without a leading operation such
    as ``execute_tool``; ``unknown`` if nothing is left."""
    named = _text(attributes, _TOOL_NAME)
    if named is not None:
        return named
    first, _, rest = span_name.partition(" ")
    return (rest if first in _NAMED else span_name) or "unknown"


def agent_of(span_name: str, attributes: Mapping[str, Any]) -> str | None:
    """Return the name of the agent from the attributes, or else what follows a leading operation in
    ``span_name``; ``None`` if neither names it."""
    named = _text(attributes, _AGENT_NAME)
    if named is not None:
        return named
    first, _, rest = span_name.partition(" ")
    return (rest or None) if first in _NAMED else None


def calls_tool(attributes: Mapping[str, Any]) -> bool | None:
    """Return whether the model's answer calls a tool; ``None`` if the span has no finish reason."""
    reasons = attributes.get("gen_ai.response.finish_reasons")
    if isinstance(reasons, str):
        reasons = [reasons]
    if isinstance(reasons, (list, tuple)) and reasons:
        return any(str(reason).startswith(("tool", "function")) for reason in reasons)
    return None


def _count(attributes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first usable token count among the attributes ``names``; ``None`` if there is none."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return int(value)
    return None


def _text(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the first non-empty string among the attributes ``names``; ``None`` if there is none."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return None
