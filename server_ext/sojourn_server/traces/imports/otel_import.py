"""Import of OpenTelemetry's GenAI spans of agent runs as a trace. Parts of the trace and their spans:

    program     the outermost agent or workflow span of a trace; spans of one ``gen_ai.conversation.id`` are
                one program, even in several traces
    sub-agent   an agent inside a tool call, or with another conversation id than the enclosing agent
    turn        a model call that reports its prompt and output tokens
    tools       tool calls that start between the starts of two successive turns
    gap         time from a turn's end to the next turn's start. Its kind is ``human`` if the answer called
                no tool and no tool ran

Lengths and times come from the spans. Everything else is inferred. A prompt that grew by less than the length
of the last output omits part of that output. A prompt that shrank by more than 2 % is a reset. Its common
prefix with the previous prompt is taken to be the tokens that the provider had cached.
``with_shared_prefixes`` estimates the prefix that runs of one agent share.

Files hold OTLP JSON of the collector, one or many ``{"resourceSpans": …}`` or bare spans, or the output of
``ReadableSpan.to_json`` of the Python SDK. Attributes may contain prompts; only known attributes are copied.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sojourn_integrations.otel import AGENT, CHAIN, MODEL, TOOL, WORKFLOW, meaning_of, text

from ..prompt_builder import MIN_CONTINUED
from ..trace_schema import MAX_TOKENS, TraceError, TraceProgram, TraceToolRun, TraceTurn, check_program
from .import_records import ImportResult, read_records, with_shared_prefixes

_EARLIEST_S = 1e8
"""March 1973 in seconds since 1970. An earlier time is a present time in a coarser unit than nanoseconds."""
_CONVERSATION = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
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
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
_CREATED = (
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens",
    "gen_ai.usage.cache_write_input_tokens",
    "gen_ai.usage.input_tokens.cache_write",
    "gen_ai.usage.details.cache_write_tokens",
    "gen_ai.usage.details.cache_creation_input_tokens",
    "llm.token_count.prompt_details.cache_write",
)


# ---- files


class _OtlpAttribute(msgspec.Struct):
    key: str
    value: dict[str, Any] = {}


class _OtlpSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    start_time_unix_nano: int
    end_time_unix_nano: int = 0
    parent_span_id: str = ""
    name: str = ""
    attributes: list[_OtlpAttribute] = []


class _OtlpScope(msgspec.Struct):
    spans: list[_OtlpSpan] = []


class _OtlpResource(msgspec.Struct, rename="camel"):
    scope_spans: list[_OtlpScope] = []


class _OtlpExport(msgspec.Struct, rename="camel"):
    resource_spans: list[_OtlpResource]


class _SdkContext(msgspec.Struct):
    trace_id: str
    span_id: str


class _SdkSpan(msgspec.Struct):
    context: _SdkContext
    start_time: datetime
    end_time: datetime | None = None
    parent_id: str | None = None
    name: str = ""
    attributes: dict[str, Any] | None = None


class OtelSpan(NamedTuple):
    """One span. Times are seconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    kind: str | None
    """What the span stands for; see ``conventions``."""

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the span: its trace's id and its own."""
        return self.trace_id, self.span_id

    @property
    def conversation(self) -> str | None:
        """Id of the span's conversation; ``None`` if it has none."""
        return text(self.attributes, *_CONVERSATION)


def read_spans(path: str | Path) -> tuple[list[OtelSpan], int]:
    """Return (ended spans of a file, in order; number of spans without an end). Raises ``TraceError``, which
    names file and line."""
    spans: list[OtelSpan] = []
    unended = 0
    for line, record in read_records(path):
        where = f"{path}, line {line}"
        for span in _spans(record, where):
            if not span.end_s:
                unended += 1
            elif span.end_s < span.start_s:
                raise TraceError(f"{where}: span {span.span_id} ends before it starts")
            else:
                spans.append(span)
    if not spans:
        some = f"none of its {unended} spans has an end" if unended else "it has no spans"
        raise TraceError(f"{path}: {some}; expected OTLP JSON or one span of the Python SDK a line, ended")
    first_s = min(span.start_s for span in spans)
    if 1.0 < first_s < _EARLIEST_S:  # earlier ones count as relative to the beginning of the recording
        raise TraceError(f"{path}: the first startTimeUnixNano is {first_s * 1e9:.0f}; expected nanoseconds")
    return spans, unended


def _spans(record: Any, where: str) -> Iterator[OtelSpan]:
    kind: Any = _OtlpSpan
    if isinstance(record, dict):
        kind = _OtlpExport if "resourceSpans" in record else _SdkSpan if "context" in record else _OtlpSpan
    try:
        found = msgspec.convert(record, kind, strict=False)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise TraceError(f"{where}: no span of OTLP JSON or of the Python SDK: {error}") from None
    if isinstance(found, _SdkSpan):
        end_s = found.end_time.timestamp() if found.end_time is not None else 0.0
        ids = found.context.trace_id, found.context.span_id, found.parent_id or ""
        yield _span(ids, found.name, found.start_time.timestamp(), end_s, found.attributes or {})
        return
    batches = found.resource_spans if isinstance(found, _OtlpExport) else ()
    otlp = [span for batch in batches for scope in batch.scope_spans for span in scope.spans]
    for one in [found] if isinstance(found, _OtlpSpan) else otlp:
        start_s, end_s = one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9
        attributes = {attribute.key: _otlp_value(attribute.value) for attribute in one.attributes}
        yield _span((one.trace_id, one.span_id, one.parent_span_id), one.name, start_s, end_s, attributes)


def _span(
    ids: tuple[str, str, str], name: str, start_s: float, end_s: float, attributes: Mapping[str, Any]
) -> OtelSpan:
    trace_id, span_id, parent = (id.lower().removeprefix("0x") for id in ids)
    parent_id, meaning = parent if parent.strip("0") else None, meaning_of(name, attributes)
    kind = None if meaning is None else meaning.kind
    return OtelSpan(trace_id, span_id, parent_id, name, start_s, end_s, attributes, kind)


def _otlp_value(value: dict[str, Any]) -> Any:
    if "intValue" in value:  # 64-bit numbers are strings in OTLP JSON
        number = str(value["intValue"])
        return int(number) if number.isascii() and number.isdigit() else None
    if isinstance(value.get("arrayValue"), dict):
        items = value["arrayValue"].get("values")
        return [item.get("stringValue") for item in items or () if isinstance(item, dict)]
    return next((value[key] for key in ("stringValue", "doubleValue", "boolValue") if key in value), None)


# ---- token counts


class SpanTokenUsage(NamedTuple):
    """Token counts of one model call. ``cached`` counts prompt tokens from the provider's cache; ``None`` if
    it was not reported. ``created`` counts those that the call wrote to it."""

    prompt: int
    output: int
    cached: int | None
    created: int = 0

    def with_cache(self) -> SpanTokenUsage:
        """Return a copy whose ``prompt`` includes the cached and the created tokens."""
        return self._replace(prompt=self.prompt + (self.cached or 0) + self.created)


def usage_of(attributes: Mapping[str, Any]) -> SpanTokenUsage | None:
    """Return the token counts that a model call reports. ``None`` if the prompt's or the output's count is
    missing, or if the prompt has no tokens."""
    prompt, output = _tokens(attributes, _INPUT), _tokens(attributes, _OUTPUT)
    if prompt is None or output is None:
        return None
    usage = SpanTokenUsage(prompt, output, _tokens(attributes, _CACHED), _tokens(attributes, _CREATED) or 0)
    return usage if usage.with_cache().prompt > 0 else None


def _tokens(attributes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = attributes.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return int(value)
    return None


def input_excludes_cache(usages: Iterable[SpanTokenUsage]) -> bool:
    """Return whether the input tokens of one program's calls exclude cached and created tokens.

    The conventions require that input tokens include both. Some instrumentations of Anthropic and Bedrock
    report the provider's own count, which excludes both. A call with more cached and created tokens than
    input tokens proves this. One such call decides for all calls of the program.
    """
    return any((usage.cached or 0) + usage.created > usage.prompt for usage in usages)


# ---- spans → programs


@dataclass(slots=True, eq=False)
class _AgentRun:
    """The spans of one program, collected so far."""

    program_id: str
    conversation: str | None
    parent: _AgentRun | None
    agent: str | None = None
    calls: list[OtelSpan] = field(default_factory=list)
    tools: list[OtelSpan] = field(default_factory=list)


def read_otel(paths: Sequence[str | Path]) -> ImportResult:
    """Return the programs of all files with spans as one trace. Raises ``TraceError`` for an unreadable file,
    or if the files hold no programs."""
    files = [read_spans(path) for path in paths]
    unended = sum(count for _, count in files)
    try:
        programs, notes = import_spans([span for spans, _ in files for span in spans])
    except TraceError as error:
        raise TraceError(f"{', '.join(str(path) for path in paths)}: {error}") from None
    return ImportResult(programs, notes + [f"{unended} spans without an end left out"] * bool(unended))


def import_spans(spans: Sequence[OtelSpan]) -> ImportResult:
    """Return the programs of ``spans``. Raises ``TraceError`` if no model call has token counts."""
    spans = sorted({span.key: span for span in spans}.values(), key=_start_order)
    runs = _merged_conversations(_SpanAssigner(spans).runs())
    calls_of = {run: [call for call in run.calls if usage_of(call.attributes)] for run in runs}
    left_out = sum(len(run.calls) - len(calls) for run, calls in calls_of.items())
    without = sum(not calls for calls in calls_of.values())
    calls_of = {run: calls for run, calls in calls_of.items() if calls}
    if not calls_of:
        raise TraceError(
            f"{len(spans)} spans, of which {left_out} are model calls (gen_ai.operation.name chat, …), none "
            "with gen_ai.usage.input_tokens and gen_ai.usage.output_tokens; expected both"
        )
    first_s = min(calls[0].start_s for calls in calls_of.values())
    programs, excluding = [], 0
    for run, calls in calls_of.items():
        usages = [usage for call in calls if (usage := usage_of(call.attributes)) is not None]
        if input_excludes_cache(usages):
            excluding += 1
            usages = [usage.with_cache() for usage in usages]
        programs.append(_program(run, calls_of, usages, first_s))
    programs = with_shared_prefixes(programs)
    for program in programs:
        check_program(program)
    beside = sum(
        later.start_s < call.end_s for calls in calls_of.values() for call, later in itertools.pairwise(calls)
    )
    roots = [program for program in programs if program.parent is None]
    single = sum(len(program.turns) == 1 for program in roots)
    notes = (
        (left_out, "model calls without token counts left out"),
        (without, "agent runs without any model call left out"),
        (excluding, "programs whose input tokens exclude the cache: cached and created tokens added to them"),
        (
            beside,
            "model calls began before the run's previous call had ended; the trace has no gap before them",
        ),
        (
            single if single > len(roots) // 2 else 0,
            f"of {len(roots)} programs have one turn only: calls belong together by an agent's span or by "
            "gen_ai.conversation.id",
        ),
    )
    return ImportResult(programs, [f"{count} {what}" for count, what in notes if count])


class _SpanAssigner:
    """Assigns each span to an agent run. ``spans`` are in order of their starts, so a run's spans are too."""

    def __init__(self, spans: Sequence[OtelSpan]) -> None:
        self._spans = spans
        self._by_id = {span.key: span for span in spans}
        self._scopes: dict[tuple[str, str], _AgentRun | None] = {}
        self._runs: dict[str, _AgentRun] = {}

    def runs(self) -> list[_AgentRun]:
        """Return all runs, in the order in which they started; parents come before their sub-agents."""
        for span in self._spans:
            kind = span.kind
            if kind == MODEL and not self._is_nested_duplicate(span):
                self._owner(span).calls.append(span)
            elif kind == TOOL:
                self._owner(span).tools.append(span)
            else:
                self._scope(span)
        return list(self._runs.values())

    def _above(self, span: OtelSpan) -> Iterator[OtelSpan]:
        """Yield the spans around ``span``, the innermost first. Ends at a circle, which a file may have."""
        seen = {span.key}
        at = self._by_id.get((span.trace_id, span.parent_id or ""))
        while at is not None and at.key not in seen:
            yield at
            seen.add(at.key)
            at = self._by_id.get((at.trace_id, at.parent_id or ""))

    def _is_nested_duplicate(self, call: OtelSpan) -> bool:
        """Return whether a span around ``call`` already reports the same model call. This happens if two
        instrumentations are active."""
        for above in self._above(call):
            if above.kind not in (MODEL, None):
                return False
            if above.kind == MODEL and usage_of(above.attributes):
                return True
        return False

    def _owner(self, span: OtelSpan) -> _AgentRun:
        """Return the run to which a model or tool call belongs: that of the enclosing spans, else that of the
        call's conversation, else that of its trace. Model calls inside a tool call belong to a run of their
        own, since a tool that calls a model has its own context."""
        parent = next(self._above(span), None)
        around = None if parent is None else self._scope(parent)
        if around is None:
            return self._run(span.conversation, span.trace_id, None)
        around.conversation = around.conversation or span.conversation
        tool = self._enclosing_tool(span)
        if tool is not None and span.kind == MODEL:
            return self._run(None, f"{tool.trace_id}/{tool.span_id}", around)
        return around

    def _scope(self, span: OtelSpan) -> _AgentRun | None:
        """Return the run to which spans inside ``span`` belong; ``None`` if they have no run yet."""
        chain: list[OtelSpan] = []  # not by recursion: traces can be deeper than Python's stack
        scope: _AgentRun | None = None
        for one in itertools.chain((span,), self._above(span)):
            if one.key in self._scopes:
                scope = self._scopes[one.key]
                break
            chain.append(one)
        for one in reversed(chain):
            scope = self._scopes[one.key] = self._entered(one, scope)
        return scope

    def _entered(self, span: OtelSpan, around: _AgentRun | None) -> _AgentRun | None:
        """Return ``_scope(span)``. ``around`` is the scope of the span's parent."""
        meaning, conversation = meaning_of(span.name, span.attributes), span.conversation
        if meaning is None or meaning.kind not in (AGENT, WORKFLOW, CHAIN):
            return around
        own = f"{span.trace_id}/{span.span_id}"
        if around is None:
            run = self._run(conversation, own, None)
        elif meaning.kind == CHAIN:
            return around
        elif conversation is not None and around.conversation not in (None, conversation):
            run = self._run(conversation, own, around)
        elif self._enclosing_tool(span) is not None:
            run = self._run(conversation if conversation != around.conversation else None, own, around)
        else:
            return around
        run.agent = run.agent or (meaning.name if meaning.is_node else None)
        run.conversation = run.conversation or conversation
        return run

    def _enclosing_tool(self, span: OtelSpan) -> OtelSpan | None:
        """Return the tool call that encloses ``span`` within the same agent; ``None`` if there is none."""
        found = next((above for above in self._above(span) if above.kind in (TOOL, AGENT, WORKFLOW)), None)
        return found if found is not None and found.kind == TOOL else None

    def _run(self, conversation: str | None, fallback_key: str, parent: _AgentRun | None) -> _AgentRun:
        # The key is the program's id, so a conversation whose id equals its trace's id is no second program.
        key = conversation if conversation is not None else fallback_key
        run = self._runs.setdefault(key, _AgentRun(key, conversation, parent))
        run.conversation = run.conversation or conversation
        return run


def _merged_conversations(runs: Sequence[_AgentRun]) -> list[_AgentRun]:
    """Move the spans of runs with one conversation id into the first of them, unless it is also their
    parent's. A conversation has several runs if its model calls carry the id, but the agent spans around them
    do not."""
    first_of: dict[str, _AgentRun] = {}
    kept: list[_AgentRun] = []
    for run in runs:
        first = run
        if run.conversation and (run.parent is None or run.parent.conversation != run.conversation):
            first = first_of.setdefault(run.conversation, run)
        if first is run:
            kept.append(run)
            continue
        first.agent = first.agent or run.agent
        first.calls = sorted(first.calls + run.calls, key=_start_order)
        first.tools = sorted(first.tools + run.tools, key=_start_order)
        run.parent = first  # for the sub-agents of ``run``
    return kept


def _start_order(span: OtelSpan) -> tuple[float, str, str]:
    return span.start_s, span.trace_id, span.span_id


def _program(
    run: _AgentRun,
    calls_of: dict[_AgentRun, list[OtelSpan]],
    usages: Sequence[SpanTokenUsage],
    first_s: float,
) -> TraceProgram:
    calls = calls_of[run]
    started_s = calls[0].start_s
    parent = run.parent
    while parent is not None and parent not in calls_of:
        parent = parent.parent  # skip agents without model calls of their own
    parent_turn = offset_s = None
    if parent is not None:
        before = calls_of[parent]
        offset_s = round(max(0.0, started_s - before[0].start_s), 6)
        parent_turn = sum(call.end_s <= started_s for call in before) - 1
    models = (text(call.attributes, *_MODEL) for call in calls)
    return TraceProgram(
        program_id=run.program_id,
        turns=tuple(_turn(calls, usages, index, run.tools, started_s) for index in range(len(calls))),
        source="otel",
        group=run.agent,
        agent_type=run.agent,
        model=next(filter(None, models), None),
        arrival_s=round(started_s - first_s, 6),
        parent=parent.program_id if parent is not None else None,
        parent_turn=parent_turn if parent_turn is not None and parent_turn >= 0 else None,
        start_offset_s=offset_s,
    )


def _turn(
    calls: Sequence[OtelSpan],
    usages: Sequence[SpanTokenUsage],
    index: int,
    tools: Sequence[OtelSpan],
    started_s: float,
) -> TraceTurn:
    call, usage = calls[index], usages[index]
    following = calls[index + 1] if index + 1 < len(calls) else None
    runs: tuple[TraceToolRun, ...] = ()
    gap_s = tool_seconds = gap_kind = None
    # Some frameworks start a tool before they close the span of the call that asked for it.
    start_of = attrgetter("start_s")
    first = bisect_left(tools, call.start_s, key=start_of)
    inside = tools[first : None if following is None else bisect_left(tools, following.start_s, key=start_of)]
    if inside:
        runs = tuple(_tool_run(tool, following) for tool in inside)
        waited = [tool for tool, run in zip(inside, runs, strict=True) if not run.bg]
        ended_s = max((tool.end_s for tool in waited), default=call.end_s)
        tool_seconds = round(max(0.0, ended_s - call.end_s), 6)
    if following is not None:
        gap_s = round(max(0.0, following.start_s - call.end_s), 6)
        reasons = call.attributes.get("gen_ai.response.finish_reasons") or ()
        reasons = [reasons] if isinstance(reasons, str) else reasons if isinstance(reasons, list) else []
        asked = any(str(reason).startswith(("tool", "function")) for reason in reasons)
        gap_kind = "tool" if inside or asked else "human" if reasons else None
    append, dropped, reset, prefix = usage.prompt, 0, False, None
    if index:
        before = usages[index - 1]
        grown = usage.prompt - before.prompt - before.output
        if usage.prompt < MIN_CONTINUED * before.prompt:
            reset, prefix = True, min(usage.cached or 0, usage.prompt)
        else:
            append, dropped = max(0, grown), min(max(0, -grown), before.output)
    return TraceTurn(
        prompt_tokens=usage.prompt,
        output_tokens=usage.output,
        append_tokens=append,
        reset=reset,
        out_dropped=dropped,
        prefix_tokens=prefix,
        cached_tokens=usage.cached,
        tool="+".join(run.name for run in runs) or None,
        tool_seconds=tool_seconds,
        tools=runs or None,
        gap_s=gap_s,
        gap_kind=gap_kind,
        t=round(call.start_s - started_s, 6),
        llm_s=round(call.end_s - call.start_s, 6),
    )


def _tool_run(tool: OtelSpan, following: OtelSpan | None) -> TraceToolRun:
    # A tool that still runs when the next model call starts ran in the background.
    background = following is not None and tool.end_s > following.start_s
    meaning = meaning_of(tool.name, tool.attributes)
    name = meaning.name if meaning is not None and meaning.name else "unknown"
    return TraceToolRun(name=name, s=round(tool.end_s - tool.start_s, 6), bg=background)
