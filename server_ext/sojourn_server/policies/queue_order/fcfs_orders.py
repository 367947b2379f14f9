"""Queue orders by arrival, of the request or of its program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..policy_views import WaitingRequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFcfs:
    """First come, first served by the request's arrival: stock vLLM."""

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFcfs:
    """Preempted requests first, then those with a lease, then by the program's arrival (C6; Continuum §4.3).

    A request without a program counts as a program of one turn: later turns of earlier programs precede it.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, not request.leased, request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictProgramFcfs:
    """First come, first served by the program's first arrival only.

    For presets in which earlier programs never give blocks to later ones. If a preempted request of a later
    program were first in the queue, it would wait for blocks of earlier programs, and their requests would
    wait behind it.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (request.program_rank, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf
