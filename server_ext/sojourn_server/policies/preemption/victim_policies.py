"""Victims: which request is preempted when a running request finds no free block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy_views import BlockShortage, RunningRequestView
from ..queue_order.queue_order_policies import ServiceLevels


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
class MostAttainedServiceVictim(ServiceLevels):
    """Preempts a request whose program has had the most service (arXiv 2502.13965, Autellix, §4.2.2).

    Autellix sorts requests into queues by service. The victim is the last admitted request of the queue with
    the most service. Options are those of ``ServiceLevels``.
    """

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        if not running:
            return None

        def standing(view: RunningRequestView) -> tuple[int, int]:
            return (self.level(view.attained_s, view.ran_s), view.position)

        return max(running, key=standing).request_id
