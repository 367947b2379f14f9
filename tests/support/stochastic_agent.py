"""An agent with random, history-dependent transitions, for tests of predictions.

    plan ─▶ [outline] ─▶ act ⟲ ─▶ check ─┬▶ fix ─▶ check …
                                         └▶ summarise ─▶ end

A task is small or large. A large task usually gets an outline and two visits to ``act``, a small task one
visit. The first check nearly always leads to a fix; a check after a fix seldom does. Now and then a fix leads
back to ``act``. The node after a check therefore depends on earlier nodes, which a first-order chain does not
know.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import NamedTuple

from sojourn.aeg import END, START


class State(NamedTuple):
    """State of a run that determines the probabilities of the next node. It has the current node, the size of
    the task, and the number of visits to ``act`` and ``fix``."""

    node: str = START
    large: bool = False
    acted: int = 0
    fixed: int = 0


def odds(state: State) -> dict[str, float]:
    """Return the true probability of each possible next node."""
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
    """Draw the next node, and return the state after it."""
    choices = odds(state)
    node = random.choices(list(choices), list(choices.values()))[0]
    large = random.random() < 0.15 if state.node == START else state.large
    return State(node, large, state.acted + (node == "act"), state.fixed + (node == "fix"))


def states(random: Random) -> list[State]:
    """Return the states of one random run, from ``START`` to ``END``."""
    run = [State()]
    while run[-1].node != END:
        run.append(step(run[-1], random))
    return run


class FirstOrderChain:
    """Baseline predictor: returns the node that followed the current node most often in ``runs``. Returns
    ``None`` for an unknown node."""

    def __init__(self, runs: list[list[State]]) -> None:
        self._counts: dict[str, Counter[str]] = {}
        for run in runs:
            for here, following in itertools.pairwise(run):
                self._counts.setdefault(here.node, Counter())[following.node] += 1

    def __call__(self, state: State) -> str | None:
        counts = self._counts.get(state.node)
        return counts.most_common(1)[0][0] if counts else None
