"""Whom to preempt when a running request finds no block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .service_levels import ServiceLevels
from .views import RunningView, VictimNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesChoice:
    """Leave it to the engine: the request admitted last."""

    def victim(self, running: Sequence[RunningView], need: VictimNeed, now: float) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgram:
    """The request whose program arrived last, since the engine's own choice forgets programs.

    A returning program is admitted late although it came early; preempting
    "the last admitted" would then hit the very program the order favours.
    """

    def victim(self, running: Sequence[RunningView], need: VictimNeed, now: float) -> str | None:
        if not running:
            return None
        return max(running, key=lambda view: (view.program_rank, view.position)).request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class MostAttained:
    """The request in the lowest of Autellix's queues, there the last admitted (arXiv 2502.13965, §4.2.2)."""

    levels: int = 7
    first_s: float = 2.0
    quantum_s: float = 1.0
    _levels: ServiceLevels = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        levels = ServiceLevels(levels=self.levels, first_s=self.first_s, quantum_s=self.quantum_s)
        object.__setattr__(self, "_levels", levels)

    def victim(self, running: Sequence[RunningView], need: VictimNeed, now: float) -> str | None:
        if not running:
            return None

        def standing(view: RunningView) -> tuple[int, int]:
            return (self._levels.level(view.attained_s, view.ran_s), view.position)

        return max(running, key=standing).request_id
