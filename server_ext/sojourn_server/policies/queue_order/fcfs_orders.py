"""Queue orders by arrival, of the request or of its program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..policy_views import WaitingRequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFcfs:
    """Orders requests by their own arrival, as stock vLLM does. Preempted requests come first."""

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFcfs:
    """Orders preempted requests first, then those of programs with a lease, then others (C6; Continuum §4.3).

    Within each of these three groups, the order is that of the programs' arrival. A request without a program
    counts as a program of one turn. So later turns of programs that arrived before the request precede it.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, not request.leased, request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictProgramFcfs:
    """Orders requests only by the first arrival of their program.

    This order suits presets in which earlier programs never give blocks to later programs. In such a preset,
    a preempted request must not come first: it might need blocks of an earlier program, whose own requests
    would wait behind the preempted request. That would be a deadlock.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf
