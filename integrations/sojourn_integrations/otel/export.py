"""Writes programs, requests and tool calls as OpenTelemetry spans of the GenAI conventions.

    export = sojourn_integrations.otel.export_spans()      # to the global TracerProvider

A program becomes an ``invoke_agent`` span, a request a ``chat`` span, a tool call an ``execute_tool`` span.
The span of a sub-agent is a child of the tool call in which it runs. The span of a request ends once the
server's outcome (cached tokens, lost tokens with the cause, the lease) is fetched and added as ``sojourn.*``
attributes. Prompts, arguments and outputs are never exported.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from sojourn import runtime
from sojourn.config import Config
from sojourn.errors import ConfigError
from sojourn.http_transport import HttpTransport
from sojourn.listeners import ProgramListener, add_listener, remove_listener
from sojourn.outgoing_request import LogicalRequest
from sojourn.process_hooks import register_at_fork
from sojourn.program import Program
from sojourn.token_usage import TokenUsage
from sojourn.tools import ToolCall

from sojourn_integrations.safe_scope import count_error, guarded

from .source import NO_PROVIDER_MESSAGE, SCOPE, is_unexported

EVERY_REQUESTS = 8
"""Number of a program's waiting requests after which their outcomes are fetched. They are also fetched at the
program's end, and after ``IDLE_FETCH_S`` in which nothing was fetched."""
IDLE_FETCH_S = 5.0
MAX_PENDING = 2_000
"""Maximum number of programs whose requests wait. Requests of further ones get no outcome."""
RETRY_S = 0.7
"""Delay before the only retry, for a request that the server's ledger did not have yet."""
FETCH_TIMEOUT_S = 2.0
PAUSE_S = 5.0
"""Seconds after a server error during which no outcome is fetched."""

Turn = Mapping[str, Any]
"""An entry of the server's ledger of turns."""
_FAILED = {"error", "timeout", "failed"}
"""Statuses that count as errors. ``cancelled`` and ``nonzero`` do not."""
_FACTS = {
    "turn": int, "outcome": str, "leased": bool, "lease_ttl_s": float, "gap_s": float, "tool_before": str,
    "preemptions": int,
}  # fmt: skip


class _OpenProgram:
    """The spans of one open program."""

    __slots__ = ("__weakref__", "span", "tools")

    def __init__(self, span: Any) -> None:
        self.span = span
        self.tools: dict[str, Any] = {}
        """Id of a tool call in progress → its span."""


class _Waiting(NamedTuple):
    """A request that has ended and waits for its outcome. ``finish`` ends its span."""

    config: Config
    request_id: str
    finish: Callable[[Turn | None], None]


class SpanExport(ProgramListener):
    """Writes programs, requests and tool calls as spans. ``export_spans()`` creates it. There is no lock,
    since garbage collection may end a request on a thread that holds it."""

    wants_usage = True

    def __init__(self, tracer: Any, provider: str, outcomes: bool) -> None:
        self._tracer = tracer
        self._provider = provider
        self._outcomes = outcomes
        # Weak, so that a program dropped without an end leaves nothing here. Its span is never exported.
        self._programs: weakref.WeakKeyDictionary[Program, _OpenProgram] = weakref.WeakKeyDictionary()
        self._foreign: weakref.WeakSet[Program] = weakref.WeakSet()
        """Programs whose spans a framework writes. Requests in them are below the current span."""
        self._by_id: weakref.WeakValueDictionary[str, _OpenProgram] = weakref.WeakValueDictionary()
        self._requests: weakref.WeakKeyDictionary[LogicalRequest, tuple[Any, int]]
        self._requests = weakref.WeakKeyDictionary()
        """Request in progress → (its span, start in Unix nanoseconds)."""
        self._quiet_until_s = 0.0
        self._reset()
        forget = weakref.WeakMethod(self._reset)
        register_at_fork(after_in_child=lambda: (reset := forget()) and reset())

    def _reset(self) -> None:
        # Also runs in a forked child. The parent finishes the requests.
        self._waiting: dict[str, list[_Waiting]] = {}
        """Program id → its requests that wait for their outcomes."""
        self._due: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        """For the thread: a program whose outcomes to fetch; an event to set once all are fetched; ``None``
        to end."""
        self._thread: threading.Thread | None = None

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Fetch all outcomes now, which ends the spans of the finished requests. Waits at most ``timeout_s``,
        and returns False if that time passed first."""
        done = threading.Event()
        if self._thread is not None or self._waiting:
            self._send(done)
            return done.wait(timeout_s)
        return True

    def close(self) -> None:
        """Stop the export. The spans of finished requests end. The spans of open programs are not
        exported."""
        remove_listener(self)
        atexit.unregister(self.close)
        for target, export in list(_exports.items()):
            if export is self:
                del _exports[target]
        self.flush(3.0)
        self._quiet_until_s = float("inf")
        for program_id in list(self._waiting):  # what is left ends without an outcome
            self._fetch(program_id)
        self._due.put(None)

    # ---- programs and tools

    def program_started(self, program: Program) -> None:
        """Start the program's ``invoke_agent`` span. An implicit program gets no span. A program that
        ``source`` made from a span gets no second one."""
        if is_unexported.now:
            self._foreign.add(program)
        self._of(program)

    def program_ended(self, program: Program, status: str) -> None:
        """End the program's span, and fetch the outcomes of its requests."""
        opened = self._programs.pop(program, None)
        if opened is not None:
            for span in opened.tools.values():
                _end(span, "cancelled")
            _end(opened.span, status)
        if program.id in self._waiting:
            self._send(program.id)

    def _of(self, program: Program | None) -> _OpenProgram | None:
        """Return the spans of a program, which may have begun before the export did; ``None`` if it has
        none."""
        if program is None or program.implicit or program in self._foreign:
            return None
        opened = self._programs.get(program)
        if opened is not None or not program.is_open:
            return opened
        label = program.name or program.agent_type
        parent = self._by_id.get(program.parent_id or "")
        around = parent and parent.tools.get(program.call_id or "", parent.span)
        attributes = {
            **self._whose(program),
            "gen_ai.operation.name": "invoke_agent",
            "sojourn.parent_program_id": program.parent_id,
            "sojourn.root_program_id": program.root_id,
            "sojourn.tenant": program.tenant,
        }
        name = f"invoke_agent {label}" if label else "invoke_agent"
        opened = _OpenProgram(self._span(name, around, attributes))
        self._programs[program] = self._by_id[program.id] = opened
        return opened

    def _whose(self, program: Program) -> dict[str, Any]:
        id = None if program.implicit else program.id
        return {
            "gen_ai.provider.name": self._provider,
            "gen_ai.conversation.id": id,
            "gen_ai.agent.id": id,
            "gen_ai.agent.name": None if program.implicit else program.name or program.agent_type,
        }

    def _span(self, name: str, around: Any, attributes: dict[str, Any], **more: Any) -> Any:
        """Start a span inside the span ``around``; ``None`` means the current span."""
        given = {key: value for key, value in attributes.items() if value is not None}
        inside = None if around is None else trace.set_span_in_context(around)
        return self._tracer.start_span(name, context=inside, attributes=given, **more)

    def tool_started(self, call: ToolCall) -> None:
        """Start the tool call's ``execute_tool`` span."""
        program, opened = call.program, self._of(call.program)
        if opened is None or program is None or is_unexported.now:
            return
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.tool,
            "gen_ai.tool.call.id": call.call_id,
            "gen_ai.tool.type": "function",
            "gen_ai.conversation.id": program.id,
            "sojourn.tool.class": call.tool_class,
            "sojourn.node": program.node,
        }
        opened.tools[call.call_id] = self._span(f"execute_tool {call.tool}", opened.span, attributes)

    def tool_stopped(self, call: ToolCall, duration_s: float, status: str) -> None:
        """End the tool call's span."""
        opened = self._programs.get(call.program) if call.program is not None else None
        span = opened.tools.pop(call.call_id, None) if opened is not None else None
        if span is not None:
            _end(span, status)

    # ---- requests

    def request_started(self, request: LogicalRequest) -> None:
        """Start the request's ``chat`` or ``text_completion`` span."""
        opened = self._of(request.program)
        path = request.path or ""
        is_chat = not path.endswith("/completions") or path.endswith("/chat/completions")
        operation = "chat" if is_chat else "text_completion"
        host, _, port = (request.host or "").rpartition(":")
        attributes = {
            **self._whose(request.program),
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": request.model,
            "server.address": host or None,
            "server.port": int(port) if host and port.isascii() and port.isdigit() else None,
            "sojourn.request_id": request.id or None,
            "sojourn.node": request.node,
        }
        name, now_ns = f"{operation} {request.model}" if request.model else operation, time.time_ns()
        around = None if opened is None else opened.span
        span = self._span(name, around, attributes, kind=SpanKind.CLIENT, start_time=now_ns)
        self._requests[request] = span, now_ns

    def request_first_byte(self, request: LogicalRequest) -> None:
        """Record in the span the time to the first chunk of a streamed answer."""
        span, started_ns = self._requests.get(request, (None, 0))
        if span is not None:
            span.set_attribute("gen_ai.request.stream", True)
            after_s = (time.time_ns() - started_ns) / 1e9
            span.set_attribute("gen_ai.response.time_to_first_chunk", after_s)

    def request_ended(self, request: LogicalRequest, how: str) -> None:
        """End the request's span once the server's outcome is fetched or known to be unavailable. The span's
        end time is the time of this call."""
        span, _ = self._requests.pop(request, (None, 0))
        if span is None:
            return
        if request.attempts > 1:
            span.set_attribute("sojourn.request.attempts", request.attempts)
        finish = partial(_finish, span, request.usage or TokenUsage(), how, request.error, time.time_ns())
        session, program = runtime.session(), request.program
        config = session.config
        if (
            not self._outcomes
            or program.implicit
            or config is None
            or session.server is None
            or session.server.dialect.name != "sojourn"
            or request.host != config.host
            # Another server of ``Config.hosts`` may have the same host and port, and another path.
            or not getattr(request, "to_event_server", True)
        ):
            finish(None)
        elif len(self._waiting) >= MAX_PENDING or time.monotonic() < self._quiet_until_s:
            count_error("otel_outcomes_skipped")
            finish(None)
        else:
            waiting = self._waiting.setdefault(program.id, [])
            waiting.append(_Waiting(config, request.id, finish))
            if self._waiting.get(program.id) is not waiting:
                finish(None)  # the others were fetched meanwhile, perhaps without this request
            elif len(waiting) >= EVERY_REQUESTS or not program.is_open:
                self._send(program.id)
            else:
                self._start()

    # ---- the server's outcomes

    def _send(self, message: str | threading.Event) -> None:
        self._due.put(message)
        if not self._start() and isinstance(message, threading.Event):
            message.set()

    def _start(self) -> bool:
        """Start the thread, if there is none. If it cannot start, because the interpreter ends, end the spans
        of all waiting requests without outcomes, and return False."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sojourn-otel-outcomes", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._quiet_until_s = float("inf")
                for program_id in list(self._waiting):
                    self._fetch(program_id)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            try:
                message = self._due.get(timeout=IDLE_FETCH_S)
            except Empty:
                message = threading.Event()  # fetch all
            if message is None:
                return
            for program_id in [message] if isinstance(message, str) else list(self._waiting):
                self._fetch(program_id)
            if isinstance(message, threading.Event):
                message.set()

    def _fetch(self, program_id: str) -> None:
        """Fetch the outcomes of a program's requests, and end their spans. Never raises."""
        waiting = self._waiting.pop(program_id, [])
        turns: dict[str, Turn] = {}
        for pause_s in (0.0, RETRY_S):
            if waiting and time.monotonic() >= self._quiet_until_s:
                time.sleep(pause_s)
                try:
                    turns = _turns(waiting[-1].config, program_id)
                except Exception:
                    self._quiet_until_s = time.monotonic() + PAUSE_S
                    count_error("otel_outcomes_failed")
            if all(each.request_id in turns for each in waiting):
                break
        for each in waiting:
            each.finish(turns.get(each.request_id))


def _turns(config: Config, program_id: str) -> dict[str, Turn]:
    """Return the program's turns in the server's ledger, by the client's request id. Raises on a server
    error."""
    # Keep this request out of the user's traces.
    inside = otel_context.set_value("suppress_instrumentation", True)
    token = otel_context.attach(otel_context.set_value("suppress_http_instrumentation", True, inside))
    transport = HttpTransport(config.url, api_key=config.api_key, timeout_s=FETCH_TIMEOUT_S)
    try:
        answer = transport.get("/sojourn/v1/programs/" + quote(program_id, safe=""), FETCH_TIMEOUT_S)
    finally:
        transport.close()
        otel_context.detach(token)
    if answer.status in (404, 429):
        return {}  # unknown by now, or rate-limited
    if answer.status != 200:
        raise ConnectionError(f"status {answer.status}")
    turns = msgspec.json.decode(answer.body).get("ledger") or ()
    return {turn["request_id"]: turn for turn in turns if isinstance(turn.get("request_id"), str)}


@guarded
def _finish(
    span: Any, usage: TokenUsage, how: str, error: str | None, ended_ns: int, turn: Turn | None
) -> None:
    if not span.is_recording():
        return  # finished before
    span.set_attributes(outcome_attributes(usage, turn or {}))
    _end(span, how, error, ended_ns)


def outcome_attributes(usage: TokenUsage, turn: Turn) -> dict[str, Any]:
    """Return the token counts of the answer, and the ``sojourn.*`` attributes of ``turn``. Token counts that
    the answer lacks come from ``turn``. Unknown and invalid fields are left out."""
    found: dict[str, Any] = {}
    for key, kind in _FACTS.items():
        value = turn.get(key)
        if type(value) is kind or (kind is float and type(value) is int):
            found["sojourn.lease.ttl_s" if key == "lease_ttl_s" else f"sojourn.{key}"] = value
    seconds, tokens = _mapping(turn.get("seconds")), _mapping(turn.get("tokens"))
    for part in ("queued", "prefilling"):
        if type(seconds.get(part)) in (int, float):
            found[f"sojourn.{part}_s"] = seconds[part]
    lost = {cause: n for cause, n in _mapping(tokens.get("lost")).items() if type(n) is int and n > 0}
    counts = {name: n for name, n in tokens.items() if type(n) is int}
    prompt, new, tail = (counts.pop(name, None) for name in ("prompt", "new", "tail"))
    found |= {f"sojourn.tier_hits.{tier}": n for tier, n in counts.items()}
    found |= {"sojourn.new_tokens": new, "sojourn.tail_tokens": tail}
    if tokens:
        found["sojourn.lost_tokens"] = sum(lost.values())
        found["sojourn.lost_cause"] = max(lost, key=lambda cause: (lost[cause], cause), default=None)
    for name, theirs, ours in (
        ("input_tokens", usage.input_tokens, prompt),
        ("output_tokens", usage.output_tokens, turn.get("output_tokens")),
        ("cache_read.input_tokens", usage.cached_tokens, sum(counts.values()) if tokens else None),
    ):
        found[f"gen_ai.usage.{name}"] = ours if theirs is None else theirs
    return {name: value for name, value in found.items() if type(value) in (int, float, str, bool)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _end(span: Any, status: str, error: str | None = None, ended_ns: int | None = None) -> None:
    span.set_attribute("sojourn.status", status)
    if status in _FAILED:
        span.set_attribute("error.type", error or ("timeout" if status == "timeout" else "_OTHER"))
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
        raise ConfigError(NO_PROVIDER_MESSAGE)
    export = _exports.get(target)
    if export is None:
        export = _exports[target] = SpanExport(target.get_tracer(SCOPE), provider, outcomes)
        # Runs before the provider's exit hook, which was registered earlier. After that hook, the provider
        # accepts no spans.
        atexit.register(export.close)
        add_listener(export)
    return export
