"""Who goes next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .views import WaitingView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFcfs:
    """First come, first served by request: stock vLLM."""

    def key(self, request: WaitingView) -> tuple[float, ...]:
        return (not request.preempted, request.arrival)

    def promoted_s(self, request: WaitingView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFcfs:
    """Preempted first, then those whose KV is held, then by the program's first arrival (C6; Continuum §4.3).

    A request of no program counts as a program of one turn: it keeps its place
    among programs by its arrival, and later turns of earlier programs go first.
    """

    def key(self, request: WaitingView) -> tuple[float, ...]:
        return (not request.preempted, not request.leased, request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsInLine:
    """By the program's first arrival and nothing else.

    Where earlier programs never give way to later ones, a preempted request of
    a later program must not stand in front of theirs: it would wait for the
    room they hold, and they for their turn.
    """

    def key(self, request: WaitingView) -> tuple[float, ...]:
        return (request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingView) -> float:
        return math.inf
