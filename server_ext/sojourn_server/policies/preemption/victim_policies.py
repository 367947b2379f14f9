"""Victims: which request is preempted when a running request finds no free block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..policy_views import BlockShortage, RunningRequestView
from ..queue_order.least_attained_service import ServiceLevels


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVictim:
    """Leaves the choice to the engine, which preempts the request admitted last."""

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramVictim:
    """Preempts the request whose program arrived last.

    The engine would preempt the request admitted last. That request may belong to a program that arrived
    early and has just returned from a tool, and that the queue order prefers.
    """

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        if not running:
            return None
        return max(running, key=lambda view: (view.program_rank, view.position)).request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class MostAttainedServiceVictim:
    """Preempts a request whose program has had the most service (arXiv 2502.13965, Autellix, §4.2.2).

    Autellix sorts requests into queues by service. The victim is the last admitted request of the queue with
    the most service. Options are those of ``ServiceLevels``.
    """

    levels: int = 7
    first_s: float = 2.0
    quantum_s: float = 1.0
    _levels: ServiceLevels = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        levels = ServiceLevels(levels=self.levels, first_s=self.first_s, quantum_s=self.quantum_s)
        object.__setattr__(self, "_levels", levels)

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        if not running:
            return None

        def standing(view: RunningRequestView) -> tuple[int, int]:
            return (self._levels.level(view.attained_s, view.ran_s), view.position)

        return max(running, key=standing).request_id
