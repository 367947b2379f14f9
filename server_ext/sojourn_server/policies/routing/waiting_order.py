"""Order of the requests that no replica has capacity for: which request is routed first when capacity is
free?

From time to time, the gateway serves the oldest request first under every policy
(``routing/capacity_queue.py``), so that no request waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class WaitingProgramView(NamedTuple):
    """A request that waits at the gateway for capacity on any replica, and its program."""

    number: int
    """Number of requests that arrived before this one."""
    returning: bool
    """Whether the program has had an answer before."""
    idleness: float
    """Share of the program's recent time that it spent in tools (MORI equation 1); 0 for a new program."""
    context_tokens: int
    """Length of the prompt."""
    size_tokens: int
    """Expected longest context of the program; at least the prompt."""


class WaitingOrderPolicy(Protocol):
    """Orders the waiting requests of a tenant, lowest ``key`` first. A request's key is computed once, when
    the request begins to wait."""

    by_arrival: bool
    """Whether the order is that of arrival."""

    def key(self, request: WaitingProgramView) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOrder:
    """First come, first served."""

    by_arrival: bool = True

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        return (request.number,)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlenessOrder:
    """Orders requests of returning programs by idleness, the least idle first, and then requests of new
    programs. Equally idle programs, and new programs, are ordered by context length, the shortest first (MORI
    §4.3.1)."""

    by_arrival: bool = False

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        idleness = request.idleness if request.returning else 0.0
        return (not request.returning, idleness, request.context_tokens, request.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFirstOrder:
    """Orders requests by the program's expected longest context, the largest first, as in best-fit decreasing
    (Johnson 1974, MORI §4.3.1). ``CapacityRouting.fit`` is the other part of that rule: it chooses the
    replica."""

    by_arrival: bool = False

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        return (-request.size_tokens, request.number)
