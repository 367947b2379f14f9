"""Writes programs, requests and tool calls as OpenTelemetry spans of the GenAI conventions.

    export = sojourn_integrations.otel.export_spans()      # to the global TracerProvider
    ...
    export.flush()                                                # optional; done at exit

A program becomes an ``invoke_agent`` span, a request a ``chat`` span, a tool call an ``execute_tool`` span.
The span of a sub-agent is a child of the tool call in which it runs. The server's outcome of a request
(cached tokens, lost tokens with the cause, the lease) is fetched afterwards and added as ``sojourn.*``
attributes. Prompts, arguments and outputs are never exported.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from sojourn import runtime
from sojourn.errors import ConfigError
from sojourn.listeners import ProgramListener, add_listener, remove_listener
from sojourn.program import Program
from sojourn.outgoing_request import LogicalRequest
from sojourn.token_usage import TokenUsage
from sojourn.tools import ToolCall

from . import semantic_conventions
from .outcome_fetcher import OutcomeFetcher, Turn

try:
    import opentelemetry.sdk.trace  # noqa: F401  -- without it spans would silently go nowhere
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    raise ImportError(semantic_conventions.SDK_MISSING_MESSAGE) from error

_OPERATIONS = {"/chat/completions": "chat", "/completions": "text_completion", "/responses": "chat"}
_FAILED = {"error", "timeout", "failed"}
"""Statuses that count as errors. ``cancelled`` and ``nonzero`` do not."""


class _OpenProgram:
    """The spans of one open program."""

    __slots__ = ("__weakref__", "ours", "span", "tools")

    def __init__(self, span: Any, ours: bool) -> None:
        self.span = span
        self.ours = ours
        """True if this module made the span and has to end it; False for a framework's own span."""
        self.tools: dict[str, tuple[Any, bool]] = {}
        """Id of a tool call in progress → (its span, whether this module made the span)."""


class _OpenRequest(NamedTuple):
    """The span of a request in progress, and the start in Unix nanoseconds."""

    span: Any
    started_ns: int


class SpanExport(ProgramListener):
    """Writes programs, requests and tool calls as spans. ``export_spans()`` creates it."""

    wants_usage = True

    def __init__(self, tracer: Any, provider: str, outcomes: OutcomeFetcher | None) -> None:
        self._tracer = tracer
        self._provider = provider
        self._outcomes = outcomes
        # Weak, so that a program dropped without an end leaves nothing here. Its span is never exported.
        self._programs: weakref.WeakKeyDictionary[Program, _OpenProgram] = weakref.WeakKeyDictionary()
        self._by_id: weakref.WeakValueDictionary[str, _OpenProgram] = weakref.WeakValueDictionary()
        self._requests: weakref.WeakKeyDictionary[LogicalRequest, _OpenRequest] = weakref.WeakKeyDictionary()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Fetch all outcomes now, which ends the spans of the finished requests. Waits at most ``timeout_s``,
        and returns False if that time passed first. With ``outcomes=False``, returns True at once."""
        return self._outcomes is None or self._outcomes.flush(timeout_s)

    def close(self) -> None:
        """Stop the export. The spans of finished requests end. The spans of open programs are not
        exported."""
        remove_listener(self)
        atexit.unregister(self.close)
        for target, export in list(_exports.items()):
            if export is self:
                del _exports[target]
        if self._outcomes is not None:
            self._outcomes.close()

    # ---- programs

    def program_started(self, program: Program) -> None:
        """Start the program's ``invoke_agent`` span. An implicit program gets no span. A program that
        ``source`` made from a span gets no second one."""
        if not program.implicit:
            self._open(program)

    def program_ended(self, program: Program, status: str) -> None:
        """End the program's span. Make the fetcher fetch the outcomes of the program's requests now."""
        opened = self._programs.pop(program, None)
        if opened is not None and opened.ours:
            for span, ours in opened.tools.values():
                if ours:
                    _end(span, "cancelled")
            _end(opened.span, status)
        if self._outcomes is not None:
            self._outcomes.program_ended(program.id)

    def _open(self, program: Program) -> _OpenProgram:
        current = semantic_conventions.current_report.span
        if current is not None:
            opened = _OpenProgram(current, ours=False)
        else:
            label = program.name or program.agent_type
            attributes = {**self._whose(program), semantic_conventions.OPERATION: "invoke_agent"}
            for name, value in (
                ("sojourn.parent_program_id", program.parent_id),
                ("sojourn.root_program_id", program.root_id),
                ("sojourn.tenant", program.tenant),
            ):
                if value is not None:
                    attributes[name] = value
            span = self._tracer.start_span(
                f"invoke_agent {label}" if label else "invoke_agent",
                context=self._parent_context(program),
                kind=SpanKind.INTERNAL,
                attributes=attributes,
            )
            opened = _OpenProgram(span, ours=True)
        self._programs[program] = opened
        self._by_id[program.id] = opened
        return opened

    def _parent_context(self, program: Program) -> Any:
        """Return the context for a program's span: that of the parent program's tool call or span. Returns
        ``None`` if no parent is known; the span is then a child of the current span."""
        parent = self._by_id.get(program.parent_id) if program.parent_id is not None else None
        if parent is None:
            return None
        span, _ = parent.tools.get(program.call_id or "", (parent.span, False))
        return trace.set_span_in_context(span)

    def _of(self, program: Program) -> _OpenProgram | None:
        opened = self._programs.get(program)
        if opened is None and program.is_open and not program.implicit:
            return self._open(program)  # it began before the export did
        return opened

    def _whose(self, program: Program) -> dict[str, Any]:
        attributes: dict[str, Any] = {semantic_conventions.PROVIDER: self._provider}
        if not program.implicit:
            attributes[semantic_conventions.CONVERSATION] = attributes[semantic_conventions.AGENT_ID] = (
                program.id
            )
            label = program.name or program.agent_type
            if label is not None:
                attributes[semantic_conventions.AGENT_NAME] = label
        return attributes

    # ---- tools

    def tool_started(self, call: ToolCall) -> None:
        """Start the tool call's ``execute_tool`` span."""
        opened = self._of(call.program) if call.program is not None else None
        if opened is None or call.program is None:
            return
        current = semantic_conventions.current_report.span
        if current is not None:
            opened.tools[call.call_id] = current, False
            return
        attributes = {
            semantic_conventions.OPERATION: "execute_tool",
            semantic_conventions.TOOL_NAME: call.tool,
            semantic_conventions.TOOL_CALL_ID: call.call_id,
            semantic_conventions.TOOL_TYPE: "function",
            semantic_conventions.CONVERSATION: call.program.id,
        }
        if call.tool_class is not None:
            attributes["sojourn.tool.class"] = call.tool_class
        if call.program.node is not None:
            attributes["sojourn.node"] = call.program.node
        span = self._tracer.start_span(
            f"execute_tool {call.tool}",
            context=trace.set_span_in_context(opened.span),
            kind=SpanKind.INTERNAL,
            attributes=attributes,
        )
        opened.tools[call.call_id] = span, True

    def tool_stopped(self, call: ToolCall, duration_s: float, status: str) -> None:
        """End the tool call's span."""
        opened = self._programs.get(call.program) if call.program is not None else None
        span, ours = opened.tools.pop(call.call_id, (None, False)) if opened is not None else (None, False)
        if ours:
            _end(span, status)

    # ---- requests

    def request_started(self, request: LogicalRequest) -> None:
        """Start the request's ``chat`` or ``text_completion`` span."""
        opened = self._of(request.program)
        # Inside a framework's own spans, our span is a child of the current span.
        foreign = opened is None or not opened.ours
        nested = foreign and trace.get_current_span().get_span_context().is_valid
        around = None if opened is None or nested else trace.set_span_in_context(opened.span)
        operation = next(
            (word for end, word in _OPERATIONS.items() if (request.path or "").endswith(end)), "chat"
        )
        attributes = {
            **self._whose(request.program),
            semantic_conventions.OPERATION: operation,
            **_server(request.host),
        }
        if request.model is not None:
            attributes[semantic_conventions.REQUEST_MODEL] = request.model
        if request.id:
            attributes["sojourn.request_id"] = request.id
        if request.node is not None:
            attributes["sojourn.node"] = request.node
        started_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {request.model}" if request.model else operation,
            context=around,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=started_ns,
        )
        self._requests[request] = _OpenRequest(span, started_ns)

    def request_first_byte(self, request: LogicalRequest) -> None:
        """Record in the span the time to the first chunk of a streamed answer."""
        asked = self._requests.get(request)
        if asked is not None:
            asked.span.set_attribute(semantic_conventions.REQUEST_STREAM, True)
            asked.span.set_attribute(
                semantic_conventions.FIRST_CHUNK_S, (time.time_ns() - asked.started_ns) / 1e9
            )

    def request_ended(self, request: LogicalRequest, how: str) -> None:
        """End the request's span once the server's outcome is fetched or known to be unavailable. The span's
        end time is the time of this call."""
        ended_ns = time.time_ns()
        asked = self._requests.pop(request, None)
        if asked is None:
            return
        span, usage = asked.span, request.usage or TokenUsage()
        if request.attempts > 1:
            span.set_attribute("sojourn.request.attempts", request.attempts)
        error = request.error

        def finish(turn: Turn | None) -> None:
            if turn is not None:
                span.set_attributes(outcome_attributes(turn))
                _add_decisions(span, turn, ended_ns)
            span.set_attributes(_usage_attributes(usage, turn or {}))
            _end(span, how, error, ended_ns)

        session = runtime.session()
        server, config = session.server, session.config
        if (
            self._outcomes is None
            or request.program.implicit
            or config is None
            or server is None
            or server.dialect.name != "sojourn"
            or request.host != config.host
            # Another server of ``Config.hosts`` may have the same host and port, and another path.
            or not getattr(request, "to_event_server", True)
        ):
            finish(None)
        else:
            self._outcomes.put(config, request.program.id, request.id, finish)
            if not request.program.is_open:
                self._outcomes.program_ended(request.program.id)


def outcome_attributes(turn: Turn) -> dict[str, Any]:
    """Return the ``sojourn.*`` attributes for one turn of the server's ledger. Unknown and invalid fields are
    left out."""
    found: dict[str, Any] = {}
    for name, key, kinds in _FACTS:
        value = turn.get(key)
        if type(value) in kinds:
            found[name] = value
    seconds, tokens = _mapping(turn.get("seconds")), _mapping(turn.get("tokens"))
    for part in ("queued", "prefilling"):
        if type(seconds.get(part)) in (int, float):
            found[f"sojourn.{part}_s"] = seconds[part]
    for name in ("new", "tail"):
        if type(tokens.get(name)) is int:
            found[f"sojourn.{name}_tokens"] = tokens[name]
    for tier, count in _tiers(tokens).items():
        found[f"sojourn.tier_hits.{tier}"] = count
    if tokens:
        lost = {
            str(cause): n for cause, n in _mapping(tokens.get("lost")).items() if type(n) is int and n > 0
        }
        found["sojourn.lost_tokens"] = sum(lost.values())
        if lost:
            found["sojourn.lost_cause"] = max(lost, key=lambda cause: (lost[cause], cause))
    return found


MAX_DECISIONS = 16
"""Maximum number of decisions in a request's span; the oldest are left out."""


def _add_decisions(span: Any, turn: Turn, ended_ns: int) -> None:
    """Add the server's decisions about the turn and about the gap after it to the span, as span events.

    The times of the decisions are on the engine's clock. To convert them, the end of the turn on that clock
    is taken as the end of the span.
    """
    wall_s, arrived_s = _mapping(turn.get("seconds")).get("wall"), turn.get("arrived_s")
    decisions = turn.get("decisions")
    if not (isinstance(wall_s, _NUMBERS) and isinstance(arrived_s, _NUMBERS) and isinstance(decisions, list)):
        return
    for decision in decisions[-MAX_DECISIONS:]:
        terms = {
            f"sojourn.decision.{name}": value
            for name, value in decision.items()
            if name != "at_s" and type(value) in (int, float, str, bool)
        }
        since_end_s = decision["at_s"] - (arrived_s + wall_s)
        span.add_event("sojourn.decision", terms, timestamp=ended_ns + round(since_end_s * 1e9))


_NUMBERS = (int, float)
_FACTS = (
    ("sojourn.turn", "turn", (int,)),
    ("sojourn.outcome", "outcome", (str,)),
    ("sojourn.leased", "leased", (bool,)),
    ("sojourn.lease.ttl_s", "lease_ttl_s", (int, float)),
    ("sojourn.gap_s", "gap_s", (int, float)),
    ("sojourn.tool_before", "tool_before", (str,)),
    ("sojourn.preemptions", "preemptions", (int,)),
)
_NO_TIERS = frozenset({"prompt", "new", "tail", "lost"})


def _usage_attributes(usage: TokenUsage, turn: Turn) -> dict[str, int]:
    """Return the token counts of the answer as attributes. Counts that the answer lacks come from ``turn``,
    the server's ledger entry."""
    tokens = _mapping(turn.get("tokens"))
    found = {
        semantic_conventions.INPUT_TOKENS: (usage.input_tokens, tokens.get("prompt")),
        semantic_conventions.OUTPUT_TOKENS: (usage.output_tokens, turn.get("output_tokens")),
        semantic_conventions.CACHED_TOKENS: (
            usage.cached_tokens,
            sum(_tiers(tokens).values()) if tokens else None,
        ),
    }
    chosen = {name: theirs if theirs is not None else ours for name, (theirs, ours) in found.items()}
    return {name: value for name, value in chosen.items() if type(value) is int}


def _tiers(tokens: Mapping[str, Any]) -> dict[str, int]:
    return {name: n for name, n in tokens.items() if name not in _NO_TIERS and type(n) is int}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _server(host: str | None) -> dict[str, Any]:
    name, _, port = (host or "").rpartition(":")
    return (
        {semantic_conventions.SERVER_ADDRESS: name, semantic_conventions.SERVER_PORT: int(port)}
        if name and port.isascii() and port.isdigit()
        else {}
    )


def _end(span: Any, status: str, error: str | None = None, ended_ns: int | None = None) -> None:
    span.set_attribute("sojourn.status", status)
    if status in _FAILED:
        kind = error or ("timeout" if status == "timeout" else "_OTHER")
        span.set_attribute(semantic_conventions.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_time=ended_ns)


_exports: weakref.WeakKeyDictionary[Any, SpanExport] = weakref.WeakKeyDictionary()


def export_spans(tracer_provider: Any = None, *, outcomes: bool = True, provider: str = "vllm") -> SpanExport:
    """Start writing spans to ``tracer_provider`` (by default the global provider), and return the export.

    ``outcomes=False`` fetches no outcomes. ``provider`` is the spans' ``gen_ai.provider.name``. The export's
    ``close()`` stops it; until then, a second call returns the same export. Raises ``ConfigError`` if there
    is no tracer provider yet.
    """
    target = tracer_provider if tracer_provider is not None else trace.get_tracer_provider()
    if isinstance(target, trace.ProxyTracerProvider):
        raise ConfigError(semantic_conventions.NO_PROVIDER_MESSAGE)
    export = _exports.get(target)
    if export is None:
        tracer = target.get_tracer(semantic_conventions.SCOPE)
        export = _exports[target] = SpanExport(tracer, provider, OutcomeFetcher() if outcomes else None)
        # Runs before the provider's exit hook, which was registered earlier. After that hook, the provider
        # accepts no spans.
        atexit.register(export.close)
        add_listener(export)
    return export
