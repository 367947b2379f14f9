"""Queue order (``order`` in presets): by arrival of the request or of its program, or by the service that the
program has had."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .policy_views import WaitingRequestView

SERVICE_LEVELS = 7
FIRST_LEVEL_S = 2.0
QUANTUM_S = 1.0
PROMOTION_RATIO = 8.0
"""Autellix's K, bound of the first queue, quantum of the first queue, and β. The paper prints none of them.
The numbers are those of a public re-implementation (Crystalclear9/Autellix at c7a38cf): bounds 2, 4 … 64,
quanta 1, 2 … 64 and β = 8. There bounds and quanta count decoding steps, here seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOrderPolicy:
    """The order of the waiting queue: requests are admitted in ascending order of ``key``. The base orders
    requests by their own arrival, preempted requests first, as stock vLLM does."""

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        """Return the engine time at which the request is promoted because it has waited long enough; ``inf``:
        never. A promoted request has a new key. Its waiting and running times before the promotion no longer
        count."""
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFcfs(QueueOrderPolicy):
    """Orders requests by the first arrival of their program, in three groups (Continuum §4.3; mechanism C6).

    Preempted requests come first, then requests of programs with a lease, then all others. A request without
    a program counts as a program of one turn. So it waits behind later turns of programs that arrived before
    it.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (not request.preempted, not request.leased, request.program_rank, request.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictProgramFcfs(QueueOrderPolicy):
    """Orders requests only by the first arrival of their program.

    For presets in which earlier programs never give blocks to later ones. There a preempted request must not
    come first: it might need blocks of an earlier program whose own requests wait behind it, a deadlock.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        return (request.program_rank, request.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastAttainedService(QueueOrderPolicy):
    """Orders requests of programs with the least service first: K queues, first come first served in each.

    This is Autellix's PLAS (arXiv 2502.13965, §4.2, Algorithm 1). A request starts in the queue for its
    program's attained service (``service_level``), and sinks to the next one each time it has run for a
    quantum. It is promoted to the end of the first queue once its program has waited at least
    ``PROMOTION_RATIO`` times as long as it ran. As in Algorithm 1, times before the promotion no longer
    count. vLLM does not preempt a running request for one of a better queue, but only when KV blocks are
    short (``victim: most-attained`` chooses the victim), and the victim recomputes.
    """

    def key(self, request: WaitingRequestView) -> tuple[float, ...]:
        promoted_s = self.promoted_s(request)
        if promoted_s <= request.now_s:
            return (0, promoted_s, request.arrival)
        return (service_level(request.attained_s, request.ran_s), request.arrived_s, request.arrival)

    def promoted_s(self, request: WaitingRequestView) -> float:
        """Return the engine time at which a waiting request is promoted to the first queue.

        The time is never before the start of the present wait. ``inf`` for a request in the first queue."""
        if service_level(request.attained_s, request.ran_s) == 0:
            return math.inf
        bearable_s = PROMOTION_RATIO * (request.attained_s + request.ran_s)
        return request.since_s + max(0.0, bearable_s - request.waited_s)


def service_level(attained_s: float, ran_s: float) -> int:
    """Return the index of a request's queue in Autellix; queue 0 is served first.

    Queue i is for programs with less than ``FIRST_LEVEL_S`` · 2^i seconds of service, and the last one for
    all others. A request runs for ``QUANTUM_S`` · 2^i seconds before it sinks to the next queue.
    ``attained_s``: seconds of service that its program had when the request arrived. ``ran_s``: seconds that
    it has run."""
    level = 0
    while level < SERVICE_LEVELS - 1 and attained_s >= FIRST_LEVEL_S * 2.0**level:
        level += 1
    while level < SERVICE_LEVELS - 1 and ran_s >= QUANTUM_S * 2.0**level:
        ran_s -= QUANTUM_S * 2.0**level
        level += 1
    return level
