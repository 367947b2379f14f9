"""What a program will do next: SAGA's three tiers of what can be known of an agent (§3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sojourn.aeg import END

from .views import StepView


class Tier(str, Enum):
    """What an expectation rests on."""

    HINTS = "hints"
    """The client declared it: a graph and the node in it, how many steps are left, or a tool call."""
    INFERRED = "inferred"
    """Programs of this type did so before."""
    COLD = "cold"
    """Nothing is known: the program is served request by request."""


class Expectation(NamedTuple):
    """What follows a turn."""

    tier: Tier
    goes_on: float | None
    """Probability that another turn follows; ``None`` where nothing is known."""
    successor: str | None = None
    """The likeliest next step, where its edge is one to act on."""


COLD = Expectation(Tier.COLD, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoForesight:
    """Look at no workflow at all."""

    looks: bool = False

    def expect(self, step: StepView, now: float) -> Expectation:
        return COLD


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeTiers:
    """Hints where they are given and were worth it so far, else what such programs did, else nothing.

    An inferred edge is acted on from ``confidence`` (θ) on; whether the program goes on at all is the sum
    over all its edges. A program of a type of which fewer than ``min_tasks`` ended is cold. Raises
    ``ValueError`` for numbers that make no sense.
    """

    min_tasks: int = 30
    confidence: float = 0.7
    hints: bool = True
    """False: nothing that clients declare is looked at (an ablation: inference alone)."""
    calls_tell: bool = False
    """True: where nothing tells more, a turn that called a tool is followed by another, which has its answer.
    The paper has such programs be cold."""
    inference: bool = True
    """False: nothing is inferred (an ablation: hints alone, or with ``hints`` off every program is cold)."""
    looks: bool = True

    def __post_init__(self) -> None:
        if self.min_tasks < 0 or not 0 <= self.confidence <= 1:
            raise ValueError(
                f"min_tasks {self.min_tasks}, confidence {self.confidence}; expected ≥ 0, and 0 to 1"
            )

    def expect(self, step: StepView, now: float) -> Expectation:
        inferred = self.inference and step.tasks >= self.min_tasks and bool(step.inferred)
        if self.hints:
            declared = declared_to_go_on(step)
            if declared is not None and (step.hints_believed or step.final):
                edges = step.declared or (step.inferred if inferred else ())
                return Expectation(
                    Tier.HINTS, declared, _likeliest(edges, 0.0 if step.declared else self.confidence)
                )
        if inferred:
            ends = math.fsum(p for node, p in step.inferred if node == END)
            goes_on = min(1.0, max(0.0, 1.0 - ends))
            return Expectation(Tier.INFERRED, goes_on, _likeliest(step.inferred, self.confidence))
        if self.hints and self.calls_tell and step.calls_tool and step.hints_believed:
            return Expectation(Tier.HINTS, 1.0)
        return COLD


def declared_to_go_on(step: StepView) -> float | None:
    """The probability of another turn that the client's hints alone give; ``None`` where they give none.

    A number of steps left counts for more than the graph: it is of this program. Of a geometric number with
    mean L, at least one step follows with L / (1 + L).
    """
    if step.final:
        return 0.0
    if step.steps_left is not None:
        return step.steps_left / (1.0 + step.steps_left)
    if step.declared:
        return min(1.0, max(0.0, 1.0 - math.fsum(p for node, p in step.declared if node == END)))
    return None


def _likeliest(edges: tuple[tuple[str, float], ...], least: float) -> str | None:
    node, p = max(edges, key=lambda edge: edge[1], default=(END, 0.0))
    return node if node != END and p >= least else None
