"""Workflow prediction: what a program does next, from hints or earlier programs (SAGA §3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sojourn.aeg import END

from .policy_protocols import NextStepPrediction, PredictionSource
from .policy_views import WorkflowStepView

MIN_TASKS = 30
"""Number of ended programs of an agent type from which next steps are inferred."""
CONFIDENCE = 0.7
"""θ: minimum probability of an inferred step that becomes the predicted successor."""
NO_NEXT_STEP_PREDICTION = NextStepPrediction(PredictionSource.COLD, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPredictionPolicy:
    """Predicts the next step of a program after a turn. The base predicts nothing."""

    is_used = False
    """Whether workflows are recorded and predicted."""

    def expect(self, step: WorkflowStepView, now: float) -> NextStepPrediction:
        return NO_NEXT_STEP_PREDICTION


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeTierPrediction(WorkflowPredictionPolicy):
    """Predicts from hints if they are given and were accurate, else from earlier programs, else nothing.

    Without hints, the probability of another turn is 1 minus the probability of an edge to the end. A step
    inferred from earlier programs becomes the predicted successor only if its probability is at least
    ``CONFIDENCE``. Nothing is inferred before ``MIN_TASKS`` programs of the type have ended. A program about
    which nothing is hinted or inferred is cold: it has no prediction.
    """

    hints: bool = True
    """Whether hints are used; false: inference alone (ablation)."""
    calls_tell: bool = False
    """Whether another turn is predicted after a turn that called a tool, if nothing else is known. In the
    paper such a program is cold (without prediction)."""
    inference: bool = True
    """Whether edges are inferred from earlier programs; false: hints alone (ablation). If ``hints`` is false
    too, nothing is predicted."""
    is_used = True

    def expect(self, step: WorkflowStepView, now: float) -> NextStepPrediction:
        is_known = self.inference and step.tasks >= MIN_TASKS
        inferred = step.inferred if is_known else ()
        declared = hinted_continuation_probability(step) if self.hints else None
        if declared is not None and (step.hints_reliable or step.final):
            least = 0.0 if step.declared else CONFIDENCE
            return _prediction(PredictionSource.HINTS, declared, step.declared or inferred, least)
        if inferred:
            likely = _continuation_probability(inferred)
            return _prediction(PredictionSource.INFERRED, likely, inferred, CONFIDENCE)
        if self.hints and self.calls_tell and step.calls_tool and step.hints_reliable:
            return NextStepPrediction(PredictionSource.HINTS, 1.0)
        return NO_NEXT_STEP_PREDICTION


def hinted_continuation_probability(step: WorkflowStepView) -> float | None:
    """Return the probability of another turn by the client's hints alone; ``None``: the hints give none.

    A hinted number of steps left, L, takes precedence over the graph, because it is about this program. The
    number of further steps is assumed to be geometric with mean L, so another step has probability L/(1+L).
    Without L, the probability is 1 if the client expects another turn, else it comes from the declared graph.
    After a turn that the client called the final one, the probability is 0.
    """
    if step.final:
        return 0.0
    if step.steps_left is not None:
        return step.steps_left / (1.0 + step.steps_left)
    if step.resumes:
        return 1.0
    return _continuation_probability(step.declared) if step.declared else None


def _continuation_probability(edges: tuple[tuple[str, float], ...]) -> float:
    return min(1.0, max(0.0, 1.0 - math.fsum(p for node, p in edges if node == END)))


def _prediction(
    source: PredictionSource, probability: float, edges: tuple[tuple[str, float], ...], least: float
) -> NextStepPrediction:
    """``least``: minimum probability of the predicted successor."""
    node, p = max(edges, key=lambda edge: edge[1], default=(END, 0.0))
    successor = node if node != END and p >= least else None
    return NextStepPrediction(source, probability, successor, tuple(one for one in edges if one[0] != END))
