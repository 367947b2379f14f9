"""Whom to preempt when a running request finds no block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .views import VictimView


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesChoice:
    """Leave it to the engine: the request admitted last."""

    def victim(self, running: Sequence[VictimView], short_blocks: int, now: float) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgram:
    """The request whose program arrived last, since the engine's own choice forgets programs.

    A returning program is admitted late although it came early; preempting
    "the last admitted" would then hit the very program the order favours.
    """

    def victim(self, running: Sequence[VictimView], short_blocks: int, now: float) -> str | None:
        if not running:
            return None
        return max(running, key=lambda view: (view.program_rank, view.position)).request_id
