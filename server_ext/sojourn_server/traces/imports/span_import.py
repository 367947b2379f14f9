"""Import of spans: OpenTelemetry's GenAI spans, observations of Langfuse, runs of LangSmith.

    program     the outermost agent or workflow span of a trace; spans of one ``gen_ai.conversation.id`` are
                one program, even in several traces
    sub-agent   an agent inside a tool call, or with another conversation id than the enclosing agent
    turn        a model call that reports its prompt and output tokens, and holds no other such call
    tools       tool calls that start between the starts of two successive turns
    gap         from a turn's end to the next start; ``human`` if the answer called no tool and none ran

OpenTelemetry's files hold OTLP JSON of the collector, or the output of ``ReadableSpan.to_json`` of the Python
SDK. Spans may contain prompts; only known attributes are copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from sojourn_integrations.otel import AGENT, CHAIN, MODEL, TOOL, WORKFLOW, SpanMeaning, meaning_of, text

from ..trace_file import read_records
from ..trace_schema import TraceError
from .recorded_calls import (
    ImportResult,
    RecordedCall,
    RecordedProgram,
    RecordedTool,
    seconds,
    to_trace,
    usage_of,
)  # fmt: skip

_EARLIEST_S = 1e8
"""March 1973 in seconds since 1970. An earlier time is a present time in a coarser unit than nanoseconds."""
_CONVERSATION = ("gen_ai.conversation.id", "session.id", "traceloop.association.properties.session_id")
_REASONS = "gen_ai.response.finish_reasons"
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")


class _Span(NamedTuple):
    """One span. Ids are (trace, span). Times are seconds since 1970; an end of 0 is missing."""

    key: tuple[str, str]
    parent: tuple[str, str]
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    meaning: SpanMeaning | None
    kind: str | None
    conversation: str | None


_MaybeRun = RecordedProgram | None
_in_order = attrgetter("start_s", "key")


def read_spans(paths: Sequence[str | Path], source: str = "otel") -> ImportResult:
    """Return the programs of all files as one trace. Raises ``TraceError``, which names the fault's place."""
    spans: dict[tuple[str, str], _Span] = {}
    left_out: Counter[str] = Counter()
    for path in paths:
        found: list[_Span] = []
        for line, record in read_records(path):
            try:
                found += _spans(record)
            except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
                missing = "it has no " if isinstance(error, KeyError) else ""
                raise TraceError(f"{path}, line {line}: no span: {missing}{error}") from None
        ended = {span.key: span for span in found if span.end_s}
        first_s = min((span.start_s for span in ended.values()), default=0.0)
        if 1.0 < first_s < _EARLIEST_S:  # earlier ones count as relative to the beginning of the recording
            raise TraceError(f"{path}: the first span starts at {first_s * 1e9:.0f} ns; expected nanoseconds")
        left_out["spans without an end left out"] += sum(not span.end_s for span in found)
        spans |= ended
    runs = _merged_conversations(_SpanAssigner(sorted(spans.values(), key=_in_order)).runs(left_out))
    for run in runs:
        # By the conventions, input tokens include cached and created ones. Some instrumentations report the
        # provider's own count, which excludes both. One call with more of them proves it for all calls.
        usages = [call.usage for call in run.calls]
        if any((usage.cached or 0) + usage.created > usage.prompt for usage in usages):
            left_out[_EXCLUDING] += 1
            for call in run.calls:
                call.usage = call.usage.with_cache()
    result = to_trace(runs, source, left_out, paths)
    lengths = [len(program.turns) for program in result.programs if program.parent is None]
    if lengths.count(1) > len(lengths) // 2:
        result.notes.append(
            f"{lengths.count(1)} of {len(lengths)} programs have one turn only: calls belong together by an "
            "agent's span or by gen_ai.conversation.id"
        )
    return result


_EXCLUDING = "programs whose input tokens exclude the cache: cached and created tokens added to them"
_OTLP = ("traceId", "spanId", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano")
_SDK = ("trace_id", "span_id", "parent_id", "start_time", "end_time")
_LANGSMITH = ("trace_id", "id", "parent_run_id", "start_time", "end_time")
_LANGFUSE = ("traceId", "id", "parentObservationId", "startTime", "endTime")


def _spans(record: Any) -> Iterator[_Span]:
    """Yield the spans of one record of any format."""
    holders = (record.get(name) for name in ("observations", "runs", "data"))
    if held := next((held for held in holders if isinstance(held, list)), None):
        whole = {"sessionId": record.get("sessionId"), "traceId": record.get("id")}  # a trace of Langfuse
        for one in held:
            yield from _spans(one | {name: one.get(name) or value for name, value in whole.items()})
    elif "resourceSpans" in record:
        scopes = (scope for one in record["resourceSpans"] for scope in one.get("scopeSpans", ()))
        for span in (span for scope in scopes for span in scope.get("spans", ())):
            yield from _spans(span)
    elif "context" in record:  # ReadableSpan.to_json
        yield _span({**record, **record["context"]}, _SDK, record.get("attributes") or {})
    elif "startTimeUnixNano" in record:
        attributes = {one["key"]: _otlp_value(one.get("value") or {}) for one in record.get("attributes", ())}
        yield _span({**record, **{k: int(record.get(k) or 0) / 1e9 for k in _OTLP[3:]}}, _OTLP, attributes)
    elif "run_type" in record:
        yield _span(record, _LANGSMITH, _langsmith_attributes(record))
    else:
        yield _span(record, _LANGFUSE, _langfuse_attributes(record))


def _span(record: Any, names: tuple[str, ...], attributes: Mapping[str, Any]) -> _Span:
    ids = record[names[0]], record[names[1]], record.get(names[2])
    trace_id, span_id, parent_id = (str(one or "").lower().removeprefix("0x") for one in ids)
    name, start_s, end = str(record.get("name") or ""), seconds(record[names[3]]), record.get(names[4])
    meaning = meaning_of(name, attributes)
    return _Span(
        (trace_id, span_id), (trace_id, parent_id if parent_id.strip("0") else ""), start_s,
        seconds(end) if end else 0.0, attributes, meaning, meaning and meaning.kind,
        text(attributes, *_CONVERSATION),
    )  # fmt: skip


def _otlp_value(value: dict[str, Any]) -> Any:
    if "intValue" in value:  # 64-bit numbers are strings in OTLP JSON
        return int(value["intValue"])
    if "arrayValue" in value:
        return [item.get("stringValue") for item in value["arrayValue"].get("values") or ()]
    return next((value[key] for key in ("stringValue", "doubleValue", "boolValue") if key in value), None)


def _langfuse_attributes(record: Any) -> dict[str, Any]:
    """Attributes of an observation. The counts of ``usageDetails`` exclude one another."""
    counts = record.get("usageDetails") or record.get("usage") or {}
    counts = {name: count for name, count in counts.items() if isinstance(count, int)}
    inputs = {name: count for name, count in counts.items() if "input" in name}
    cached = (count for name, count in inputs.items() if "cache" in name and "creat" not in name)
    output = sum(count for name, count in counts.items() if "output" in name)
    return {
        "openinference.span.kind": "llm" if record.get("type") == "GENERATION" else record.get("type"),
        "session.id": record.get("sessionId"),
        "llm.model_name": record.get("model"),
        "prompt_tokens": counts["total"] - output if counts.get("total") else sum(inputs.values()),
        "completion_tokens": output if counts else None,
        "cached_tokens": sum(cached),
    }


def _langsmith_attributes(record: Any) -> dict[str, Any]:
    metadata = (record.get("extra") or {}).get("metadata") or {}
    return {
        "openinference.span.kind": record["run_type"],
        "session.id": text(metadata, "thread_id", "session_id", "conversation_id"),
        "llm.model_name": metadata.get("ls_model_name"),
        "cached_tokens": (record.get("prompt_token_details") or {}).get("cache_read"),
        **{name: record.get(name) for name in ("prompt_tokens", "completion_tokens")},
    }


class _SpanAssigner:
    """Assigns each span to an agent run. ``spans`` are in order of their starts."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._spans = spans
        self._by_id = {span.key: span for span in spans}
        self._inner: dict[tuple[str, str], tuple[_MaybeRun, _Span | None]] = {}
        """Span → its ``_inside``."""
        self._runs: dict[str, RecordedProgram] = {}

    def runs(self, left_out: Counter[str]) -> list[RecordedProgram]:
        """Return all runs, in the order in which they started; parents come before their sub-agents."""
        counted = {span.key: usage_of(span.attributes) for span in self._spans if span.kind == MODEL}
        holders: set[tuple[str, str]] = set()
        for span in self._spans:
            above = self._parent(span) if counted.get(span.key) else None
            while above is not None and above.key not in holders:
                holders.add(above.key)
                above = self._parent(above)
        for span in self._spans:
            if span.kind not in (MODEL, TOOL):
                self._inside(span)
            elif span.kind == TOOL:
                name = (span.meaning and span.meaning.name) or "unknown"
                self._owner(span).tools.append(RecordedTool(name, span.start_s, span.end_s))
            elif not (usage := counted[span.key]):
                left_out["model calls without token counts left out"] += 1
            elif span.key in holders:
                left_out["model spans left out, since they hold the calls that they sum up"] += 1
            else:
                run, reasons = self._owner(span), str(span.attributes.get(_REASONS) or "")
                asks = ("tool" in reasons or "function" in reasons) if reasons else None
                run.model = run.model or text(span.attributes, *_MODEL)
                run.calls.append(RecordedCall(span.start_s, span.end_s, usage, asks_tools=asks))
        return list(self._runs.values())

    def _parent(self, span: _Span) -> _Span | None:
        return None if span.parent == span.key else self._by_id.get(span.parent)

    def _owner(self, span: _Span) -> RecordedProgram:
        """Return the run of a model or tool call: of the enclosing spans, else of its conversation, else of
        its trace. Model calls inside a tool call have a context of their own, so they are a run."""
        around, tool = self._inside(self._parent(span))
        if around is None:
            return self._run(span.conversation, span.key[0], None)
        around.conversation = around.conversation or span.conversation
        if tool is not None and span.kind == MODEL:
            return self._run(None, "/".join(tool.key), around)
        return around

    def _inside(self, span: _Span | None) -> tuple[_MaybeRun, _Span | None]:
        """Return the run of spans inside ``span``, ``None`` without one, and that agent's enclosing tool."""
        chain: list[_Span] = []  # not by recursion: traces can be deeper than Python's stack
        while span is not None and span.key not in self._inner:
            self._inner[span.key] = None, None  # ends a circle, which a file may have
            chain.append(span)
            span = self._parent(span)
        run, tool = (None, None) if span is None else self._inner[span.key]
        for one in reversed(chain):
            run = self._entered(one, run, tool)
            tool = one if one.kind == TOOL else None if one.kind in (AGENT, WORKFLOW) else tool
            self._inner[one.key] = run, tool
        return run, tool

    def _entered(self, span: _Span, around: _MaybeRun, tool: _Span | None) -> _MaybeRun:
        """Return the run inside ``span``, which is in the run ``around`` and in its tool call ``tool``."""
        meaning, conversation = span.meaning, span.conversation
        if meaning is None or meaning.kind not in (AGENT, WORKFLOW, CHAIN):
            return around
        if around is not None:
            other = conversation not in (None, around.conversation)
            if meaning.kind == CHAIN or (tool is None and not (other and around.conversation)):
                return around
            conversation = conversation if other else None
        run = self._run(conversation, "/".join(span.key), around)
        run.group = run.agent_type = run.agent_type or (meaning.name if meaning.is_node else None)
        run.conversation = run.conversation or span.conversation
        return run

    def _run(self, conversation: str | None, fallback_key: str, parent: _MaybeRun) -> RecordedProgram:
        # The key is the program's id, so a conversation whose id equals its trace's id is no second program.
        key = conversation if conversation is not None else fallback_key
        run = self._runs.setdefault(key, RecordedProgram(key, parent))
        run.conversation = run.conversation or conversation
        return run


def _merged_conversations(runs: Sequence[RecordedProgram]) -> list[RecordedProgram]:
    """Merge runs with one conversation id, unless it is also their parent's. A conversation has several if
    its model calls carry the id, but the agent spans around them do not."""
    first_of: dict[str, RecordedProgram] = {}
    kept: list[RecordedProgram] = []
    for run in runs:
        first = run
        if run.conversation and (run.parent is None or run.parent.conversation != run.conversation):
            first = first_of.setdefault(run.conversation, run)
        if first is run:
            kept.append(run)
            continue
        first.group = first.agent_type = first.agent_type or run.agent_type
        first.model = first.model or run.model
        first.calls += run.calls
        first.tools += run.tools
        run.calls, run.tools, run.parent = [], [], first  # for the sub-agents of ``run``
    return kept
