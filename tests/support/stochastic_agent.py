"""An agent with random, history-dependent transitions, to measure predictions on.

    plan ─▶ [outline] ─▶ act ⟲ ─▶ check ─┬▶ fix ─▶ check …
                                         └▶ summarise ─▶ end

A task is small or large. Large ones get an outline and are acted on twice, small ones once. The first check
nearly always finds something, one after a fix seldom does; now and then a fix leads back to acting. So
what follows a check depends on what preceded it, which a chain that knows the present node only cannot tell.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import NamedTuple

from sojourn.aeg import END, START

NODES = ("plan", "outline", "act", "check", "fix", "summarise")


class State(NamedTuple):
    """All that the next step depends on."""

    node: str = START
    large: bool = False
    acted: int = 0
    fixed: int = 0


def odds(state: State) -> dict[str, float]:
    """Next node → its probability: the whole truth, as an oracle would know it."""
    node = state.node
    if node == START:
        return {"plan": 1.0}
    if node == "plan":
        return {"outline": 0.93, "act": 0.07} if state.large else {"act": 0.96, "outline": 0.04}
    if node == "outline":
        return {"act": 1.0}
    if node == "act":
        wanted = 2 if state.large else 1
        return {"act": 0.95, "check": 0.05} if state.acted < wanted else {"check": 0.95, "act": 0.05}
    if node == "check":
        if state.fixed == 0:
            return {"fix": 0.94, "summarise": 0.06}
        return {"summarise": 0.93, "fix": 0.07}
    if node == "fix":
        return {"check": 0.95, "act": 0.05}
    return {END: 1.0}


def step(state: State, random: Random) -> State:
    """Draw the next node."""
    choices = odds(state)
    node = random.choices(list(choices), list(choices.values()))[0]
    large = random.random() < 0.15 if state.node == START else state.large
    return State(node, large, state.acted + (node == "act"), state.fixed + (node == "fix"))


def states(random: Random) -> list[State]:
    """One run, from the start to the end."""
    run = [State()]
    while run[-1].node != END:
        run.append(step(run[-1], random))
    return run


def oracle(state: State) -> str:
    """The likeliest next node."""
    choices = odds(state)
    return max(choices, key=lambda node: choices[node])


class FirstOrderChain:
    """What follows the present node most often: the simplest thing that could be learned."""

    def __init__(self, runs: list[list[State]]) -> None:
        self._counts: dict[str, Counter[str]] = {}
        for run in runs:
            for here, following in itertools.pairwise(run):
                self._counts.setdefault(here.node, Counter())[following.node] += 1

    def __call__(self, state: State) -> str | None:
        counts = self._counts.get(state.node)
        return counts.most_common(1)[0][0] if counts else None
