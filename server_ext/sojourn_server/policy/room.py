"""Whose lease is given up when somebody needs the space (C8; Continuum §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.ids import ProgramId

from .views import LeaseView, RoomNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramFirst:
    """Leases of the latest-arrived programs go first, as many as the need asks for.

    Three needs are told apart, since "until it fits" must not undo the order
    that the queue keeps:

    - A request that already runs takes any lease: the alternative is to
      preempt, which costs more than an idle program's cache.
    - A waiting request takes leases of programs that arrived after its own.
    - A waiting request takes leases of earlier programs only where nothing
      runs: the deadlock the paper speaks of. With ``patient`` it first waits,
      engine idle, while that costs less than rebuilding the cheapest lease:
      for the soonest lease to end or its program to return. Waiting is bounded
      by that lease's time-to-live, so this cannot deadlock either.
    """

    patient: bool = False

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (-lease.program_rank, lease.program_id),
        )
        if not need.running:
            later = [lease for lease in victims if lease.program_rank > need.program_rank]
            if sum(lease.blocks for lease in later) >= need.blocks:
                return _first_enough(later, need.blocks)
            if need.anything_running:
                return None
            if self.patient and self._worth_waiting(victims, now):
                return None
        return _first_enough(victims, need.blocks)

    @staticmethod
    def _worth_waiting(leases: Sequence[LeaseView], now: float) -> bool:
        active = [lease for lease in leases if lease.expires_s > now and not lease.waiting]
        if not active:
            return False
        return min(lease.expires_s for lease in active) - now < min(lease.reload_s for lease in active)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterProgramsFirst:
    """Only programs that arrived after the one in need give way, latest first: the baseline ``admit``.

    A running request of the latest program finds nobody and is preempted
    itself, or a later one that runs is (``victim: latest-program``). A waiting
    one waits, until the engine has stood idle for ``patience_s``: then earlier
    programs give way too, since they may wait for it.
    """

    patience_s: float = 30.0

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (-lease.program_rank, lease.program_id),
        )
        if not need.running and need.idle_s >= self.patience_s:
            return _first_enough(victims, need.blocks)
        later = [lease for lease in victims if lease.program_rank > need.program_rank]
        if sum(lease.blocks for lease in later) >= need.blocks:
            return _first_enough(later, need.blocks)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyLease:
    """Whoever needs room takes it, soonest-expiring leases first, as many as the need asks for.

    Where all are too few, all go. Leases then never delay anybody.
    """

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (lease.expires_s, lease.program_id),
        )
        return _first_enough(victims, need.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWantedFirst:
    """Whoever needs room takes it, from the programs that the eviction order would let go first.

    Under hard pressure a lease is only a place in that order (SAGA §4.2). Programs whose request waits go
    last: their KV is about to be used. Where the preset has no order by program, leases that end soonest go
    first.
    """

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = sorted(
            (lease for lease in leases if lease.program_id != need.program_id),
            key=lambda lease: (lease.waiting, lease.score, lease.expires_s, lease.program_id),
        )
        return _first_enough(victims, need.blocks)


def _first_enough(leases: Sequence[LeaseView], blocks: int) -> tuple[ProgramId, ...] | None:
    """As many of ``leases``, from the first on, as come to ``blocks``; all where they are too few."""
    chosen: list[ProgramId] = []
    gained = 0
    for lease in leases:
        if gained >= blocks:
            break
        chosen.append(lease.program_id)
        gained += lease.blocks
    return tuple(chosen) or None
