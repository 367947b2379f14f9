"""Recorded model calls and tools of agents, as every import finds them, and their conversion to a trace.

A prompt that grew by less than the last output's length omits part of that output. One that shrank by more
than 2 % is a reset, which keeps the tokens that the provider had cached."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..prompt_builder import MIN_CONTINUED
from ..trace_schema import MAX_TOKENS, TraceError, TraceProgram, TraceToolRun, TraceTurn

_BACKGROUND_S = 0.001
"""A tool that ends later than this after the next call's start ran in the background."""
_OVERLAPS = "model calls began before the program's previous call had ended; the trace has no gap before them"
_start_of = attrgetter("start_s")


class ImportResult(NamedTuple):
    """The programs that an import found, and notes for the user."""

    programs: list[TraceProgram]
    notes: list[str]
    """What the import left out or inferred, one line each."""


class TokenUsage(NamedTuple):
    """Token counts of one model call. ``cached`` counts prompt tokens from the provider's cache; ``None`` if
    it was not reported. ``created`` counts those that the call wrote to it."""

    prompt: int
    output: int
    cached: int | None = None
    created: int = 0

    def with_cache(self) -> TokenUsage:
        """Return a copy whose ``prompt`` includes the cached and the created tokens."""
        return self._replace(prompt=self.prompt + (self.cached or 0) + self.created)


class RecordedTool(NamedTuple):
    """One tool call. Times are seconds on the clock of its program."""

    name: str
    start_s: float
    end_s: float
    command: str | None = None
    """The command's executable, for a tool that runs shell commands."""
    asked: bool = False
    """Whether the tool waited for a person."""


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One model call. Times are seconds on the clock of its program."""

    start_s: float
    end_s: float
    usage: TokenUsage
    kept_tokens: int | None = None
    """Tokens of the previous prompt and output that the prompt begins with, if it is known to change them."""
    asks_tools: bool | None = None
    """Whether the answer calls a tool, if recorded."""
    person: bool = False
    """Whether the next input is a person's."""


@dataclass(slots=True, eq=False)
class RecordedProgram:
    """One conversation of an agent."""

    program_id: str
    parent: RecordedProgram | None = None
    conversation: str | None = None
    """Id that spans give to the conversation, if any."""
    asked_s: float | None = None
    """Time at which the parent asked for this sub-agent, if recorded."""
    group: str | None = None
    agent_type: str | None = None
    tenant: str | None = None
    model: str | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    tools: list[RecordedTool] = field(default_factory=list)


_PROMPT = "input_tokens", "prompt_tokens", "prompt", "input"
_OUTPUT = "output_tokens", "completion_tokens", "completion", "output"
_CACHED = (
    "cache_read.input_tokens", "cache_read_input_tokens", "input_tokens.cached", "cached_input_tokens",
    "details.cache_read_tokens", "details.cache_read_input_tokens", "prompt_details.cache_read",
    "cached_tokens", "cacheRead",
)  # fmt: skip
_CREATED = (
    "cache_creation.input_tokens", "cache_creation_input_tokens", "cache_write_input_tokens",
    "input_tokens.cache_write", "details.cache_write_tokens", "details.cache_creation_input_tokens",
    "prompt_details.cache_write", "cacheWrite",
)  # fmt: skip


def usage_of(counts: Mapping[str, Any]) -> TokenUsage | None:
    """Return the counts in a span's attributes or a ``usage`` object; ``None`` without prompt or output."""
    prefixes = ("gen_ai.usage.", "llm.token_count.")
    plain = {name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): n for name, n in counts.items()}
    prompt, output = token_count(plain, *_PROMPT), token_count(plain, *_OUTPUT)
    if prompt is None or output is None:
        return None
    usage = TokenUsage(prompt, output, token_count(plain, *_CACHED), token_count(plain, *_CREATED) or 0)
    return usage if usage.with_cache().prompt else None


def seconds(value: Any) -> float:
    """Return seconds since 1970, from ISO 8601 (UTC without a zone) or from seconds or milliseconds."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(value) / 1000 if float(value) > 1e11 else float(value)


def token_count(counts: Mapping[str, Any], *names: str) -> int | None:
    """Return the first valid number of tokens among the fields ``names``; ``None`` if there is none."""
    found: Any = (counts.get(name) for name in names)
    return next((int(n) for n in found if type(n) in (int, float) and 0 <= n <= MAX_TOKENS), None)


def to_trace(
    programs: Iterable[RecordedProgram], source: str, left_out: Mapping[str, int], paths: Sequence[str | Path]
) -> ImportResult:
    """Return the programs that have calls as a trace, with counts of what was ``left_out``. Raises
    ``TraceError``, which names ``paths``, for impossible numbers or without any call."""
    programs, counts, files = list(programs), Counter(left_out), ", ".join(map(str, paths))
    found = [program for program in programs if program.calls]
    if not found:
        reasons = "; ".join(f"{count} {what}" for what, count in counts.items() if count)
        raise TraceError(f"{files}: no model call with token counts{': ' if reasons else ''}{reasons}")
    for program in found:
        program.calls.sort(key=_start_of)
        program.tools.sort(key=_start_of)
        pairs = itertools.pairwise(program.calls)
        counts[_OVERLAPS] += sum(call.start_s < before.end_s for before, call in pairs)
    counts["programs without any model call left out"] += len(programs) - len(found)
    first_s = min(program.calls[0].start_s for program in found)
    shared: dict[str | None, int] = {}
    for program in found:
        if cached := program.calls[0].usage.cached:
            shared[program.group] = min(cached, shared.get(program.group, cached))
    made = [_program(program, source, first_s, shared.get(program.group)) for program in found]
    for one in made:
        try:
            msgspec.convert(msgspec.to_builtins(one), TraceProgram)
        except msgspec.ValidationError as error:
            raise TraceError(f"{files}: program {one.program_id!r}: {error}") from None
    return ImportResult(made, [f"{count} {what}" for what, count in counts.items() if count])


def _program(program: RecordedProgram, source: str, first_s: float, shared: int | None) -> TraceProgram:
    """Convert a program. ``shared`` is the smallest number of cached tokens above 0 in first prompts of its
    group: the first run finds nothing cached, and runs on one task share more than the system prompt."""
    started_s = program.calls[0].start_s
    parent, seen = program.parent, {program.program_id}
    while parent is not None and not parent.calls and parent.program_id not in seen:
        seen.add(parent.program_id)
        parent = parent.parent  # skip agents without model calls of their own
    parent = None if parent is None or parent.program_id in seen else parent
    begun, offset_s, asked_s = 0, None, program.asked_s
    if parent is not None:
        offset_s = round(max(0.0, started_s - parent.calls[0].start_s), 6)
        begun = sum(c.end_s <= started_s if asked_s is None else c.start_s <= asked_s for c in parent.calls)
    return TraceProgram(
        program_id=program.program_id,
        turns=tuple(_turn(program, index, started_s) for index in range(len(program.calls))),
        source=source,
        group=program.group,
        agent_type=program.agent_type,
        tenant=program.tenant,
        model=program.model,
        arrival_s=round(started_s - first_s, 6),
        parent=None if parent is None else parent.program_id,
        parent_turn=begun - 1 if begun else None,
        start_offset_s=offset_s,
        shared_prefix_tokens=None if shared is None else min(shared, program.calls[0].usage.prompt),
    )


def _turn(program: RecordedProgram, index: int, started_s: float) -> TraceTurn:
    calls, tools = program.calls, program.tools
    call, usage = calls[index], calls[index].usage
    following = calls[index + 1] if index + 1 < len(calls) else None
    # Some agents start a tool before the call that asked for it has ended.
    last = None if following is None else bisect_left(tools, following.start_s, key=_start_of)
    inside = tools[bisect_left(tools, call.start_s, key=_start_of) : last]
    latest_s = float("inf") if following is None else following.start_s + _BACKGROUND_S
    made = [(one, round(one.end_s - one.start_s, 6), one.end_s > latest_s) for one in inside]
    runs = tuple(TraceToolRun(name=one.name, cmd=one.command, s=s, bg=bg) for one, s, bg in made)
    gap_kind = "tool" if runs or call.asks_tools else "human" if call.asks_tools is False else None
    gap_kind = None if following is None else "human" if call.person else gap_kind
    before = calls[index - 1].usage if index else TokenUsage(0, 0)
    context, kept, dropped = before.prompt + before.output, call.kept_tokens if index else None, 0
    if kept is None and usage.prompt < MIN_CONTINUED * before.prompt:
        kept = usage.cached or 0
    if kept is None:
        dropped = min(max(0, context - usage.prompt), before.output)
    else:
        kept = min(kept, usage.prompt, context)
    return TraceTurn(
        prompt_tokens=usage.prompt,
        output_tokens=usage.output,
        append_tokens=max(0, usage.prompt - context),
        reset=kept is not None,
        out_dropped=dropped,
        prefix_tokens=kept,
        cached_tokens=usage.cached,
        tool="+".join(run.name for run in runs) or None,
        tools=runs or None,
        gap_s=None if following is None else round(max(0.0, following.start_s - call.end_s), 6),
        gap_kind=gap_kind,
        interactive=any(tool.asked for tool in inside),
        t=round(call.start_s - started_s, 6),
        llm_s=round(call.end_s - call.start_s, 6),
    )
