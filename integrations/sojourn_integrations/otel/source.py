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

import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sojourn
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import StatusCode
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
from sojourn_integrations.safe_scope import guarded

from . import MODEL, TOOL, WORKFLOW, SpanMeaning, meaning_of, text

SCOPE = "sojourn"
"""Instrumentation scope of the spans that ``export`` writes; this module ignores them."""
NO_PROVIDER_MESSAGE = (
    "OpenTelemetry has no TracerProvider yet: call trace.set_tracer_provider(TracerProvider()) first"
)
MAX_SPANS = 10_000
_REQUESTS_ONLY = frozenset({"openai", "anthropic", "litellm"})
"""Adapters that report requests but no programs. So the spans of these frameworks are not ignored."""
_UNMOVED: Any = object()
"""Value of ``_Entry.before`` for a span that did not change the program's node."""

Key = tuple[int, int]
"""Trace id and span id."""


class _Entry:
    """One open span inside a program."""

    __slots__ = ("before", "call", "caught", "kind", "node", "outer_program", "owns", "program", "under")

    def __init__(self, kind: str | None, above: _Entry | None) -> None:
        self.kind = kind
        """Kind of the span; ``None`` for a span that stands for no agent, workflow, step, tool or model."""
        self.program: Program | None = above.program if above is not None else None
        """The span's program; ``None`` if another adapter or the user reports this part of the run."""
        self.outer_program: Program | None = (
            above.outer_program if above is not None else live_context().program
        )
        """The program in the SDK's context variable when ``program`` was found. If the variable later has a
        program other than ``outer_program`` and ``program``, code opened that program inside the span."""
        self.node: str | None = above.node if above is not None else None
        self.under: CallInProgress | None = above.under if above is not None else None
        """The innermost tool call around the span in the same program. For a tool's span, its own call."""
        self.owns = False
        """True if the program stays open until this span ends."""
        self.call: ToolCall | None = None
        """The tool call that this span started."""
        self.before: Any = _UNMOVED
        """Node of the program before this span changed it."""
        self.caught = id(sys.exc_info()[1])
        """``id()`` of the exception that was being handled when the span started. That exception is not an
        error of this span."""


class SojournSpanProcessor(SpanProcessor):
    """Reports programs, nodes and tool calls as spans start and end.

    - ``workflows``: names of spans that mark a run although no attribute says so, such as your own
      ``run_team``.
    - ``max_spans``: maximum number of open spans. Beyond it the spans that began first are dropped, and their
      programs end.
    """

    def __init__(self, *, workflows: tuple[str, ...] = (), max_spans: int = MAX_SPANS) -> None:
        self._workflows = frozenset(workflows)
        self._max_spans = max_spans
        # No lock, since each access is one atomic operation of a dict. A lock could deadlock with the
        # event sender's lock, since a garbage collection may end a span while either lock is held.
        self._spans: OrderedDict[Key, _Entry] = OrderedDict()
        self._programs: dict[str, tuple[Program, set[Key]]] = {}
        """Programs opened here, by id, and the spans that keep each program open."""
        self._late: dict[Key, object] = {}
        """Open spans whose attributes came after their start. The thread that adds a span here first reports
        the span."""
        self._listening = False
        self.closed = False
        """True once the processor is shut down."""
        self._thread = threading.local()

    # ---- what OpenTelemetry and the SDK call

    @guarded
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Report the program, node or tool call that the starting span stands for, if any."""
        if self.closed or not runtime.session().online or _scope(span) == SCOPE:
            return
        if not self._listening:
            self._listening = True
            add_resolver(self._resolve)
        parent = trace.get_current_span(parent_context)
        above = self._entry_of(parent) if parent.get_span_context().is_valid else None
        meaning = self._meaning(span)
        if above is not None or meaning is not None:
            self._enter(span, meaning, above)

    @guarded
    def on_end(self, span: Any) -> None:
        """End the program, node or tool call that was reported for the span."""
        key = _key(span.context)
        self._late.pop(key, None)
        entry = self._spans.pop(key, None)
        if entry is not None and entry.program is not None:
            self._ended(span, entry, entry.program)

    @guarded
    def shutdown(self) -> None:
        """Drop all state. Programs that are still open end as cancelled."""
        self.closed = True
        remove_resolver(self._resolve)
        spans, self._spans = self._spans, OrderedDict()
        for key, entry in reversed(spans.items()):
            self._forget(key, entry)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True, since nothing is buffered here; ``sojourn.flush()`` sends the events."""
        return True

    def _resolve(self) -> ResolvedContext | None:
        """Return the program and node of the current span, for the requests made inside the span. Returns
        ``None`` if the span has no open program, or if code opened another program inside the span."""
        span = trace.get_current_span()
        if getattr(self._thread, "quiet", False) or not span.get_span_context().is_valid:
            return None
        entry = self._entry_of(span)
        if entry is None or entry.program is None or not entry.program.is_open:
            return None
        program = live_context().program
        if program is not None and program is not entry.outer_program and program is not entry.program:
            return None
        return ResolvedContext(entry.program, entry.node)

    # ---- one span

    def _meaning(self, span: Any) -> SpanMeaning | None:
        if span.name in self._workflows:
            return SpanMeaning(WORKFLOW, span.name)
        return meaning_of(span.name, span.attributes)

    def _entry_of(self, span: Any) -> _Entry | None:
        """Return the entry of an open span; ``None`` if it has none. If the span's attributes were set after
        its start, report the span first."""
        key = _key(span.get_span_context())
        entry = self._spans.get(key)
        if (entry is not None and entry.kind is not None) or not span.is_recording():
            return entry
        if self.closed or _scope(span) == SCOPE or not runtime.session().online:
            return entry
        meaning, claim = self._meaning(span), object()
        if meaning is None or meaning.kind == MODEL:
            return entry
        if self._late.setdefault(key, claim) is not claim:
            return self._spans.get(key)
        above = entry
        if above is None and span.parent is not None:
            above = self._spans.get(_key(span.parent))
        taken = self._enter(span, meaning, above)
        if taken is None or taken.kind is None:
            self._late.pop(key, None)
        return taken

    def _enter(self, span: Any, meaning: SpanMeaning | None, above: _Entry | None) -> _Entry | None:
        """Report a span that begins inside the span of ``above``. Returns the new span's entry; ``None`` if
        the new span is part of no program."""
        entry = _Entry(meaning.kind if meaning is not None else None, above)
        if meaning is None or meaning.kind == MODEL or (above is not None and above.program is None):
            return None if above is None else self._remember(span, entry)
        if self._enclosing_program() is not None or _has_adapter(_scope(span)):
            entry.program = None
            return self._remember(span, entry)
        entry.outer_program = live_context().program
        if meaning.kind == TOOL:
            if entry.program is None:
                return None
            self._open_call(span, entry, meaning, entry.program)
        elif entry.program is None or entry.under is not None:
            self._open_program(span, entry, meaning)
        elif meaning.is_node and meaning.name is not None:
            entry.before, entry.node = entry.program.node, meaning.name
            entry.program.enter_node(meaning.name)
        return self._remember(span, entry)

    def _open_program(self, span: Any, entry: _Entry, meaning: SpanMeaning) -> None:
        name, parent, call = meaning.name or "agent", entry.program, entry.under
        id = None
        conversation = text(span.attributes or {}, "gen_ai.conversation.id")
        if parent is None and conversation:
            id = thread_program_id("gen_ai.conversation", None, conversation, "")
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
        with unexported():
            program.start()

    def _open_call(self, span: Any, entry: _Entry, meaning: SpanMeaning, program: Program) -> None:
        if meaning.name is None:
            entry.kind = None  # its attributes may come later
            return
        call = ToolCall(meaning.name, meaning.call_id, tool_class=meaning.tool_type, program=program)
        entry.under = call
        if call.call_id not in program.running_tools:  # else reported elsewhere, and only a parent here
            entry.call = call
            with unexported():
                call.start()

    def _ended(self, span: Any, entry: _Entry, program: Program) -> None:
        status = _status(span, entry.caught)
        if entry.before is not _UNMOVED and program.node == entry.node:
            program.node = entry.before
        with unexported():
            if entry.call is not None:
                entry.call.stop(status)
            elif entry.kind is None:
                meaning = meaning_of(span.name, span.attributes)
                if meaning is not None and meaning.kind == TOOL and span.start_time is not None:
                    # The attributes came at the end only.
                    call = ToolCall(
                        meaning.name or "tool",
                        meaning.call_id,
                        tool_class=meaning.tool_type,
                        program=program,
                    )
                    if call.call_id not in program.running_tools:
                        call.start().stop(status, duration_s=(span.end_time - span.start_time) / 1e9)
            if entry.owns:
                self._release(_key(span.context), program, "error" if status == "timeout" else status)

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


_installed: weakref.WeakKeyDictionary[Any, SojournSpanProcessor] = weakref.WeakKeyDictionary()


def install(tracer_provider: Any = None, **options: Any) -> SojournSpanProcessor:
    """Add a ``SojournSpanProcessor(**options)`` to ``tracer_provider`` (by default the global provider).

    Returns the processor. Until this processor is closed, a further call for the same provider returns it and
    ignores ``options``. Raises ``ConfigError`` if there is no tracer provider yet.
    """
    provider = tracer_provider if tracer_provider is not None else trace.get_tracer_provider()
    if not hasattr(provider, "add_span_processor"):
        raise ConfigError(NO_PROVIDER_MESSAGE)
    processor = _installed.get(provider)
    if processor is None or processor.closed:
        processor = _installed[provider] = SojournSpanProcessor(**options)
        provider.add_span_processor(processor)
    return processor


class _Unexported(threading.local):
    now = False


is_unexported = _Unexported()
"""``is_unexported.now`` is true while this module reports a program or tool call on this thread. ``export``
then writes no span, since the framework has written one."""


@contextmanager
def unexported() -> Iterator[None]:
    is_unexported.now = True
    try:
        yield
    finally:
        is_unexported.now = False


def _key(context: Any) -> Key:
    return context.trace_id, context.span_id


def _scope(span: Any) -> str:
    scope = span.instrumentation_scope
    return scope.name if scope is not None else ""


def _has_adapter(scope: str) -> bool:
    """Return whether the instrumentation scope ``scope`` belongs to a framework that an active adapter
    already reports."""
    parts = [_word(part) for part in scope.split(".")]
    for name in instrumentation.active():
        framework = instrumentation.FRAMEWORKS.get(name)
        if framework is None or name in _REQUESTS_ONLY:
            continue
        words = tuple(map(_word, (name, framework.package, *framework.related_packages)))
        if any(part == word or part.startswith(word + "_") for part in parts for word in words):
            return True
    return False


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _status(span: Any, caught: int) -> str:
    """Return ``ok``, ``error``, ``timeout`` or ``cancelled`` for an ended span. ``caught``: ``id()`` of the
    exception that was already being handled when the span started."""
    kind = (span.attributes or {}).get("error.type")
    failed = span.status.status_code is StatusCode.ERROR
    if kind is None and failed:
        recorded = [event for event in span.events if event.name == "exception"]
        kind = (recorded[-1].attributes or {}).get("exception.type") if recorded else None
    if kind is None and not failed:
        # OpenTelemetry does not record a BaseException, but the span ends while it propagates.
        error = sys.exc_info()[1]
        cancelled = error is not None and id(error) != caught and status_of(error) == "cancelled"
        return "cancelled" if cancelled else "ok"
    word = str(kind or "").rpartition(".")[2]
    if word in CANCELLED_BY or word.lower() == "cancelled":
        return "cancelled"
    return "timeout" if "timeout" in word.lower() else "error"
