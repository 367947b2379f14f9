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
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from ..prompt_builder import MIN_CONTINUED
from ..trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn, check_program
from . import otel_attributes
from .import_result import ImportResult, with_shared_prefixes
from .otel_attributes import SpanTokenUsage
from .otel_spans import OtelSpan, read_spans

_SCOPE_KINDS = frozenset({otel_attributes.AGENT, otel_attributes.WORKFLOW, otel_attributes.CHAIN})


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
        more = f"; {unended} more have no end" if unended else ""
        raise TraceError(f"{', '.join(str(path) for path in paths)}: {error}{more}") from None
    if unended:
        notes.append(f"{unended} spans without an end left out")
    return ImportResult(programs, notes)


def import_spans(spans: Sequence[OtelSpan]) -> ImportResult:
    """Return the programs of ``spans``. Raises ``TraceError`` if no model call has token counts."""
    once = {span.key: span for span in spans}
    spans = sorted(once.values(), key=_start_order)
    assigner = _SpanAssigner(spans)
    runs = _merged_conversations(assigner.runs())
    calls = {run: [call for call in run.calls if _usable(call)] for run in runs}
    left_out = sum(len(run.calls) - len(calls[run]) for run in runs)
    calls_of = {run: usable for run, usable in calls.items() if usable}
    if not calls_of:
        raise TraceError(_no_programs_reason(spans, left_out))
    first_s = min(usable[0].start_s for usable in calls_of.values())
    usages_of = {run: _usages(calls) for run, calls in calls_of.items()}
    excluding = {run for run in usages_of if otel_attributes.input_excludes_cache(usages_of[run])}
    for run in excluding:
        usages_of[run] = [usage.with_cache() for usage in usages_of[run]]
    programs = with_shared_prefixes([_program(run, calls_of, usages_of[run], first_s) for run in calls_of])
    for program in programs:
        check_program(program)
    notes = []
    if left_out:
        notes.append(f"{left_out} model calls without token counts left out")
    if len(runs) > len(calls_of):
        notes.append(f"{len(runs) - len(calls_of)} agent runs without any model call left out")
    if excluding:
        notes.append(
            f"{len(excluding)} programs whose input tokens exclude the cache: cached and created tokens "
            "added to their prompts"
        )
    if assigner.unknown_parents:
        notes.append(f"{assigner.unknown_parents} spans name a parent that is not in the file")
    beside = sum(
        later.start_s < call.end_s for usable in calls_of.values() for call, later in pairwise(usable)
    )
    if beside:
        notes.append(
            f"{beside} model calls began before the run's previous call had ended; "
            "the trace has no gap before them"
        )
    roots = [program for program in programs if program.parent is None]
    single = sum(len(program.turns) == 1 for program in roots)
    if single > len(roots) // 2:
        notes.append(
            f"{single} of {len(roots)} programs have one turn only: calls belong together by an agent's "
            "span or by gen_ai.conversation.id"
        )
    return ImportResult(programs, notes)


def _usable(call: OtelSpan) -> bool:
    return otel_attributes.usage_of(call.attributes) is not None


def _usages(calls: Sequence[OtelSpan]) -> list[SpanTokenUsage]:
    return [usage for call in calls if (usage := otel_attributes.usage_of(call.attributes)) is not None]


def _no_programs_reason(spans: Sequence[OtelSpan], left_out: int) -> str:
    if left_out:
        return (
            f"{left_out} model calls, none with gen_ai.usage.input_tokens and gen_ai.usage.output_tokens: "
            "a trace needs both"
        )
    names = ", ".join(sorted({span.name for span in spans})[:3])
    return f"{len(spans)} spans, none of them a model call (gen_ai.operation.name chat, …); there is: {names}"


class _SpanAssigner:
    """Assigns each span to an agent run."""

    def __init__(self, spans: Sequence[OtelSpan]) -> None:
        self._spans = spans
        self._by_id = {span.key: span for span in spans}
        self._kinds = {span.key: otel_attributes.kind_of(span.name, span.attributes) for span in spans}
        self._cut = _parent_cycles(self._by_id)
        self._scopes: dict[tuple[str, str], _AgentRun | None] = {}
        self._runs: dict[str, _AgentRun] = {}
        self.unknown_parents = 0

    def runs(self) -> list[_AgentRun]:
        """Return all runs, in the order in which they started; parents come before their sub-agents."""
        for span in self._spans:
            self.unknown_parents += span.parent_id is not None and self._parent(span) is None
            kind = self._kinds[span.key]
            if kind == otel_attributes.MODEL and not self._is_nested_duplicate(span):
                self._owner(span).calls.append(span)
            elif kind == otel_attributes.TOOL:
                self._owner(span).tools.append(span)
            else:
                self._scope(span)
        return list(self._runs.values())

    def _is_nested_duplicate(self, call: OtelSpan) -> bool:
        """Return whether a span around ``call`` already reports the same model call. This happens if two
        instrumentations are active."""
        above = self._parent(call)
        while above is not None and self._kinds[above.key] in (otel_attributes.MODEL, None):
            if self._kinds[above.key] == otel_attributes.MODEL and _usable(above):
                return True
            above = self._parent(above)
        return False

    def _owner(self, span: OtelSpan) -> _AgentRun:
        """Return the run to which a model or tool call belongs.

        It is the run of the enclosing spans. If these have no run, it is the run of the call's conversation
        or, without a conversation, of the call's trace. Model calls inside a tool call belong to a run of
        their own, which is a sub-agent.
        """
        around = self._around(span)
        conversation = otel_attributes.conversation_of(span.attributes)
        if around is None:
            return self._run(conversation, span.trace_id, None)
        if around.conversation is None:
            around.conversation = conversation
        tool = self._enclosing_tool(span)
        if tool is not None and self._kinds[span.key] == otel_attributes.MODEL:
            # A tool that calls a model has its own context, so it counts as a sub-agent.
            return self._run(None, f"{tool.trace_id}/{tool.span_id}", around)
        return around

    def _around(self, span: OtelSpan) -> _AgentRun | None:
        parent = self._parent(span)
        return None if parent is None else self._scope(parent)

    def _scope(self, span: OtelSpan) -> _AgentRun | None:
        """Return the run to which spans inside ``span`` belong; ``None`` if they have no run yet."""
        chain: list[OtelSpan] = []
        at: OtelSpan | None = span
        while at is not None and at.key not in self._scopes:
            chain.append(at)
            at = self._parent(at)
        scope = None if at is None else self._scopes[at.key]
        for one in reversed(chain):  # not by recursion: traces can be deeper than Python's stack
            scope = self._scopes[one.key] = self._entered(one, scope)
        return scope

    def _entered(self, span: OtelSpan, around: _AgentRun | None) -> _AgentRun | None:
        """Return ``_scope(span)``. ``around`` is the scope of the span's parent."""
        kind = self._kinds[span.key]
        if kind not in _SCOPE_KINDS:
            return around
        conversation = otel_attributes.conversation_of(span.attributes)
        name = otel_attributes.agent_of(span.name, span.attributes)
        if around is None:
            run = self._run(conversation, f"{span.trace_id}/{span.span_id}", None)
        elif kind == otel_attributes.CHAIN:
            return around
        elif conversation is not None and around.conversation not in (None, conversation):
            run = self._run(conversation, "", around)
        elif self._enclosing_tool(span) is not None:
            own = conversation if conversation != around.conversation else None
            run = self._run(own, f"{span.trace_id}/{span.span_id}", around)
        else:
            return around
        run.agent = run.agent or name
        run.conversation = run.conversation or conversation
        return run

    def _enclosing_tool(self, span: OtelSpan) -> OtelSpan | None:
        """Return the tool call that encloses ``span`` within the same agent; ``None`` if there is none."""
        above = self._parent(span)
        while above is not None:
            kind = self._kinds[above.key]
            if kind == otel_attributes.TOOL:
                return above
            if kind in (otel_attributes.AGENT, otel_attributes.WORKFLOW):
                return None
            above = self._parent(above)
        return None

    def _run(self, conversation: str | None, fallback_key: str, parent: _AgentRun | None) -> _AgentRun:
        # The key is the program's id, so a conversation whose id equals its trace's id is no second program.
        key = conversation if conversation is not None else fallback_key
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _AgentRun(key, conversation, parent)
        elif run.conversation is None:
            run.conversation = conversation
        return run

    def _parent(self, span: OtelSpan) -> OtelSpan | None:
        if span.parent_id is None or span.key in self._cut:
            return None
        return self._by_id.get((span.trace_id, span.parent_id))


def _merged_conversations(runs: Sequence[_AgentRun]) -> list[_AgentRun]:
    """Merge the runs that have the same conversation id into the first of them. Return the runs that are
    left, in their order.

    A conversation has several runs if its model calls carry the conversation id, but the agent spans around
    them do not. Each outermost agent span then starts a run of its own. A sub-agent with the conversation id
    of its parent is not merged.
    """
    first_of: dict[str, _AgentRun] = {}
    merged: dict[_AgentRun, _AgentRun] = {}
    for run in runs:
        above = run.parent
        while above is not None and above.conversation is None:
            above = above.parent
        if run.conversation is None or (above is not None and above.conversation == run.conversation):
            continue
        first = first_of.setdefault(run.conversation, run)
        if first is not run:
            merged[run] = first
            first.agent = first.agent or run.agent
            first.calls += run.calls
            first.tools += run.tools
    for first in set(merged.values()):
        first.calls.sort(key=_start_order)
        first.tools.sort(key=_start_order)
    kept = [run for run in runs if run not in merged]
    for run in kept:
        if run.parent is not None:
            run.parent = merged.get(run.parent, run.parent)
    return kept


def _parent_cycles(by_id: dict[tuple[str, str], OtelSpan]) -> set[tuple[str, str]]:
    """Return the key of one span of each cycle of parents. Tracers write no cycles, but files may have
    some."""
    cut: set[tuple[str, str]] = set()
    done: set[tuple[str, str]] = set()
    for key in by_id:
        visited: dict[tuple[str, str], None] = {}
        at: tuple[str, str] | None = key
        while at is not None and at in by_id and at not in done:
            visited[at] = None
            parent_id = by_id[at].parent_id
            above = None if parent_id is None else (at[0], parent_id)
            if above in visited:
                cut.add(at)
                break
            at = above
        done.update(visited)
    return cut


def _program(
    run: _AgentRun,
    calls_of: dict[_AgentRun, list[OtelSpan]],
    usages: Sequence[SpanTokenUsage],
    first_s: float,
) -> TraceProgram:
    calls = calls_of[run]
    started_s = calls[0].start_s
    turns = [_turn(calls, usages, index, run.tools, started_s) for index in range(len(calls))]
    parent = run.parent
    while parent is not None and parent not in calls_of:
        parent = parent.parent  # skip agents without model calls of their own
    parent_turn = offset_s = None
    if parent is not None:
        before = calls_of[parent]
        offset_s = round(max(0.0, started_s - before[0].start_s), 6)
        ended = sum(1 for call in before if call.end_s <= started_s)
        parent_turn = ended - 1 if ended else None
    return TraceProgram(
        program_id=run.program_id,
        turns=tuple(turns),
        source="otel",
        group=run.agent,
        agent_type=run.agent,
        model=next((model for call in calls if (model := otel_attributes.model_of(call.attributes))), None),
        arrival_s=round(started_s - first_s, 6),
        parent=parent.program_id if parent is not None else None,
        parent_turn=parent_turn,
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
        asked = otel_attributes.calls_tool(call.attributes)
        gap_kind = "tool" if inside or asked else "human" if asked is False else None
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


def _start_order(span: OtelSpan) -> tuple[float, str, str]:
    return span.start_s, span.trace_id, span.span_id


def _tool_run(tool: OtelSpan, following: OtelSpan | None) -> TraceToolRun:
    # A tool that still runs when the next model call starts ran in the background.
    background = following is not None and tool.end_s > following.start_s
    name = otel_attributes.tool_of(tool.name, tool.attributes)
    return TraceToolRun(name=name, s=round(tool.end_s - tool.start_s, 6), bg=background)
