"""What clients state of their programs, such as the turns that are left, and how far this was true.

The histories learn *ratios*: what was, divided by what was stated, for statements of the same kind and about
the same size. So a statement counts as far as earlier ones of its kind were true. If agents of a type halve
their numbers, the numbers are doubled. If some of them always state that the next turn is the last, the
ratios of such statements are spread, and they decide little.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp

from .program_state import ProgramState, StepsLeft
from .windowed_history import KeyedHistory

STATED, PLAN, TTL = "stated", "plan", "ttl"
"""Sources of statements. Of turns: a client's ``expected_steps_left``, or the open items of the agent's to-do
list. Of a gap: its ``expected_s``, or ``kv_retention_ttl_seconds``."""
RATIOS = 15
"""Maximum number of equally likely ratios."""
ENOUGH_RATIOS = 8
"""Number of learned ratios of a kind of statement that suffice."""


class RatioHistory(KeyedHistory[str]):
    """Ratios of positive numbers to what was stated for them, by source of the statement, by name (such as an
    agent type) and by size. Numbers between the same powers of two are of one size."""

    def __init__(self) -> None:
        super().__init__(max_samples=64, max_keys=2048, max_all=1)

    def learn(self, source: str, name: str, stated: float, actual: float) -> None:
        """Learn that a number was ``actual`` where ``stated`` was stated. Both are above 0."""
        self.observe(source, actual / stated)
        self.observe(_key(source, name, stated), actual / stated)

    def expected(self, source: str, name: str, stated: float, assumed: Sequence[float]) -> tuple[float, ...]:
        """Return equally likely numbers, ascending, where ``stated`` is stated. While few ratios of this name
        and size are known, those of the source count too. While few of the source are known, the numbers
        ``assumed`` count, which are ascending."""
        own = self.quantiles(_key(source, name, stated), RATIOS)
        missing = ENOUGH_RATIOS - len(own)
        if missing <= 0:
            return tuple(stated * ratio for ratio in own)
        if self.count(source) >= ENOUGH_RATIOS:
            more = [stated * ratio for ratio in self.quantiles(source, missing)]
        elif own:
            more = [assumed[(2 * i + 1) * len(assumed) // (2 * missing)] for i in range(missing)]
        else:
            more = [*assumed]
        return tuple(sorted((*(stated * ratio for ratio in own), *more)))


class StepsLeftHistory(RatioHistory):
    """Ratios of turns left, by agent type and source. A program's first statement of each source and size is
    kept until the program ends: so a liar can't renew it."""

    def state(self, program: ProgramState, source: str, steps: float) -> None:
        """Record a program's statement that ``steps`` turns follow its next turn."""
        turns = min(steps, 1e6) + 1.0
        stated = StepsLeft(source, turns, program.turns)
        program.steps_left = program.statements.setdefault(_key(source, "", turns), stated)

    def learn_end(self, program: ProgramState, agent_type: str) -> None:
        """Learn from all statements of a program that has ended. Of those of one source, the first is learned
        for other agent types, too, so that one program counts once."""
        seen: set[str] = set()
        for stated in program.statements.values():
            ratio = (program.turns - stated.after) / stated.turns
            if ratio > 0:
                self.observe(_key(stated.source, agent_type, stated.turns), ratio)
                if stated.source not in seen:
                    self.observe(stated.source, ratio)
            seen.add(stated.source)
        program.statements.clear()

    def total_turns(self, agent_type: str, stated: StepsLeft) -> tuple[float, ...]:
        """Return equally likely numbers of turns from a statement to the program's end, ascending. Empty
        while few programs with statements of this source have ended."""
        if self.count(stated.source) < ENOUGH_RATIOS:
            return ()
        return self.expected(stated.source, agent_type, stated.turns, ())


def within(most: float) -> list[float]:
    """Return equally likely numbers between 0 and ``most``, ascending."""
    return [most * (2 * i + 1) / (2 * ENOUGH_RATIOS) for i in range(ENOUGH_RATIOS)]


def _key(source: str, name: str, stated: float) -> str:
    return f"{source}/{frexp(stated)[1]}/{name}"
