"""What agents of each type do next, as far as the server has seen it (SAGA §3.2–3.3), in bounded memory.

A *step* is one LLM turn, named by the tool its output called. Of every program its
steps are noted; when it ends, its type learns from them. The type is what the
client calls it, or the hash of how its first prompt begins: agents of one kind
share a system prompt. Plain containers: no clock, no I/O, no lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sojourn.aeg import END, START
from sojourn.learning.run_trace import ProgramRun
from sojourn.learning.transitions import MAX_KINDS, ORDER, Transitions

from .context_statistics import ToolOutputTokens
from .execution_history import SlidingMax
from .hint_reliability import HintReliability
from .program_state import ProgramState

REPLY_STEP = "(reply)"
"""Step of a turn that called no tool."""
MAX_STEPS = 256
"""Steps noted of one program; of a longer one is learned in pieces."""
MAX_UNCONFIRMED_TYPES = 4096
"""Types known by a prompt alone of which one program was seen: a second one makes them a type to learn."""

Successors = tuple[tuple[str, float], ...]
"""Steps that may follow, each with its probability, likeliest first; ``sojourn.aeg.END`` may be one."""


class WorkflowHistory:
    """Agent types, what follows what in them, and what their declarations are worth."""

    def __init__(self, transitions: Transitions | None = None) -> None:
        self.transitions = transitions if transitions is not None else Transitions()
        self.observations = ToolOutputTokens()
        """How many tokens a tool's answer adds to the prompt: n̂_obs (SAGA §4.1)."""
        self.gaps_s = SlidingMax()
        """τ_max: the longest time between two turns, seconds."""
        self.context_blocks = SlidingMax()
        """size_max: the most blocks a program left behind at the end of a turn."""
        self._credits: OrderedDict[str, HintReliability] = OrderedDict()
        self._unconfirmed_types: OrderedDict[str, None] = OrderedDict()

    # -- what happens ------------------------------------------------------------

    def came_back(self, program: ProgramState, tool: str | None, gap_s: float, prompt_tokens: int) -> None:
        """The request after a turn is here: that turn's step is known now, and what its tool answered."""
        self.gaps_s.observe(gap_s)
        self._judge(program, came_back=True)
        if prompt_tokens >= program.context_tokens:
            self.observations.observe(step_name(tool), prompt_tokens - program.context_tokens)
        program.steps.append(step_name(tool))
        if len(program.steps) >= MAX_STEPS:
            self._learn(program, program.steps, ends=False)
            program.steps, program.steps_begin = program.steps[-ORDER:], False

    def over(self, program: ProgramState, *, ended: bool, turn_open: bool) -> None:
        """The program has ended; not ``ended``: it was broken off, which does not say where it would have.

        ``turn_open``: its last turn was not followed by a request, so that its step has not been noted.
        """
        steps = [*program.steps, step_name(program.pending_tool)] if turn_open else program.steps
        if ended:
            self._judge(program, came_back=False)
        program.pending_declaration = None
        if steps:
            self._learn(program, steps, ends=ended)
        # Whoever comes back after all goes on from here.
        program.steps, program.steps_begin = steps[-ORDER:], False

    # -- what is asked -------------------------------------------------------------

    def tasks(self, program: ProgramState) -> int:
        """Finished programs of this one's type, however long ago."""
        return self.transitions.finished(agent_type_name(program))

    def successors(self, program: ProgramState) -> Successors:
        """What followed such steps as its last ones in programs of its type."""
        past = [*program.steps[-ORDER:], step_name(program.pending_tool)]
        return tuple(self.transitions.predict(agent_type_name(program), past[-ORDER:]))

    def hints_reliable(self, program: ProgramState) -> bool:
        """Whether what was declared of this program and of its type has been worth it so far."""
        if program.credit is not None and not program.credit.no_worse_than_chance:
            return False
        credit = self._credits.get(agent_type_name(program))
        return credit is None or credit.hints_reliable

    def overlap(self, program: ProgramState) -> float:
        """Share of its next prompt that its cached context will be.

        SAGA's estimate for a chain, n / (n + n̂_obs), times the share of its context that the next prompt
        kept so far: less than all of it where a parent's branches part (§4.1).
        """
        tokens = float(program.context_tokens)
        if tokens <= 0:
            return 0.0
        added = self.observations.expected(step_name(program.pending_tool))
        return program.reused_share * tokens / (tokens + added)

    # -- saved ---------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All of it as a JSON-able document of its own."""
        return {
            "transitions": self.transitions.snapshot(),
            "observations": self.observations.snapshot(),
            "gaps_s": self.gaps_s.snapshot(),
            "context_blocks": self.context_blocks.snapshot(),
            "credits": [[name, *credit.numbers()] for name, credit in self._credits.items()],
            "strange": list(self._unconfirmed_types),
        }

    @classmethod
    def restore(cls, document: Any) -> WorkflowHistory:
        """What a ``snapshot`` was taken of. Raises ``ValueError`` with the reason for anything else."""
        if not isinstance(document, dict):
            raise ValueError("workflows: not an object")
        workflows = cls(Transitions.restore(document.get("transitions")))
        workflows.observations = ToolOutputTokens.restore(document.get("observations"))
        workflows.gaps_s = SlidingMax.restore(document.get("gaps_s"))
        workflows.context_blocks = SlidingMax.restore(document.get("context_blocks"))
        try:
            for name, *numbers in document["credits"][-MAX_KINDS:]:
                workflows._credits[str(name)] = HintReliability.restored(numbers)
            strange = document["strange"][-MAX_UNCONFIRMED_TYPES:]
        except (KeyError, TypeError) as error:
            raise ValueError(f"workflows: {type(error).__name__} {error}") from None
        workflows._unconfirmed_types = OrderedDict.fromkeys(str(name) for name in strange)
        return workflows

    # -- inside --------------------------------------------------------------------

    def _judge(self, program: ProgramState, *, came_back: bool) -> None:
        """Hold what was declared against what came, under the type that it was declared for."""
        name, declared = (
            program.pending_declaration
            if program.pending_declaration is not None
            else (agent_type_name(program), None)
        )
        program.pending_declaration = None
        self._credit(name).observe(declared, came_back)
        if declared is not None:
            if program.credit is None:
                program.credit = HintReliability()
            program.credit.observe(declared, came_back)

    def _credit(self, name: str) -> HintReliability:
        credit = self._credits.get(name)
        if credit is None:
            credit = self._credits[name] = HintReliability()
            if len(self._credits) > MAX_KINDS:
                self._credits.popitem(last=False)
        self._credits.move_to_end(name)
        return credit

    def _learn(self, program: ProgramState, steps: Sequence[str], *, ends: bool) -> None:
        name = agent_type_name(program)
        if not program.agent_type and not self.transitions.runs(name) and name not in self._unconfirmed_types:
            # Chats that have nothing in common are a type each: they must not push out those that are many.
            self._unconfirmed_types[name] = None
            if len(self._unconfirmed_types) > MAX_UNCONFIRMED_TYPES:
                self._unconfirmed_types.popitem(last=False)
            return
        self._unconfirmed_types.pop(name, None)
        path = tuple((step,) for step in steps)
        self.transitions.learn(name, ProgramRun(path=path, begins=program.steps_begin, ends=ends))


def agent_type_name(program: ProgramState) -> str:
    """The agent type, as the client calls it or as its prompt begins; programs of neither are one type."""
    return program.agent_type or program.prompt_type or ""


def step_name(tool: str | None) -> str:
    """The step of a turn that called ``tool``; no tool can be taken for the end of a program, or for none."""
    if not tool:
        return REPLY_STEP
    return f"{tool} (tool)" if tool in (START, END, REPLY_STEP) else tool


def prompt_type(block_hashes: Sequence[Any], block_size: int) -> str | None:
    """A name for agents whose prompts begin alike: the hash of the first 64 tokens, in whole blocks.

    ``None`` for a prompt of less than one block.
    """
    place = min(max(1, 64 // block_size), len(block_hashes)) - 1
    if place < 0:
        return None
    told = block_hashes[place]
    return f"prompt:{told.hex()[:16] if isinstance(told, bytes) else told}"
