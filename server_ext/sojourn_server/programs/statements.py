"""What clients state of their programs, such as the turns that are left, and how far this was true.

The histories learn *ratios*: what was, divided by what was stated, for statements of the same kind and about
the same size. So a statement counts as far as earlier ones of its kind were true. If agents of a type halve
their numbers, the numbers are doubled. If some of them always state that the next turn is the last, the
ratios of such statements are spread, and they decide little.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp
from statistics import fmean, pstdev

from .program_state import ProgramState, StepsLeft
from .windowed_history import KeyedHistory

STATED, PLAN, GRAPH, TTL = "stated", "plan", "graph", "ttl"
"""Sources of statements. Of turns: a client's ``expected_steps_left``, the open items of the agent's to-do
list, or the declared graph. Of a gap: its ``expected_s``, or ``kv_retention_ttl_seconds``."""
SURE_SPREAD = 0.4
"""Statements are sure if the standard deviation of what is expected is below this share of the mean."""
RATIOS = 15
"""Maximum number of equally likely ratios."""
ENOUGH_RATIOS = 8
"""Number of learned ratios of a kind of statement that suffice."""
MAX_RATIO = 1024.0
"""Ratios are clipped to this number and its reciprocal."""


class RatioHistory(KeyedHistory[str]):
    """Ratios of positive numbers to what was stated for them, by kind of statement and by size. Numbers
    between the same powers of two are of one size."""

    def __init__(self) -> None:
        super().__init__(max_samples=64, max_keys=2048, max_all=1)

    def learn(self, kind: str, stated: float, actual: float) -> None:
        """Learn that a number was ``actual`` where ``stated`` was stated. Both are above 0."""
        self.observe(_key(kind, stated), _ratio(actual, stated))

    def expected(self, kind: str, stated: float, assumed: Sequence[float]) -> tuple[float, ...]:
        """Return equally likely numbers, ascending, where ``stated`` is stated. While few ratios are known,
        the numbers ``assumed`` count too, which are ascending."""
        own = self.quantiles(_key(kind, stated), RATIOS)
        missing = ENOUGH_RATIOS - len(own)
        if missing <= 0:
            return tuple(stated * ratio for ratio in own)
        more = (
            [assumed[(2 * i + 1) * len(assumed) // (2 * missing)] for i in range(missing)] if own else assumed
        )
        return tuple(sorted((*(stated * ratio for ratio in own), *more)))


class StepsLeftHistory(RatioHistory):
    """Ratios of turns left, by agent type and source. A program's first statement of each source and size is
    kept until the program ends: so a liar can't renew it."""

    def state(self, program: ProgramState, source: str, steps: float) -> None:
        """Record a program's statement that ``steps`` turns follow its next turn. A to-do list that becomes
        longer is a new one: what was stated by the old one is dropped."""
        turns = min(steps, 1e6) + 1.0
        before, stated = program.steps_left, StepsLeft(source, turns, program.turns)
        if source == PLAN and before is not None and turns > before.turns:
            program.statements.clear()
        program.steps_left = program.statements.setdefault(_key(source, turns), stated)

    def learn_end(self, program: ProgramState, agent_type: str) -> None:
        """Learn from all statements of a program that has ended. Of those of one source, the first is learned
        for other agent types, too, so that one program counts once."""
        seen: set[str] = set()
        for stated in program.statements.values():
            if program.turns > stated.after:
                turns = program.turns - stated.after
                self.learn(f"{stated.source}/{agent_type}", stated.turns, turns)
                if stated.source not in seen:
                    self.observe(stated.source, _ratio(turns, stated.turns))
            seen.add(stated.source)
        program.statements.clear()

    def total_turns(self, agent_type: str, stated: StepsLeft) -> tuple[float, ...]:
        """Return equally likely numbers of turns from a statement to the program's end, ascending. Empty
        while few programs with statements of this source have ended."""
        if self.count(stated.source) < ENOUGH_RATIOS:
            return ()
        others = [stated.turns * ratio for ratio in self.quantiles(stated.source, RATIOS)]
        return self.expected(f"{stated.source}/{agent_type}", stated.turns, others)

    def turns_left(self, program: ProgramState, agent_type: str) -> tuple[float, bool] | None:
        """Return the mean number of turns that the program has left, 0 if it has had more than expected, and
        whether statements such as its own are right to within ``SURE_SPREAD``. ``None``: unknown."""
        stated = program.steps_left
        totals = self.total_turns(agent_type, stated) if stated is not None else ()
        if stated is None or not totals:
            return None
        mean = fmean(totals)
        return max(0.0, mean - (program.turns - stated.after)), pstdev(totals) < SURE_SPREAD * mean


def within(most: float) -> list[float]:
    """Return equally likely numbers between 0 and ``most``, ascending."""
    return [most * (2 * i + 1) / (2 * ENOUGH_RATIOS) for i in range(ENOUGH_RATIOS)]


def _key(kind: str, stated: float) -> str:
    return f"{frexp(stated)[1]}/{kind}"


def _ratio(actual: float, stated: float) -> float:
    return min(MAX_RATIO, max(1.0 / MAX_RATIO, actual / stated))
