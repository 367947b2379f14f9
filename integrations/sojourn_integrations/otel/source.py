"""Reads programs, nodes and tool calls from the OpenTelemetry spans of any framework.

    trace.set_tracer_provider(provider)
    sojourn_integrations.otel.install()     # or provider.add_span_processor(SojournSpanProcessor())

The outermost agent or workflow of a trace becomes a program. An agent inside a tool call becomes a child
program, an agent inside an agent becomes a node, and a tool becomes a tool call. A request belongs to the
program of the current span. Spans of frameworks with an adapter of their own are ignored. Spans that are not
sampled never reach a processor.

Every method runs on the agent's thread and never raises.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import weakref
from collections import OrderedDict
from typing import Any

import sojourn
from sojourn import instrumentation, runtime
from sojourn.errors import CANCELLED_BY, ConfigError, status_of
from sojourn.program import (
    CallInProgress,
    Program,
    ResolvedContext,
    add_resolver,
    find_context,
    live_context,
    remove_resolver,
)
from sojourn.tools import ToolCall

from sojourn_integrations.langchain.thread_program_ids import thread_program_id
from sojourn_integrations.safe_scope import count_error

from . import semantic_conventions

try:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import StatusCode
except ImportError as error:
    raise ImportError(semantic_conventions.SDK_MISSING_MESSAGE) from error

MAX_SPANS = 10_000
_REQUESTS_ONLY = frozenset({"openai", "litellm"})
"""Adapters that report requests but no programs. So ``source`` does not ignore the spans of these
frameworks."""

_UNMOVED: Any = object()
"""Value of ``_Entry.before`` for a span that did not change the program's node."""

Key = tuple[int, int]
"""Trace id and span id."""


class _Entry:
    """One open span inside a program."""

    __slots__ = (
        "above", "before", "call", "caught", "kind", "node", "outer_program", "owns", "program", "under",
    )  # fmt: skip

    def __init__(self, kind: str | None, above: _Entry | None, above_key: Key | None) -> None:
        self.kind = kind
        """Kind of the span; ``None`` for a span that stands for no agent, workflow, step, tool or model."""
        self.above = above_key if above is not None else None
        """Key of the parent span; ``None`` if that span has no entry."""
        self.program: Program | None = above.program if above is not None else None
        """The span's program; ``None`` if another adapter or the user reports this part of the run."""
        self.outer_program: Program | None = (
            above.outer_program if above is not None else live_context().program
        )
        """The program in the SDK's context variable when ``program`` was found. If the variable later has a
        program other than ``outer_program`` and ``program``, code opened that program inside the span."""
        self.node: str | None = above.node if above is not None else None
        self.under: CallInProgress | None = above.under if above is not None else None
        """The innermost tool call around the span in the same program. For a tool's span, the tool's own
        call."""
        self.owns = False
        """True if the program stays open until this span ends."""
        self.call: ToolCall | None = None
        """The tool call that this span started."""
        self.before: Any = _UNMOVED
        """Node of the program before this span changed it; ``_UNMOVED`` if the span did not change it."""
        self.caught = id(sys.exc_info()[1])
        """``id()`` of the exception that was being handled when the span started. That exception is not an
        error of this span."""


class SojournSpanProcessor(SpanProcessor):
    """Reports programs, nodes and tool calls as spans start and end.

    - ``workflows``: names of spans that mark a run although no attribute says so, such as your own
      ``run_team``.
    - ``adopt``: whether spans also report tools and nodes inside a program that your code opened with
      ``sojourn.program()``. By default only your code reports in such a program.
    - ``max_spans``: maximum number of open spans. Beyond it the least recently used spans are dropped, and
      their programs end.
    """

    def __init__(
        self, *, workflows: tuple[str, ...] = (), adopt: bool = False, max_spans: int = MAX_SPANS
    ) -> None:
        self._workflows = frozenset(workflows)
        self._adopt = adopt
        self._max_spans = max_spans
        # No lock, since each access is one atomic operation of a dict. A lock could deadlock with the
        # event sender's lock, since a garbage collection may end a span while either lock is held.
        self._spans: OrderedDict[Key, _Entry] = OrderedDict()
        self._programs: dict[str, tuple[Program, set[Key]]] = {}
        """Programs opened here, by id, and the spans that keep each program open."""
        self._late: dict[Key, object] = {}
        """Open spans whose attributes came after their start. The thread that adds a span here first reports
        the span."""
        self._scopes: dict[str, frozenset[str]] = {}
        self._listening = False
        self.closed = False
        """True once the processor is shut down."""
        self._thread = threading.local()

    # ---- what OpenTelemetry calls

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Report the program, node or tool call that the starting span stands for, if any."""
        try:
            if self.closed or not runtime.session().online or _scope(span) == semantic_conventions.SCOPE:
                return
            self._started(span, trace.get_current_span(parent_context))
        except Exception:
            count_error("internal_error")

    def on_end(self, span: Any) -> None:
        """End the program, node or tool call that was reported for the span."""
        try:
            key = _key(span.context)
            self._late.pop(key, None)
            entry = self._spans.pop(key, None)
            if entry is not None:
                self._ended(span, entry)
        except Exception:
            count_error("internal_error")

    def shutdown(self) -> None:
        """Drop all state. Programs that are still open end as cancelled."""
        self.closed = True
        remove_resolver(self._resolve)
        try:
            spans, self._spans = self._spans, OrderedDict()
            for key, entry in reversed(spans.items()):
                self._forget(key, entry)
        except Exception:
            count_error("internal_error")

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True, since nothing is buffered here; ``sojourn.flush()`` sends the events."""
        return True

    # ---- what the SDK calls

    def _resolve(self) -> ResolvedContext | None:
        """Return the program and node of the current span, for the requests made inside the span. Returns
        ``None`` if the span has no open program, or if code opened another program inside the span."""
        if getattr(self._thread, "quiet", False):
            return None
        span = trace.get_current_span()
        context = span.get_span_context()
        if not context.is_valid:
            return None
        entry = self._spans.get(_key(context))
        if (entry is None or entry.kind is None) and span.is_recording():
            entry = self._catch_up(span, entry)
        if entry is None or entry.program is None or not entry.program.is_open:
            return None
        program = live_context().program
        if program is not None and program is not entry.outer_program and program is not entry.program:
            return None
        return ResolvedContext(entry.program, entry.node)

    # ---- one span

    def _started(self, span: Any, parent: Any) -> None:
        if not self._listening:
            self._listening = True
            add_resolver(self._resolve)
        context = parent.get_span_context()
        above = None
        if context.is_valid:
            above = self._touch(_key(context))
            if (above is None or above.kind is None) and parent.is_recording():
                above = self._catch_up(parent, above)
        meaning = self._meaning(span)
        if above is not None or meaning is not None:
            self._enter(span, meaning, above)

    def _catch_up(self, span: Any, entry: _Entry | None) -> _Entry | None:
        """Report a span whose attributes were set after its start. ``entry`` is the span's entry so far, if
        any. Returns the span's entry afterwards; ``None`` if it still has none."""
        if self.closed or _scope(span) == semantic_conventions.SCOPE or not runtime.session().online:
            return entry
        meaning = self._meaning(span)
        if meaning is None or meaning.kind == semantic_conventions.MODEL:
            return entry
        key, claim = _key(span.get_span_context()), object()
        if self._late.setdefault(key, claim) is not claim:
            return self._spans.get(key)
        above = entry
        if above is None and span.parent is not None:
            above = self._touch(_key(span.parent))
        taken = self._enter(span, meaning, above)
        if taken is None or taken.kind is None:
            self._late.pop(key, None)
        return taken

    def _meaning(self, span: Any) -> semantic_conventions.SpanMeaning | None:
        if span.name in self._workflows:
            return semantic_conventions.SpanMeaning(semantic_conventions.WORKFLOW, span.name)
        return semantic_conventions.meaning(span.name, span.attributes)

    def _enter(
        self, span: Any, meaning: semantic_conventions.SpanMeaning | None, above: _Entry | None
    ) -> _Entry | None:
        """Report a span that begins inside the span of ``above``. Returns the new span's entry; ``None`` if
        the new span is part of no program."""
        kind = meaning.kind if meaning is not None else None
        entry = _Entry(kind, above, _key(span.parent) if span.parent is not None else None)
        if (
            meaning is None
            or kind == semantic_conventions.MODEL
            or (above is not None and above.program is None)
        ):
            return None if above is None else self._remember(span, entry)
        outer = self._enclosing_program()
        if (outer is not None and not self._adopt) or self._has_adapter(_scope(span)):
            entry.program = None
            return self._remember(span, entry)
        here = live_context()
        if outer is not None and (
            entry.program is None
            or outer.depth > entry.program.depth
            or (outer is here.program and outer is not entry.outer_program)
        ):
            call = here.tool_call
            entry.program, entry.node = outer, None
            entry.under = call if call is not None and call.program is outer else None
        entry.outer_program = here.program
        if kind == semantic_conventions.TOOL:
            if entry.program is None:
                return None
            self._open_call(span, entry, meaning)
        elif entry.program is None or entry.under is not None:
            self._open_program(span, entry, meaning)
        elif meaning.is_node and meaning.name is not None:
            entry.before, entry.node = entry.program.node, meaning.name
            entry.program.enter_node(meaning.name)
        return self._remember(span, entry)

    def _open_program(self, span: Any, entry: _Entry, meaning: semantic_conventions.SpanMeaning) -> None:
        name, parent, call = meaning.name or "agent", entry.program, entry.under
        id = None
        if parent is None and meaning.conversation:
            id = thread_program_id("gen_ai.conversation", None, meaning.conversation, "")
        held = self._programs.get(id) if id is not None else None
        key = _key(span.get_span_context())
        entry.owns, entry.under, entry.node = True, None, None
        if held is not None and held[0].is_open:
            # A second agent in an open conversation becomes a node of the same program.
            entry.program, entry.before, entry.node = held[0], held[0].node, meaning.name
            held[1].add(key)
            held[0].enter_node(name)
            return
        program = sojourn.program(name, id=id, agent_type=name, parent=parent).make()
        if call is not None:
            program.call_id = call.call_id
        entry.program = program
        self._programs[program.id] = program, {key}
        with _ReportingSpan(span):
            program.start()

    def _open_call(self, span: Any, entry: _Entry, meaning: semantic_conventions.SpanMeaning) -> None:
        program, outer = entry.program, entry.under
        if meaning.name is None or program is None:
            entry.kind = None  # its attributes may come later
            return
        call = ToolCall(meaning.name, meaning.call_id, tool_class=meaning.tool_type, program=program)
        if outer is not None and (
            outer.call_id == call.call_id
            or (outer.tool == call.tool and (meaning.call_id is None or outer.call_id.startswith("t-")))
        ):
            return  # two instrumentations report one call
        entry.under = call
        if call.call_id in program.running_tools:
            return  # reported elsewhere; here the call is only the parent of programs inside
        entry.call = call
        with _ReportingSpan(span):
            call.start()

    def _ended(self, span: Any, entry: _Entry) -> None:
        program = entry.program
        if program is None:
            return
        if entry.before is not _UNMOVED and program.node == entry.node:
            program.node = entry.before
        if entry.call is not None:
            with _ReportingSpan(span):
                entry.call.stop(_status(span, entry.caught))
        elif entry.kind is None:
            self._late_call(span, entry, program)
        if entry.owns:
            status = _status(span, entry.caught)
            with _ReportingSpan(span):
                self._release(_key(span.context), program, "error" if status == "timeout" else status)

    def _late_call(self, span: Any, entry: _Entry, program: Program) -> None:
        """Report the tool call of a span that got its attributes only at its end."""
        meaning = semantic_conventions.meaning(span.name, span.attributes)
        if meaning is None or meaning.kind != semantic_conventions.TOOL or span.start_time is None:
            return
        call = ToolCall(
            meaning.name or "tool", meaning.call_id, tool_class=meaning.tool_type, program=program
        )
        if call.call_id not in program.running_tools:
            with _ReportingSpan(span):
                call.start()
                call.stop(_status(span, entry.caught), duration_s=(span.end_time - span.start_time) / 1e9)

    def _release(self, key: Key, program: Program, status: str) -> None:
        """Remove the span ``key`` from the spans that keep ``program`` open. If none is left, end the program
        with ``status``."""
        held = self._programs.get(program.id)
        if held is not None and held[0] is program:
            held[1].discard(key)
            if held[1]:
                return
            self._programs.pop(program.id, None)
        program.end(status)

    # ---- bookkeeping

    def _touch(self, key: Key) -> _Entry | None:
        """Return the entry of a span, and mark the span and the spans around it as recently used."""
        found = self._spans.get(key)
        entry, at = found, key
        while entry is not None:
            with contextlib.suppress(KeyError):  # another thread has just ended it
                self._spans.move_to_end(at)
            if entry.above is None:
                break
            at = entry.above
            entry = self._spans.get(at)
        return found

    def _remember(self, span: Any, entry: _Entry) -> _Entry:
        self._spans[_key(span.get_span_context())] = entry
        while len(self._spans) > self._max_spans:
            self._forget(*self._spans.popitem(last=False))
        return entry

    def _forget(self, key: Key, entry: _Entry) -> None:
        self._late.pop(key, None)
        if entry.call is not None:
            entry.call.stop("cancelled")
        if entry.owns and entry.program is not None:
            self._release(key, entry.program, "cancelled")

    def _enclosing_program(self) -> Program | None:
        """Return the program around the running code; ``None`` if there is none. Implicit programs and
        programs that this processor opened do not count."""
        self._thread.quiet = True
        try:
            program = find_context(runtime.session().counters)[0].program
        finally:
            self._thread.quiet = False
        if program is None or program.implicit:
            return None
        held = self._programs.get(program.id)
        return None if held is not None and held[0] is program else program

    def _has_adapter(self, scope: str) -> bool:
        """Return whether the instrumentation scope ``scope`` belongs to a framework that an active adapter
        already reports."""
        parts = self._scopes.get(scope)
        if parts is None:
            parts = frozenset(_word(part) for part in scope.split("."))
            if len(self._scopes) < 1000:
                self._scopes[scope] = parts
        for name in instrumentation.active():
            framework = instrumentation.FRAMEWORKS.get(name)
            if framework is None or name in _REQUESTS_ONLY:
                continue
            for word in map(_word, (name, framework.package, *framework.related_packages)):
                if any(part == word or part.startswith(word + "_") for part in parts):
                    return True
        return False


_installed: weakref.WeakKeyDictionary[Any, SojournSpanProcessor] = weakref.WeakKeyDictionary()


def install(tracer_provider: Any = None, **options: Any) -> SojournSpanProcessor:
    """Add a ``SojournSpanProcessor(**options)`` to ``tracer_provider`` (by default the global provider).

    Returns the processor. Until this processor is closed, a further call for the same provider returns it and
    ignores ``options``. Raises ``ConfigError`` if there is no tracer provider yet.
    """
    provider = tracer_provider if tracer_provider is not None else trace.get_tracer_provider()
    if not hasattr(provider, "add_span_processor"):
        raise ConfigError(semantic_conventions.NO_PROVIDER_MESSAGE)
    processor = _installed.get(provider)
    if processor is None or processor.closed:
        processor = _installed[provider] = SojournSpanProcessor(**options)
        provider.add_span_processor(processor)
    return processor


class _ReportingSpan:
    """A ``with`` block around reports that ``source`` derives from ``span``. Inside it, ``export`` writes no
    spans of its own."""

    __slots__ = ("_before", "_span")

    def __init__(self, span: Any) -> None:
        self._span = span
        self._before: Any = None

    def __enter__(self) -> None:
        self._before, semantic_conventions.current_report.span = (
            semantic_conventions.current_report.span,
            self._span,
        )

    def __exit__(self, *error: object) -> None:
        semantic_conventions.current_report.span = self._before


def _key(context: Any) -> Key:
    return context.trace_id, context.span_id


def _scope(span: Any) -> str:
    scope = span.instrumentation_scope
    return scope.name if scope is not None else ""


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _status(span: Any, caught: int) -> str:
    """Return ``ok``, ``error``, ``timeout`` or ``cancelled`` for an ended span. ``caught``: ``id()`` of the
    exception that was already being handled when the span started."""
    attributes = span.attributes or {}
    kind = attributes.get(semantic_conventions.ERROR_TYPE)
    failed = span.status.status_code is StatusCode.ERROR
    if kind is None and failed:
        for event in reversed(span.events):
            if event.name == "exception":
                kind = (event.attributes or {}).get("exception.type")
                break
    if kind is None and not failed:
        # OpenTelemetry does not record a BaseException, but the span ends while it propagates.
        error = sys.exc_info()[1]
        cancelled = error is not None and id(error) != caught and status_of(error) == "cancelled"
        return "cancelled" if cancelled else "ok"
    word = str(kind or "").rpartition(".")[2]
    if word in CANCELLED_BY or word.lower() == "cancelled":
        return "cancelled"
    return "timeout" if "timeout" in word.lower() else "error"
