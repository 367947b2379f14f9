"""Lease reclaim (``lease_reclaim`` in presets): which leases end early when a request needs blocks (Continuum
§5.2; mechanism C8)?

Leases must not be reclaimed against the order of the queue. Otherwise any new request could end the lease of
an earlier program. The policies differ in when they make an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sojourn.ids import ProgramId

from .policy_views import LeaseView, ReclaimRequest

Leases = Sequence[LeaseView]
Chosen = tuple[ProgramId, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReclaimPolicy:
    """Chooses the programs whose leases end early, so that blocks become free. ``None``: no lease ends. The
    base ends leases for every request, the soonest-expiring first, until there are enough blocks or no leases
    are left. So leases never delay a request."""

    def release(self, need: ReclaimRequest, leases: Leases, now: float) -> Chosen:
        return _first_sufficient(need, leases, lambda lease: (lease.expires_s, lease.program_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramReclaim(LeaseReclaimPolicy):
    """Ends leases until the request fits. Leases of the latest-arrived programs end first.

    - A running request reclaims any lease. The alternative is a preemption, which costs more than the loss of
      an idle program's cache.
    - A waiting request reclaims leases of programs that arrived later, if these hold enough blocks.
    - If those leases hold too few blocks and nothing runs, a waiting request also reclaims leases of earlier
      programs. Without this case the engine would stand still (the paper's deadlock).
    """

    spares_earlier: bool = True
    """Whether the last two rules apply. False, as printed: the head of the queue reclaims any lease until it
    fits. The paper does not say what a running request does."""

    def release(self, need: ReclaimRequest, leases: Leases, now: float) -> Chosen:
        if self.spares_earlier and not need.running:
            later = _of_later_programs(need, leases)
            if later is not None or need.anything_running:
                return later
        return _first_sufficient(need, leases, _latest_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterProgramsReclaim(LeaseReclaimPolicy):
    """Ends leases of programs that arrived after the request's program, the latest first. Used by preset
    ``admit``.

    If these leases hold too few blocks, no lease ends. Then a waiting request waits. For a running request,
    the engine preempts a request (``victim: latest-program``). After the engine was idle for ``patience_s``,
    a waiting request also reclaims leases of earlier programs, since those programs may wait for the request.
    """

    patience_s: float = 30.0

    def release(self, need: ReclaimRequest, leases: Leases, now: float) -> Chosen:
        if not need.running and need.idle_s >= self.patience_s:
            return _first_sufficient(need, leases, _latest_first)
        return _of_later_programs(need, leases)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionOrderReclaim(LeaseReclaimPolicy):
    """Ends leases for every request that needs blocks, in the eviction order of the leases' programs.

    So under memory pressure a lease does not change which program loses KV first (SAGA §4.2). One exception:
    leases of programs with a waiting request end last, because their KV is about to be used. Without an
    eviction order by program, the leases that expire soonest end first.
    """

    def release(self, need: ReclaimRequest, leases: Leases, now: float) -> Chosen:
        return _first_sufficient(need, leases, eviction_order)


def eviction_order(lease: LeaseView) -> tuple[bool, tuple[float, ...], float, ProgramId]:
    """Return the key of the eviction order of leases; the lowest ends first."""
    return (lease.waiting, lease.score, lease.expires_s, lease.program_id)


def reclaim_for_overdue(need: ReclaimRequest, leases: Leases, now: float) -> Chosen:
    """Return the programs whose leases end for an overdue ``ReclaimRequest``, whatever the policy.

    Leases with a TTL from the client end first, because hints could otherwise starve requests without a
    program. Within both kinds of leases, those of programs with a waiting request end last. Leases that are
    still equal end in the order of their expiry. ``None`` without leases. Also ``None`` if other requests run
    and all leases together hold too few blocks, because the request would still have to wait.
    """
    held = [lease for lease in leases if lease.program_id != need.program_id and lease.blocks]
    if need.anything_running and sum(lease.blocks for lease in held) < need.blocks:
        return None
    return _first_sufficient(
        need, held, lambda lease: (not lease.hinted, lease.waiting, lease.expires_s, lease.program_id)
    )


def _latest_first(lease: LeaseView) -> tuple[int, ProgramId]:
    return (-lease.program_rank, lease.program_id)


def _of_later_programs(need: ReclaimRequest, leases: Leases) -> Chosen:
    """Return programs that arrived after the request's program, the latest first, until their leases together
    hold enough blocks. ``None``: all of them together hold too few blocks."""
    later = [
        lease
        for lease in leases
        if lease.program_rank > need.program_rank and lease.program_id != need.program_id
    ]
    enough = sum(lease.blocks for lease in later) >= need.blocks
    return _first_sufficient(need, later, _latest_first) if enough else None


def _first_sufficient(need: ReclaimRequest, leases: Leases, order: Callable[[LeaseView], Any]) -> Chosen:
    """Return the programs of the first ``leases`` of other programs, by ``order``, that together hold at
    least the needed blocks. If all of them hold fewer, all are returned; ``None`` without leases."""
    others = (lease for lease in leases if lease.program_id != need.program_id)
    chosen: list[ProgramId] = []
    gained = 0
    for lease in sorted(others, key=order):
        if gained >= need.blocks:
            break
        chosen.append(lease.program_id)
        gained += lease.blocks
    return tuple(chosen) or None
