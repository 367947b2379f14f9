"""Plans by which clients replay the programs of a trace: prompts, outputs, gaps, tools, sub-agents.

Only clients know the plans. At any time, a policy knows only what real clients would have sent so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sojourn.shell_command import is_shell_tool

from sojourn_server.traces.prompt_builder import PromptBuilder, PromptPlan, TurnPlan, system_blocks
from sojourn_server.traces.token_ids import TokenIdGenerator
from sojourn_server.traces.trace_schema import (
    TraceError,
    TraceProgram,
    TraceToolRun,
    TraceTurn,
    check_parents,
    replayed_id,
)

VOCABULARY_SIZE = 32_000
"""Exclusive upper bound of the token ids in replayed prompts and outputs. No model reads these ids."""


class NoProgramFitsError(TraceError):
    """No program can be replayed: the first turn of every top-level program exceeds the context limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaybackOptions:
    """Options of a replay."""

    max_context_tokens: int | None = None
    """Context limit. The replay of a program ends before the first turn whose prompt and output together have
    more tokens. ``None``: no limit."""
    max_gap_s: float | None = None
    """Upper limit of the gaps between turns, in seconds; ``None`` for no limit."""
    human_gaps: bool = True
    """Whether gaps include the response times of people; if false, people respond at once."""
    token_scale: float = 1.0
    """Factor by which the length of every prompt and output is multiplied."""

    def gap_s(self, turn: TraceTurn) -> float:
        """Seconds that the client idles after ``turn``."""
        if not self.human_gaps and (turn.gap_kind == "human" or turn.interactive):
            return 0.0
        return turn.idle_s if self.max_gap_s is None else min(turn.idle_s, self.max_gap_s)


@dataclass(slots=True, kw_only=True)
class ProgramPlan:
    """One program, replayed once."""

    instance_id: str
    """Id of this replay, unique in a run."""
    trace_id: str
    """``program_id`` of the trace line."""
    agent_type: str | None = None
    """Agent type; ``None`` if the trace has none."""
    tenant: str | None = None
    """Tenant; ``None`` if the trace has none."""
    plans: Sequence[TurnPlan]
    """Lengths of the replayed turns."""
    cut: bool
    """Whether the context limit cuts off recorded turns."""
    parent_turn: int | None = None
    """Index of the parent's turn that starts this sub-agent, ``delay_s`` seconds after the turn's end.
    ``None`` for top-level programs and for an unknown turn."""
    delay_s: float = 0.0
    start_offset_s: float | None = None
    """Start of a sub-agent whose parent turn is unknown, in seconds after its parent's start."""
    blocks_parent: bool = False
    """Whether the parent's next turn waits for the end of this sub-agent."""
    children: list[ProgramPlan] = field(default_factory=list)
    _builder: PromptBuilder = field(repr=False)
    _turns: Sequence[TraceTurn] = field(repr=False)
    _options: PlaybackOptions = field(repr=False)

    def prompt(self, turn: int) -> list[int]:
        """Token ids of the prompt of ``turn``. Call it for the turns in order. The caller may change the
        list."""
        return self._builder.prompt(turn)

    def planned_output(self, turn: int) -> list[int]:
        """Token ids of the output of ``turn``."""
        return self._builder.planned_output(turn)

    def gap_s(self, turn: int) -> float:
        """Client-side seconds from the end of ``turn`` to the next request."""
        return self._options.gap_s(self._turns[turn])

    def tool(self, turn: int) -> str | None:
        """The tool after ``turn``, named as in the server's histories of tool times: ``bash:pytest`` for a
        shell command, else the tool's name. ``None`` without a tool."""
        run = self._turns[turn].tool_run
        if run is None:
            return None
        return f"{run.name}:{run.cmd}" if _is_shell(run) else run.name

    def tool_runs(self, turn: int) -> tuple[TraceToolRun, ...]:
        """Tools that the client waits for after ``turn``, as the SDK reports them: ``cmd`` is kept only for
        shell tools."""
        return tuple(
            run if _is_shell(run) else msgspec.structs.replace(run, cmd=None)
            for run in self._turns[turn].tool_runs
        )

    def stated_hints(self, turn: int) -> dict[str, Any]:
        """What the workload itself states with the request of ``turn`` (``TraceTurn.hints``)."""
        return self._turns[turn].hints or {}


class ProgramPlanner:
    """Makes plans of a trace's programs, for any number of replays."""

    def __init__(self, programs: Sequence[TraceProgram], options: PlaybackOptions | None = None) -> None:
        """Raises ``TraceError`` if no program can be replayed, or if ``check_parents`` rejects a parent."""
        self._options = options or PlaybackOptions()
        self._ids = TokenIdGenerator(VOCABULARY_SIZE)
        self._system = system_blocks(programs)
        self._outlines: dict[str, PromptPlan] = {}
        self.roots: list[TraceProgram] = []
        """Top-level programs that can be replayed, in the trace's order."""
        self._children: dict[str, list[TraceProgram]] = {}
        """Program → its sub-agents whose first turn fits the context limit."""
        check_parents(programs)
        by_id = {program.program_id: program for program in programs}
        self._played = [program for program in programs if self._fitting_turns(program)]
        self._left_out = len(programs) - len(self._played)
        """Number of programs whose first turn exceeds the context limit, sub-agents included."""
        for program in self._played:
            if program.parent is None or program.parent not in by_id:
                self.roots.append(program)
            else:
                self._children.setdefault(program.parent, []).append(program)
        if not self.roots:
            # A sub-agent runs only inside its parent, so a limit that fits only a sub-agent is no remedy.
            top = [program for program in programs if program.parent is None] or programs
            if not top:
                raise TraceError("there are no programs to play")
            tokens, shortest = min((self._turn_tokens(one.turns[0]), one.program_id) for one in top)
            raise NoProgramFitsError(
                f"no program fits a context of {self._options.max_context_tokens:,} tokens: the shortest "
                f"first turn needs {tokens:,} (program {shortest!r})"
            )

    def __len__(self) -> int:
        """Number of top-level programs."""
        return len(self.roots)

    @property
    def notes(self) -> list[str]:
        """Notes for the reader of results, such as how many programs are left out or end early."""
        notes = []
        if self._left_out:
            notes.append(
                f"{self._left_out} programs left out: their first turn is beyond the context limit "
                f"of {self._options.max_context_tokens:,} tokens"
            )
        cut = sum(self._fitting_turns(program) < len(program.turns) for program in self._played)
        if cut:
            notes.append(
                f"{cut} of {len(self._played)} programs end early, before a turn beyond the context limit of "
                f"{self._options.max_context_tokens:,} tokens"
            )
        gaps = [self._options.gap_s(turn) for root in self.roots for turn in root.turns[:-1]]
        if gaps and not any(gap > 0 for gap in gaps):
            notes.append("no gap takes any time: the trace has no timing, or the options took it away")
        return notes

    def plan(self, index: int, copy: int = 0) -> ProgramPlan:
        """Return the plan of top-level program ``index`` with its sub-agents. ``copy`` is the number of the
        replay. Replays with different numbers have different tokens, except in prefixes that programs
        share."""
        return self._plan(self.roots[index], copy)

    def _plan(self, program: TraceProgram, copy: int) -> ProgramPlan:
        if program.program_id not in self._outlines:
            self._outlines[program.program_id] = PromptPlan(program, self._options.token_scale)
        outline = self._outlines[program.program_id]
        fitting = self._fitting_turns(program)
        children = []
        for child in self._children.get(program.program_id, ()):
            at = child.parent_turn
            if at is None:
                children.append(self._plan(child, copy))
                children[-1].start_offset_s = child.start_offset_s or 0.0
            elif at < fitting:  # else the context limit ends the program before
                plan, turn = self._plan(child, copy), program.turns[at]
                plan.parent_turn, plan.blocks_parent = at, turn.gap_kind == "agents"
                if child.start_offset_s is not None and turn.t is not None:
                    offset_in_gap_s = child.start_offset_s - turn.t - (turn.llm_s or 0.0)
                    plan.delay_s = min(max(0.0, offset_in_gap_s), self._options.gap_s(turn))
                children.append(plan)
        return ProgramPlan(
            instance_id=f"{replayed_id(program.program_id)}@{copy}",
            trace_id=program.program_id,
            agent_type=program.agent_type,
            tenant=program.tenant,
            plans=outline.plans[:fitting],
            cut=fitting < len(outline.plans),
            children=children,
            _builder=PromptBuilder(
                program, copy=copy, system_blocks=self._system, outline=outline, ids=self._ids
            ),
            _turns=program.turns,
            _options=self._options,
        )

    def _fitting_turns(self, program: TraceProgram) -> int:
        """Number of turns before the first turn that exceeds the context limit."""
        limit = self._options.max_context_tokens or math.inf
        exceeding = (i for i, turn in enumerate(program.turns) if self._turn_tokens(turn) > limit)
        return next(exceeding, len(program.turns))

    def _turn_tokens(self, turn: TraceTurn) -> int:
        """Tokens of the turn's prompt and output, as ``PromptPlan`` plans them."""
        scale = self._options.token_scale
        return max(1, round(turn.prompt_tokens * scale)) + max(1, round(turn.output_tokens * scale))


def _is_shell(run: TraceToolRun) -> bool:
    return run.cmd is not None and is_shell_tool(run.name)
