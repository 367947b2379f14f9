"""Schema of a recorded agent workload: programs, their turns and tool calls.

One JSON object per line is one program. Replay and simulation need these fields; others are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from sojourn.errors import InputError
from sojourn.ids import id_problem

from .token_ids import seed_from_text

MAX_TOKENS = 2**31
"""Maximum tokens of a prompt or output. It bounds a simulation's memory."""
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds, at most 31 years: floats that are much larger cannot represent milliseconds."""
Count = Annotated[int, Meta(ge=0)]


class TraceError(InputError):
    """Unusable trace; the message names the file, the line and the fault."""


class TraceToolRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool call of a turn, without its arguments and output."""

    name: str = "unknown"
    cmd: str | None = None
    """Name of the first executable in a shell command line, or sub-command of an editor tool."""
    s: Seconds | None = None
    """Duration in seconds; ``None`` if the source does not record it."""
    bg: bool | int = False
    """Whether the tool ran in the background, so that the next turn did not wait for it."""


class TraceTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLM call. A field is ``None`` if the source does not record it, or if it does not apply."""

    prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Length of the whole prompt."""
    output_tokens: Tokens
    append_tokens: Tokens | None = None
    """New prompt tokens since the previous turn's prompt and output."""
    reset: bool | int = False
    """Whether the prompt does *not* continue the previous one, as after a compaction or a rewind."""
    out_dropped: Tokens = 0
    """Number of tokens at the start of the previous output (thinking) that this prompt omits."""
    prefix_tokens: Tokens | None = None
    """Length of the longest common prefix with the previous turn's prompt, if recorded."""
    prefix_tokens_any: Tokens | None = None
    """Length of the longest common prefix with any of the session's last 12 prompts, if recorded."""
    cached_tokens: Tokens | None = None
    """Prompt tokens that the recorded service had cached."""
    tool: str | None = None
    """Names of the tools that run after this turn, joined by ``+``."""
    tool_seconds: Seconds | None = None
    """Seconds from the end of the LLM message to the last tool result."""
    tools: tuple[TraceToolRun, ...] | None = None
    gap_s: Seconds | None = None
    """Seconds between this response and the next request."""
    gap_kind: str | None = None
    """``tool``, ``human``, or ``agents``: the next request waits for the sub-agents that this turn starts."""
    interactive: bool | int = False
    """Whether the tool asked a person."""
    t: Seconds | None = None
    """Start of the call, in seconds after the session's start."""
    llm_s: Seconds | None = None
    """Duration of the call in seconds, on the recorded service."""
    dt_s: Seconds | None = None
    """Seconds from the start of this call to the start of the next, if the source has only starts."""
    hash_lcp: Count | None = None
    """Number of leading blocks of the previous prompt that this prompt keeps, if block ids were recorded."""
    hash_runs: tuple[tuple[Count, Count], ...] | None = None
    """Ids of the full blocks after the first ``hash_lcp`` blocks, as runs (first id, count), if recorded."""
    hints: dict[str, Any] | None = None
    """What the agent itself knows, in the wire's names, as ``node``; deadlines from the program's arrival."""

    @property
    def idle_s(self) -> float:
        """Seconds between this turn's end and the next request: the first that was recorded of ``gap_s``,
        ``tool_seconds``, ``dt_s`` minus the call's duration, the longest foreground tool; else 0."""
        if self.gap_s is not None:
            return self.gap_s
        if self.tool_seconds is not None:
            return self.tool_seconds
        if self.dt_s is not None:
            llm_s = self.llm_s if self.llm_s is not None else self.output_tokens * ASSUMED_DECODE_S
            return max(0.0, self.dt_s - llm_s)
        # Parallel tools make one gap, which is as long as the longest of them (MORI §3.1).
        return max((run.s or 0.0 for run in self.tools or () if not run.bg), default=0.0)

    @property
    def tool_runs(self) -> tuple[TraceToolRun, ...]:
        """The tool calls for which the next turn waits. One without a duration gets ``tool_seconds``."""
        runs = self.tools or [TraceToolRun(name=name) for name in (self.tool.split("+") if self.tool else ())]
        return tuple(
            msgspec.structs.replace(run, s=self.tool_seconds) if run.s is None else run
            for run in runs
            if not run.bg
        )

    @property
    def tool_run(self) -> TraceToolRun | None:
        """The longest of ``tool_runs``, else of the background calls; one without a duration is longest."""
        runs = self.tool_runs or self.tools or ()
        return max(runs, key=lambda run: math.inf if run.s is None else run.s, default=None)


ASSUMED_DECODE_S = 0.02
"""Seconds per output token, for traces without durations of LLM calls: 50 tokens per second."""


class TraceProgram(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agent session, or one of its sub-agents. ``None`` as in ``TraceTurn``."""

    program_id: Annotated[str, Meta(min_length=1)]
    turns: Annotated[tuple[TraceTurn, ...], Meta(min_length=1)]
    source: str = ""
    group: str | None = None
    """Name of the task or agent that several programs have in common."""
    model: str | None = None
    arrival_s: Seconds | None = None
    """Seconds since the first session of the trace."""
    parent: str | None = None
    """Program id of the parent of a sub-agent."""
    parent_turn: Count | None = None
    """Index of the parent's turn after which a sub-agent starts."""
    start_offset_s: Seconds | None = None
    """Seconds after the parent's start at which a sub-agent starts."""
    shared_prefix_tokens: Tokens | None = None
    """Number of leading tokens of the first prompt that other programs share."""
    block_size: Annotated[int, Meta(ge=1)] | None = None
    """Tokens per block of ``TraceTurn.hash_runs``."""
    hash_scope: Literal["global", "program"] | None = None
    """Scope in which equal block ids mean equal text: ``global`` (the trace) or ``program``."""
    tenant: str | None = None
    """Customer or team to which the program belongs, if several share the server."""
    agent_type: str | None = None
    """Agent type that the client would report."""

    @property
    def max_context_tokens(self) -> int:
        """Largest sum of prompt and output tokens of a turn."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)

    @property
    def has_block_ids(self) -> bool:
        """Whether every turn has the block ids of its prompt."""
        return self.block_size is not None and all(turn.hash_runs is not None for turn in self.turns)


MAX_REPLAYED_ID_BYTES = 180
"""Maximum bytes of an id that a replay keeps. It appends a suffix; ids have ``ids.MAX_ID_BYTES`` at most."""


def replayed_id(program_id: str) -> str:
    """Return ``program_id`` if it is a valid id of at most ``MAX_REPLAYED_ID_BYTES``, else its visible ASCII
    characters, as many as fit, and a digest of the whole."""
    if id_problem(program_id) is None and len(program_id.encode()) <= MAX_REPLAYED_ID_BYTES:
        return program_id
    digest = f"~{seed_from_text(program_id):016x}"
    visible = "".join(char for char in program_id if "!" <= char <= "~")
    return visible[: MAX_REPLAYED_ID_BYTES - len(digest)] + digest


def check_parents(programs: Sequence[TraceProgram]) -> None:
    """Raise ``TraceError`` for a program that is its own ancestor, and for a ``parent_turn`` that the parent
    does not have. A parent may be missing in the trace."""
    by_id = {program.program_id: program for program in programs}
    for program in programs:
        parent, seen = by_id.get(program.parent or ""), {program.program_id}
        turns = 0 if parent is None else len(parent.turns)
        if turns and (program.parent_turn or 0) >= turns:
            raise TraceError(
                f"program {program.program_id!r}: parent_turn is {program.parent_turn}; expected 0 to "
                f"{turns - 1}, the {turns} turns of {program.parent!r}"
            )
        while parent is not None:
            if parent.program_id in seen:
                raise TraceError(f"program {parent.program_id!r} is among its own parents")
            seen.add(parent.program_id)
            parent = by_id.get(parent.parent or "")


def check_blocks(program: TraceProgram) -> None:
    """Raise ``TraceError`` unless no turn has block ids, or each has one per full block of its prompt."""
    if all(turn.hash_runs is None for turn in program.turns):
        return
    if program.block_size is None:
        raise TraceError("hash_runs without block_size; expected the tokens per block")
    before = 0
    for index, turn in enumerate(program.turns):
        if turn.hash_runs is None:
            raise TraceError(f"turn {index}: hash_runs is missing; other turns of the program have it")
        kept = turn.hash_lcp or 0
        if not 0 <= kept <= before:
            raise TraceError(
                f"turn {index}: hash_lcp is {kept}; expected 0 to {before}, the blocks of the turn before"
            )
        before = kept + sum(count for _, count in turn.hash_runs)
        if before != turn.prompt_tokens // program.block_size:
            raise TraceError(
                f"turn {index}: hash_lcp and hash_runs make {before} blocks; expected "
                f"{turn.prompt_tokens // program.block_size} full ones in {turn.prompt_tokens} tokens"
            )
