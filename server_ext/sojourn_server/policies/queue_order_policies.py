"""Queue orders: by arrival of the request or of its program, or by the service that the program has had."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .policy_views import WaitingRequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFcfs:
    """Orders requests by their own arrival, as stock vLLM does. Preempted requests come first."""

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFcfs:
    """Orders requests by the first arrival of their program, in three groups (Continuum §4.3; mechanism C6).

    Preempted requests come first, then requests of programs with a lease, then all others. A request without
    a program counts as a program of one turn. So it waits behind later turns of programs that arrived before
    it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """Autellix's K queues by attained service (the seconds that a program has run); queue 0 is served first.

    ``levels`` is K. Queue i < K−1 is for programs with less than ``first_s`` · 2^i seconds of service. The
    last queue is for all others. A request runs for ``quantum_s`` · 2^i seconds before it sinks to the next
    queue.

    The paper prints no K, bounds or quanta. The default numbers are those of a public re-implementation
    (Crystalclear9/Autellix at c7a38cf): bounds 2, 4 … 64 and quanta 1, 2 … 64. There they count decoding
    steps, here seconds. Raises ``ValueError`` for numbers out of range.
    """

    levels: int = 7
    first_s: float = 2.0
    quantum_s: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.levels <= 64 and 0 < self.first_s < math.inf):
            raise ValueError(
                f"levels {self.levels}, first_s {self.first_s}; expected 1 to 64, and seconds > 0"
            )
        if not 0 < self.quantum_s < math.inf:
            raise ValueError(f"quantum_s is {self.quantum_s}; expected finite seconds > 0")

    def level(self, attained_s: float, ran_s: float) -> int:
        """Return the index of a request's queue. ``attained_s``: seconds of service that its program had when
        the request arrived. ``ran_s``: seconds that the request itself has run."""
        level = 0
        while level < self.levels - 1 and attained_s >= self.first_s * 2.0**level:
            level += 1
        while level < self.levels - 1 and ran_s >= self.quantum_s * 2.0**level:
            ran_s -= self.quantum_s * 2.0**level
            level += 1
        return level


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastAttainedService(ServiceLevels):
    """Orders requests of programs with the least service first: K queues, first come first served in each.

    This is Autellix's PLAS (arXiv 2502.13965, §4.2, Algorithm 1). A request starts in the queue for its
    program's attained service. It sinks to the next queue each time it has run for a quantum. It is promoted
    to the end of the first queue once its program has waited at least ``beta`` times as long as the program
    ran. As in Algorithm 1, times before the promotion no longer count. A request already in the first queue
    is not promoted, so its times still count.

    This is only the queue order of the paper's scheduler. vLLM does not preempt a running request for a
    waiting request of a better queue. vLLM preempts only when KV blocks are short (``victim: most-attained``
    chooses the victim), and the victim recomputes.

    The paper does not print ``beta``; 8 is the value of the re-implementation named in ``ServiceLevels``.
    Raises ``ValueError`` for numbers out of range.
    """

    beta: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; expected a finite ratio > 0")
        ServiceLevels.__post_init__(self)

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        promoted_s = self.promoted_s(request)
        if promoted_s <= request.now_s:
            return (0, promoted_s, request.arrival)
        return (self.level(request.attained_s, request.ran_s), request.arrived_s, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        """Return the engine time at which a waiting request is promoted to the first queue.

        By then, the request's program has waited ``beta`` times as long as the program ran. The time is never
        before the start of the present wait. ``inf`` for a request in the first queue."""
        if self.level(request.attained_s, request.ran_s) == 0:
            return math.inf
        bearable_s = self.beta * (request.attained_s + request.ran_s)
        return request.since_s + max(0.0, bearable_s - request.waited_s)
