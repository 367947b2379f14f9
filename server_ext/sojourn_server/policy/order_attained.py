"""Least attained service first, by program: Autellix's PLAS (arXiv 2502.13965, §4.2, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .service_levels import ServiceLevels
from .views import WaitingView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastAttainedService:
    """Requests of programs that were served least go first, in K queues, first come within each.

    A request enters the queue of its program's attained service and sinks as
    it uses up quanta. One whose program has waited at least ``beta`` times what
    it was served goes to the end of the first queue; what it waited and ran as
    this request before that is forgotten, as in Algorithm 1. In the first
    queue there is nowhere to go to, so nothing is forgotten there.

    Of what the paper's scheduler does, this is the order alone. Its other half,
    taking the device from a running request as soon as one of a better queue
    waits, an engine like vLLM does not offer: there only a shortage of KV
    preempts (whom, says ``victim: most-attained``), and recomputes.

    ``beta`` is not printed in the paper; 8 is the re-implementation's that
    ``ServiceLevels`` names. Raises ``ValueError`` where a number is out of range.
    """

    levels: int = 7
    first_s: float = 2.0
    quantum_s: float = 1.0
    beta: float = 8.0
    _levels: ServiceLevels = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; expected a finite ratio > 0")
        levels = ServiceLevels(levels=self.levels, first_s=self.first_s, quantum_s=self.quantum_s)
        object.__setattr__(self, "_levels", levels)

    def key(self, request: WaitingView) -> tuple[float, ...]:
        promoted_s = self.promoted_s(request)
        if promoted_s <= request.now_s:
            return (0, promoted_s, request.arrival)
        return (self._levels.level(request.attained_s, request.ran_s), request.arrived_s, request.arrival)

    def promoted_s(self, request: WaitingView) -> float:
        """When its program's waiting reaches ``beta`` times its service; not before it began to wait."""
        if self._levels.level(request.attained_s, request.ran_s) == 0:
            return math.inf
        bearable_s = self.beta * (request.attained_s + request.ran_s)
        return request.since_s + max(0.0, bearable_s - request.waited_s)
