"""Lease reclaim: which leases end early when another request needs blocks (C8; Continuum §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.ids import ProgramId

from ..policy_views import LeaseView, ReclaimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramReclaim:
    """Leases of the latest-arrived programs end first, as many as are needed.

    Three cases differ, since reclaiming must not undo the order of the queue:

    - A running request reclaims any lease: the alternative is a preemption, which costs more than an idle
      program's cache.
    - A waiting request reclaims leases of programs that arrived later.
    - A waiting request reclaims leases of earlier programs only if nothing runs: the paper's deadlock. With
      ``patient`` it first waits, with an idle engine, until the lease that expires soonest ends or its
      program returns, as long as waiting costs less than rebuilding the cheapest lease. That lease's TTL
      bounds the wait, so there is no deadlock.
    """

    patient: bool = False

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (-lease.program_rank, lease.program_id),
        )
        if not need.running:
            later = [lease for lease in victims if lease.program_rank > need.program_rank]
            if sum(lease.blocks for lease in later) >= need.blocks:
                return _shortest_sufficient_prefix(later, need.blocks)
            if need.anything_running:
                return None
            if self.patient and self._leases_worth_waiting_for(victims, now):
                return None
        return _shortest_sufficient_prefix(victims, need.blocks)

    @staticmethod
    def _leases_worth_waiting_for(leases: Sequence[LeaseView], now: float) -> bool:
        active = [lease for lease in leases if lease.expires_s > now and not lease.waiting]
        if not active:
            return False
        return min(lease.expires_s for lease in active) - now < min(lease.reload_s for lease in active)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterProgramsReclaim:
    """Leases of programs that arrived later end, latest first: part of the baseline ``admit``.

    If a running request of the latest program needs blocks, there is no such lease, and a preemption follows
    (``victim: latest-program``). A waiting request waits. After ``patience_s`` of an idle engine it reclaims
    earlier programs' leases too, since these programs may wait for it.
    """

    patience_s: float = 30.0

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (-lease.program_rank, lease.program_id),
        )
        if not need.running and need.idle_s >= self.patience_s:
            return _shortest_sufficient_prefix(victims, need.blocks)
        later = [lease for lease in victims if lease.program_rank > need.program_rank]
        if sum(lease.blocks for lease in later) >= need.blocks:
            return _shortest_sufficient_prefix(later, need.blocks)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoonestExpiringReclaim:
    """Every request for blocks ends leases, the soonest-expiring first, until there are enough blocks or no
    leases.

    So leases never delay a request.
    """

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (lease.expires_s, lease.program_id),
        )
        return _shortest_sufficient_prefix(victims, need.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionOrderReclaim:
    """Every request for blocks ends leases, in the eviction order of their programs.

    Under memory pressure a lease is only a place in that order (SAGA §4.2). Leases of programs with a waiting
    request end last, because their KV is about to be used. Without an eviction order by program, the leases
    that expire soonest end first.
    """

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (lease.waiting, lease.score, lease.expires_s, lease.program_id),
        )
        return _shortest_sufficient_prefix(victims, need.blocks)


def reclaim_for_overdue(
    need: ReclaimRequest, leases: Sequence[LeaseView], now: float
) -> tuple[ProgramId, ...] | None:
    """Leases that end for an overdue request, under every policy: first those with a TTL from the client,
    then the soonest-expiring ones. Otherwise hints could starve requests without a program.

    While other requests run, no lease ends unless all together are enough: the request would still wait, and
    the leases would end for nothing.
    """
    victims = sorted(
        (lease for lease in leases if lease.program_id != need.program_id and lease.blocks),
        key=lambda lease: (not lease.hinted, lease.waiting, lease.expires_s, lease.program_id),
    )
    if need.anything_running and sum(lease.blocks for lease in victims) < need.blocks:
        return None
    return _shortest_sufficient_prefix(victims, need.blocks)


def _shortest_sufficient_prefix(leases: Sequence[LeaseView], blocks: int) -> tuple[ProgramId, ...] | None:
    """The shortest prefix of ``leases`` with at least ``blocks``; all of them if they have fewer."""
    chosen: list[ProgramId] = []
    gained = 0
    for lease in leases:
        if gained >= blocks:
            break
        chosen.append(lease.program_id)
        gained += lease.blocks
    return tuple(chosen) or None
