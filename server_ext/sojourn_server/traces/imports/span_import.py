"""Import of spans of agent runs: OpenTelemetry's GenAI spans, and exports of Langfuse and LangSmith.

    program     the outermost agent or workflow span of a trace; spans of one ``gen_ai.conversation.id`` are
                one program, even in several traces
    sub-agent   an agent inside a tool call, or with another conversation id than the enclosing agent
    turn        a model call that reports its prompt and output tokens, and holds no other such call
    tools       tool calls that start between the starts of two successive turns
    gap         time from a turn's end to the next turn's start. Its kind is ``human`` if the answer called
                no tool and no tool ran

Files hold JSON: OTLP of the collector, one or many ``{"resourceSpans": …}`` or bare spans; the output of
``ReadableSpan.to_json`` of the Python SDK; observations of Langfuse; runs of LangSmith. Spans may contain
prompts; only known attributes are copied.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from sojourn_integrations.otel import AGENT, CHAIN, MODEL, TOOL, WORKFLOW, SpanMeaning, meaning_of, text

from ..trace_schema import TraceError
from .import_records import read_records, seconds
from .recorded_calls import ImportResult, RecordedCall, RecordedProgram, RecordedTool, to_trace, usage_of

_EARLIEST_S = 1e8
"""March 1973 in seconds since 1970. An earlier time is a present time in a coarser unit than nanoseconds."""
_CONVERSATION = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")


class _Span(NamedTuple):
    """One span. Times are seconds since the epoch; an end of 0 is missing."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    meaning: SpanMeaning | None

    @property
    def key(self) -> tuple[str, str]:
        return self.trace_id, self.span_id

    @property
    def kind(self) -> str | None:
        return None if self.meaning is None else self.meaning.kind

    @property
    def conversation(self) -> str | None:
        return text(self.attributes, *_CONVERSATION)


_in_order = attrgetter("start_s", "trace_id", "span_id")


# ---- files


def read_spans(paths: Sequence[str | Path], source: str = "otel") -> ImportResult:
    """Return the programs of all files with spans as one trace. Raises ``TraceError``, which names file and
    line, for an unreadable file, or if the files hold no programs."""
    spans: list[_Span] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        found: list[_Span] = []
        for line, record in read_records(path):
            try:
                found += _spans(record)
            except KeyError as error:
                raise TraceError(f"{path}, line {line}: no span: it has no {error}") from None
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                raise TraceError(f"{path}, line {line}: no span: {error}") from None
        ended = [span for span in found if span.end_s]
        for span in ended:
            if span.end_s < span.start_s:
                raise TraceError(f"{path}: span {span.span_id} ends before it starts")
        if not ended:
            some = f"none of its {len(found)} spans has an end" if found else "it has no spans"
            raise TraceError(f"{path}: {some}; expected ended spans in JSON")
        first_s = min(span.start_s for span in ended)
        if 1.0 < first_s < _EARLIEST_S:  # earlier ones count as relative to the beginning of the recording
            raise TraceError(f"{path}: the first span starts at {first_s * 1e9:.0f} ns; expected nanoseconds")
        left_out["spans without an end left out"] += len(found) - len(ended)
        spans += ended
    try:
        return _import(spans, source, left_out)
    except TraceError as error:
        raise TraceError(f"{', '.join(map(str, paths))}: {error}") from None


def _spans(record: Any) -> Iterator[_Span]:
    """Yield the spans of one record of any format."""
    holder = next(
        (name for name in ("observations", "runs", "data") if isinstance(record.get(name), list)), ""
    )
    if holder:  # a trace of Langfuse, or a page of an answer
        for one in record[holder]:
            yield from _spans({"sessionId": record.get("sessionId"), "traceId": record.get("id"), **one})
    elif "resourceSpans" in record:
        for resource in record["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    yield from _spans(span)
    elif "context" in record:  # ReadableSpan.to_json
        ids = record["context"]["trace_id"], record["context"]["span_id"], record.get("parent_id")
        yield _span(ids, record, record["start_time"], record.get("end_time"), record.get("attributes"))
    elif "startTimeUnixNano" in record:
        attributes = {one["key"]: _otlp_value(one.get("value") or {}) for one in record.get("attributes", ())}
        start_s, end_s = int(record["startTimeUnixNano"]) / 1e9, int(record.get("endTimeUnixNano") or 0) / 1e9
        ids = record["traceId"], record["spanId"], record.get("parentSpanId")
        yield _span(ids, record, start_s, end_s, attributes)
    elif "run_type" in record:
        ids = record["trace_id"], record["id"], record.get("parent_run_id")
        yield _span(ids, record, record["start_time"], record.get("end_time"), _langsmith_attributes(record))
    else:
        ids = record["traceId"], record["id"], record.get("parentObservationId")
        yield _span(ids, record, record["startTime"], record.get("endTime"), _langfuse_attributes(record))


def _span(ids: tuple[str, str, str | None], record: Any, start: Any, end: Any, attributes: Any) -> _Span:
    trace_id, span_id, parent = (str(one or "").lower().removeprefix("0x") for one in ids)
    name, parent_id, attributes = (
        str(record.get("name") or ""),
        parent if parent.strip("0") else "",
        attributes or {},
    )
    end_s = seconds(end) if end else 0.0
    return _Span(
        trace_id, span_id, parent_id, name, seconds(start), end_s, attributes, meaning_of(name, attributes)
    )


def _otlp_value(value: dict[str, Any]) -> Any:
    if "intValue" in value:  # 64-bit numbers are strings in OTLP JSON
        number = str(value["intValue"])
        return int(number) if number.isascii() and number.isdigit() else None
    if isinstance(value.get("arrayValue"), dict):
        items = value["arrayValue"].get("values")
        return [item.get("stringValue") for item in items or () if isinstance(item, dict)]
    return next((value[key] for key in ("stringValue", "doubleValue", "boolValue") if key in value), None)


def _langfuse_attributes(record: Any) -> dict[str, Any]:
    """Attributes of an observation. The counts of ``usageDetails`` exclude one another."""
    kind = {"GENERATION": "llm"}.get(record["type"], record["type"].lower())
    counts = {k: v for k, v in (record.get("usageDetails") or record.get("usage") or {}).items() if v}
    inputs = {k: v for k, v in counts.items() if "input" in k and isinstance(v, int)}
    output = sum(v for k, v in counts.items() if "output" in k and isinstance(v, int))
    return {
        "openinference.span.kind": kind,
        "session.id": record.get("sessionId"),
        "llm.model_name": record.get("model"),
        "prompt_tokens": counts["total"] - output if counts.get("total") else sum(inputs.values()),
        "completion_tokens": output if counts else None,
        "cached_tokens": sum(v for k, v in inputs.items() if "cache" in k and "creat" not in k),
    }


def _langsmith_attributes(record: Any) -> dict[str, Any]:
    metadata = (record.get("extra") or {}).get("metadata") or {}
    details = record.get("prompt_token_details") or {}
    return {
        "openinference.span.kind": record["run_type"],
        "session.id": text(metadata, "thread_id", "session_id", "conversation_id"),
        "llm.model_name": metadata.get("ls_model_name"),
        "prompt_tokens": record.get("prompt_tokens"),
        "completion_tokens": record.get("completion_tokens"),
        "cached_tokens": details.get("cache_read"),
    }


# ---- spans → programs


@dataclass(slots=True, eq=False)
class _AgentRun:
    """The spans of one program, collected so far."""

    program_id: str
    conversation: str | None
    parent: _AgentRun | None
    agent: str | None = None
    calls: list[_Span] = field(default_factory=list)
    tools: list[_Span] = field(default_factory=list)


def _import(spans: Sequence[_Span], source: str, left_out: Counter[str]) -> ImportResult:
    spans = sorted({span.key: span for span in spans}.values(), key=_in_order)
    runs = _merged_conversations(_SpanAssigner(spans, left_out).runs())
    programs = {run: RecordedProgram(run.program_id, group=run.agent, agent_type=run.agent) for run in runs}
    for run, program in programs.items():
        parent = run.parent
        while parent is not None and parent not in programs:  # its spans were moved into another run
            parent = parent.parent
        program.parent = None if parent is None else programs[parent]
        program.model = next(filter(None, (text(call.attributes, *_MODEL) for call in run.calls)), None)
        program.tools = [
            RecordedTool((tool.meaning and tool.meaning.name) or "unknown", tool.start_s, tool.end_s)
            for tool in run.tools
        ]
        usages = [usage for call in run.calls if (usage := usage_of(call.attributes))]
        # By the conventions, input tokens include cached and created ones. Some instrumentations report the
        # provider's own count, which excludes both. One call with more of them proves it for all calls.
        if any((usage.cached or 0) + usage.created > usage.prompt for usage in usages):
            usages = [usage.with_cache() for usage in usages]
            left_out[
                "programs whose input tokens exclude the cache: cached and created tokens added to them"
            ] += 1
        for call, usage in zip(run.calls, usages, strict=True):
            reasons = call.attributes.get("gen_ai.response.finish_reasons") or ()
            reasons = [reasons] if isinstance(reasons, str) else reasons if isinstance(reasons, list) else []
            asked = any(str(reason).startswith(("tool", "function")) for reason in reasons)
            kind = "tool" if asked else "human" if reasons else None
            program.calls.append(RecordedCall(call.start_s, call.end_s, usage, gap_kind=kind))
    result = to_trace(programs.values(), source, left_out)
    roots = [program for program in result.programs if program.parent is None]
    single = sum(len(program.turns) == 1 for program in roots)
    if single > len(roots) // 2:
        result.notes.append(
            f"{single} of {len(roots)} programs have one turn only: calls belong together by an agent's span "
            "or by gen_ai.conversation.id"
        )
    return result


class _SpanAssigner:
    """Assigns each span to an agent run. ``spans`` are in order of their starts, so a run's spans are too."""

    def __init__(self, spans: Sequence[_Span], left_out: Counter[str]) -> None:
        self._spans = spans
        self._left_out = left_out
        self._by_id = {span.key: span for span in spans}
        self._scopes: dict[tuple[str, str], _AgentRun | None] = {}
        self._runs: dict[str, _AgentRun] = {}

    def runs(self) -> list[_AgentRun]:
        """Return all runs, in the order in which they started; parents come before their sub-agents."""
        counted = [span for span in self._spans if span.kind == MODEL and usage_of(span.attributes)]
        holders: set[tuple[str, str]] = set()
        for span in counted:
            for above in self._above(span):
                if above.key in holders:
                    break
                holders.add(above.key)
        for span in self._spans:
            kind = span.kind
            if kind == MODEL and not usage_of(span.attributes):
                self._left_out["model calls without token counts left out"] += 1
            elif kind == MODEL and span.key in holders:
                self._left_out["model spans left out, since they hold the calls that they sum up"] += 1
            elif kind == MODEL:
                self._owner(span).calls.append(span)
            elif kind == TOOL:
                self._owner(span).tools.append(span)
            else:
                self._scope(span)
        return list(self._runs.values())

    def _above(self, span: _Span) -> Iterator[_Span]:
        """Yield the spans around ``span``, the innermost first. Ends at a circle, which a file may have."""
        seen = {span.key}
        at = self._by_id.get((span.trace_id, span.parent_id))
        while at is not None and at.key not in seen:
            yield at
            seen.add(at.key)
            at = self._by_id.get((at.trace_id, at.parent_id))

    def _owner(self, span: _Span) -> _AgentRun:
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

    def _scope(self, span: _Span) -> _AgentRun | None:
        """Return the run to which spans inside ``span`` belong; ``None`` if they have no run yet."""
        chain: list[_Span] = []  # not by recursion: traces can be deeper than Python's stack
        scope: _AgentRun | None = None
        for one in itertools.chain((span,), self._above(span)):
            if one.key in self._scopes:
                scope = self._scopes[one.key]
                break
            chain.append(one)
        for one in reversed(chain):
            scope = self._scopes[one.key] = self._entered(one, scope)
        return scope

    def _entered(self, span: _Span, around: _AgentRun | None) -> _AgentRun | None:
        """Return ``_scope(span)``. ``around`` is the scope of the span's parent."""
        meaning, conversation = span.meaning, span.conversation
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

    def _enclosing_tool(self, span: _Span) -> _Span | None:
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
        first.calls = sorted(first.calls + run.calls, key=_in_order)
        first.tools = sorted(first.tools + run.tools, key=_in_order)
        run.parent = first  # for the sub-agents of ``run``
    return kept
