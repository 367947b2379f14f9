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

    Within each of these three groups, the program that arrived first comes first. A request without a program
    counts as a program of one turn, so later turns of earlier programs come before it.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, not request.leased, request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictProgramFcfs:
    """Orders requests only by the first arrival of their program.

    This order suits presets in which earlier programs never give blocks to later ones. There, a preempted
    request must not come first merely because it was preempted. It might need blocks of an earlier program,
    whose own requests would wait behind it. That would be a deadlock.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf
