"""Histories of the steps that agents of each type take one after another (SAGA §3.2–3.3), in bounded memory.

A *step* is one LLM turn, named by the tool that the output called. A program collects its steps. When the
program ends, the history of its agent type learns these steps. The agent type is the name that the client
gives. Without a name, it is a hash of the first tokens of the program's first prompt, since agents of one
type share a system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from sojourn.aeg import END, START

from .program_state import HintReliability, ProgramState
from .windowed_history import Amount, SlidingMax, checked, recent_entry

ORDER = 3
"""Maximum number of latest steps that a prediction uses."""
HALF_LIFE_RUNS = 20
"""Number of later programs that halve the weight of a program."""
MAX_TYPES = 64
"""Maximum number of agent types. The least recently learned is dropped first."""
MAX_ENTRIES = 4096
"""Maximum number of pairs (context, next step) per agent type. The least recently seen contexts are dropped
first."""
MAX_SUCCESSORS = 128
"""Maximum number of successors per context. The rarest is dropped first."""
_GROWTH = 2.0 ** (1 / HALF_LIFE_RUNS)
_RESCALE_ABOVE = 2.0**40
_FORGOTTEN = 0.01
"""Decayed counts up to this value, in programs, do not count as novel, and ``_rescale`` removes them."""
REPLY_STEP = "(reply)"
"""Step of a turn that called no tool."""
MAX_STEPS = 256
"""Maximum number of steps kept per program. The history learns a longer program in pieces."""
MAX_TOOLS = 512
"""Maximum number of tools in ``ToolOutputTokens``."""
MAX_UNCONFIRMED_TYPES = 4096
"""Maximum number of unconfirmed agent types; the oldest is dropped. A type named by a prompt hash is
unconfirmed after its first program, whose steps are not learned. The second program confirms the type."""
NEWEST_WEIGHT = 0.2
"""Weight of the newest value in the moving averages of ``ToolOutputTokens``."""

_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Successors = tuple[tuple[str, float], ...]
"""Possible next steps with their probabilities, likeliest first; ``sojourn.aeg.END`` may be one."""


class AgentTypeStats(msgspec.Struct):
    """Everything learned about one agent type. Its JSON form is the saved one."""

    contexts: dict[str, dict[str, _Weight]] = {}
    """Context (one to three steps, see ``_context``) → weight of each step that followed it. The least
    recently seen context comes first."""
    weight: _Weight = 1.0
    """Weight that the next program will have."""
    runs: _Count = 0
    """Number of learned programs, including unfinished ones. It does not decay."""
    finished: _Count = 0
    """Number of programs that were learned to their end. It does not decay."""


class Transitions:
    """Interpolated n-grams over the steps of the programs of each agent type, in bounded memory (SAGA §3.3).

    They count which step followed each sequence of one, two and three steps. ``START`` and ``END`` count as
    steps. With three steps of history the first failing check can be told from the third; a first-order chain
    cannot do this. Each program weighs 2^(1/20) times as much as the program before it, so 20 later programs
    halve its weight.
    """

    def __init__(self) -> None:
        self.types: dict[str, AgentTypeStats] = {}

    def learn(self, agent_type: str, steps: Sequence[str], *, begins: bool = True, ends: bool = True) -> None:
        """Learn the steps of a program, or of a piece of a long one. ``begins`` and ``ends``: whether the
        piece has the program's start and end."""
        known = recent_entry(self.types, agent_type, AgentTypeStats, MAX_TYPES)
        path = (*((START,) if begins else ()), *steps, *((END,) if ends and steps else ()))
        for at in range(1, len(path)):
            for order in range(1, min(at, ORDER) + 1):
                _count(known, _context(path[at - order : at]), path[at])
        excess = sum(map(len, known.contexts.values())) - MAX_ENTRIES
        while excess > 0:
            excess -= len(known.contexts.pop(next(iter(known.contexts))))
        known.runs += begins
        known.finished += ends
        known.weight *= _GROWTH
        if known.weight > _RESCALE_ABOVE:
            _rescale(known)

    def stats(self, agent_type: str) -> AgentTypeStats:
        """Return what is learned about this type."""
        return self.types.get(agent_type) or AgentTypeStats()

    def predict(self, agent_type: str, history: Sequence[str]) -> list[tuple[str, float]]:
        """Return ``[(next step, probability), …]``, likeliest first; ``END`` may be among them.

        ``history`` holds the steps so far, the latest last. Only the last three count. If there are fewer,
        ``START`` is put before them. The result is empty if nothing is known. Longer and shorter contexts are
        blended by how often they were seen (Witten and Bell 1991, method C).
        """
        known = self.stats(agent_type)
        past = (START, *history[-ORDER:])[-ORDER:]
        blend: dict[str, float] = {}
        for order in range(1, len(past) + 1):
            counts = known.contexts.get(_context(past[-order:]))
            if not counts:
                continue
            seen = sum(counts.values()) / known.weight
            novel = sum(count / known.weight > _FORGOTTEN for count in counts.values()) or 1
            trust = seen / (seen + novel) if blend else 1.0
            scale = trust / (seen * known.weight)
            shorter = blend
            blend = {step: count * scale for step, count in counts.items()}
            for step, p in shorter.items():
                blend[step] = blend.get(step, 0.0) + (1 - trust) * p
        return sorted(blend.items(), key=lambda item: (-item[1], item[0]))


class ToolOutputTokens(msgspec.Struct):
    """Moving averages of the tokens that a tool's output adds to the next prompt: n̂_obs (SAGA §4.1)."""

    tools: dict[str, Amount] = {}
    """Average of each tool, the least recently observed first."""
    overall: Amount | None = None
    """Average of all tools; ``None`` before any observation."""

    def observe(self, tool: str, tokens: float) -> None:
        """Record that a call of ``tool`` added ``tokens`` tokens."""
        self.overall = _updated_average(self.overall, tokens)
        self.tools[tool] = _updated_average(self.tools.pop(tool, None), tokens)
        if len(self.tools) > MAX_TOOLS:
            del self.tools[next(iter(self.tools))]

    def expected(self, tool: str) -> float:
        """Expected tokens that a call of ``tool`` adds to the prompt. For an unknown tool, the average of
        all tools is returned; 0.0 before any observation."""
        return self.tools.get(tool, self.overall or 0.0)


class _SavedWorkflows(msgspec.Struct):
    transitions: dict[str, AgentTypeStats]
    observations: ToolOutputTokens
    gaps_s: Any
    context_blocks: Any
    credits: dict[str, HintReliability]
    unconfirmed_types: list[str]


class WorkflowHistory:
    """History of the steps of programs of each agent type, and of the reliability of their hints."""

    def __init__(self) -> None:
        self.transitions = Transitions()
        self.observations = ToolOutputTokens()
        self.gaps_s = SlidingMax()
        """τ_max: the longest recent time between two turns, in seconds."""
        self.context_blocks = SlidingMax()
        """size_max: the largest number of blocks that a program had in the cache at the end of a turn."""
        self._credits: dict[str, HintReliability] = {}
        self._unconfirmed_types: dict[str, None] = {}

    # -- what happens ------------------------------------------------------------

    def came_back(self, program: ProgramState, tool: str | None, gap_s: float, prompt_tokens: int) -> None:
        """Learn a turn's step, gap and tool output length, once the next request has come.

        ``tool``: the tool that the turn called; ``None``: no tool. ``prompt_tokens``: length of the next
        request's prompt.
        """
        self.gaps_s.observe(gap_s)
        self._observe_hint_error(program, came_back=True)
        if prompt_tokens >= program.context_tokens:
            self.observations.observe(step_name(tool), float(prompt_tokens - program.context_tokens))
        program.steps.append(step_name(tool))
        if len(program.steps) >= MAX_STEPS:
            self._learn(program, program.steps, ends=False)
            program.steps, program.steps_begin = program.steps[-ORDER:], False

    def learn_ended_program(self, program: ProgramState, *, ended: bool, turn_open: bool) -> None:
        """Learn the steps of a program that is over. ``ended``: false if the client cancelled the program.

        ``turn_open``: whether the step of the program's last turn is still missing in ``program.steps``,
        since no request followed that turn.
        """
        steps = [*program.steps, step_name(program.pending_tool)] if turn_open else program.steps
        if ended:
            self._observe_hint_error(program, came_back=False)
        program.pending_declaration = None
        if steps:
            self._learn(program, steps, ends=ended)
        # If the program returns nevertheless, its steps continue from here.
        program.steps, program.steps_begin = steps[-ORDER:], False

    # -- queries -------------------------------------------------------------------

    def finished_programs(self, program: ProgramState) -> int:
        """Number of finished programs of this program's agent type."""
        return self.transitions.stats(agent_type_name(program)).finished

    def successors(self, program: ProgramState) -> Successors:
        """Return the steps that may follow the program's current turn, as learned from programs of its agent
        type. Only the last ``ORDER`` steps, the current one included, are used."""
        past = [*program.steps[-ORDER:], step_name(program.pending_tool)]
        return tuple(self.transitions.predict(agent_type_name(program), past[-ORDER:]))

    def hints_reliable(self, program: ProgramState) -> bool:
        """Whether hints have been reliable so far, both of this program and of its agent type."""
        if program.credit is not None and not program.credit.no_worse_than_chance:
            return False
        credit = self._credits.get(agent_type_name(program))
        return credit is None or credit.hints_reliable

    def overlap(self, program: ProgramState, reused_share: float) -> float:
        """Share of the program's next prompt that its cached context will cover. ``reused_share``: share of
        the context that the prompt is expected to reuse.

        For a chain of turns, SAGA estimates n / (n + n̂_obs): n context tokens, and n̂_obs tokens that the
        tool's output is expected to add (§4.1). The result is this estimate times ``reused_share``, which is
        below 1 if the program's branches diverge.
        """
        tokens = float(program.context_tokens)
        if tokens <= 0:
            return 0.0
        added = self.observations.expected(step_name(program.pending_tool))
        return reused_share * tokens / (tokens + added)

    # -- saved ---------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        saved: dict[str, Any] = msgspec.to_builtins(
            _SavedWorkflows(
                self.transitions.types,
                self.observations,
                self.gaps_s.snapshot(),
                self.context_blocks.snapshot(),
                self._credits,
                list(self._unconfirmed_types),
            )
        )
        return saved

    def restore(self, document: Any) -> None:
        """Replace the history by that of a ``snapshot``. Raises ``ValueError`` for other documents."""
        saved = checked(document, _SavedWorkflows)
        self.transitions.types = saved.transitions
        self.gaps_s.restore(saved.gaps_s)
        self.context_blocks.restore(saved.context_blocks)
        self.observations, self._credits = saved.observations, saved.credits
        self._unconfirmed_types = dict.fromkeys(saved.unconfirmed_types)

    # -- inside --------------------------------------------------------------------

    def _observe_hint_error(self, program: ProgramState, *, came_back: bool) -> None:
        """Learn the error of the last hinted probability of another turn. ``came_back``: whether another turn
        followed.

        The error counts for the program and for the agent type that it had at the time of the hint."""
        name, declared = program.pending_declaration or (agent_type_name(program), None)
        program.pending_declaration = None
        recent_entry(self._credits, name, HintReliability, MAX_TYPES).observe(declared, came_back)
        if declared is not None:
            if program.credit is None:
                program.credit = HintReliability()
            program.credit.observe(declared, came_back)

    def _learn(self, program: ProgramState, steps: Sequence[str], *, ends: bool) -> None:
        name = agent_type_name(program)
        is_unconfirmed = not program.agent_type and not self.transitions.stats(name).runs
        if is_unconfirmed and (name not in self._unconfirmed_types or not program.steps_begin):
            # Each unrelated chat would be a type of its own. Such types must not displace types with many
            # programs. Only another program confirms a type, not a later piece of the same program.
            recent_entry(self._unconfirmed_types, name, lambda: None, MAX_UNCONFIRMED_TYPES)
            return
        self._unconfirmed_types.pop(name, None)
        self.transitions.learn(name, steps, begins=program.steps_begin, ends=ends)


def agent_type_name(program: ProgramState) -> str:
    """Return a program's agent type: the name from the client, or else the type that the first prompt implies
    (``prompt_type``); empty if neither is known."""
    return program.agent_type or program.prompt_type or ""


def step_name(tool: str | None) -> str:
    """Return the step of a turn that called ``tool``; ``REPLY_STEP`` if it called no tool. A tool with a
    reserved name gets a suffix."""
    if not tool:
        return REPLY_STEP
    return f"{tool} (tool)" if tool in (START, END, REPLY_STEP) else tool


def prompt_type(block_hashes: Sequence[Any], block_size: int) -> str | None:
    """Return the agent type that a prompt implies, named by the hash of its first 64 tokens.

    The 64 tokens are rounded down to full blocks, but to one block at least. A shorter prompt is named by all
    its full blocks. ``None`` for a prompt without a full block.
    """
    place = min(max(1, 64 // block_size), len(block_hashes)) - 1
    if place < 0:
        return None
    block_hash = block_hashes[place]
    return f"prompt:{block_hash.hex()[:16] if isinstance(block_hash, bytes) else block_hash}"


def _updated_average(mean: float | None, value: float) -> float:
    return value if mean is None else mean + NEWEST_WEIGHT * (value - mean)


def _context(steps: Sequence[str]) -> str:
    return "\n".join(steps)


def _count(stats: AgentTypeStats, context: str, target: str) -> None:
    counts = stats.contexts[context] = stats.contexts.pop(context, {})
    if target not in counts and len(counts) >= MAX_SUCCESSORS:
        del counts[min(counts, key=lambda each: counts[each])]
    counts[target] = counts.get(target, 0.0) + stats.weight


def _rescale(stats: AgentTypeStats) -> None:
    """Scale an agent type's weights so that the next program weighs 1, and drop decayed counts. Needed about
    every 800 programs, since the weights of new programs grow without bound."""
    scale, stats.weight = 1 / stats.weight, 1.0
    decayed = (
        (context, {step: count * scale for step, count in counts.items() if count * scale > _FORGOTTEN})
        for context, counts in stats.contexts.items()
    )
    stats.contexts = {context: counts for context, counts in decayed if counts}
