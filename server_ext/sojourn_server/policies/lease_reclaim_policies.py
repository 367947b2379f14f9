"""Lease reclaim: which leases end early when a request needs blocks (Continuum §5.2; mechanism C8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.ids import ProgramId

from .policy_views import LeaseView, ReclaimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramReclaim:
    """Ends leases until the request fits. Leases of the latest-arrived programs end first.

    Leases must not be reclaimed against the order of the queue, so there are three cases:

    - A running request reclaims any lease. The alternative is a preemption, which costs more than the loss of
      an idle program's cache.
    - A waiting request reclaims leases of programs that arrived later, if these hold enough blocks.
    - If those leases hold too few blocks and nothing runs, a waiting request also reclaims leases of earlier
      programs. Without this case the engine would stand still (the paper's deadlock). If ``patient`` is true
      and the next lease expires sooner than the cheapest leased context could be rebuilt, the request first
      waits for that expiry. The TTL bounds this wait.
    """

    patient: bool = False

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = _latest_first(need, leases)
        if not need.running:
            later = _leases_of_later_programs(need, victims)
            if later is not None or need.anything_running:
                return later
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
    """Ends leases of programs that arrived after the request's program, the latest first. Used by preset
    ``admit``.

    If these leases hold too few blocks, no lease ends. Then a waiting request waits. For a running request,
    the engine preempts a request (``victim: latest-program``). After the engine was idle for ``patience_s``,
    a waiting request also reclaims leases of earlier programs, since those programs may wait for the request.
    """

    patience_s: float = 30.0

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None:
        victims = _latest_first(need, leases)
        if not need.running and need.idle_s >= self.patience_s:
            return _shortest_sufficient_prefix(victims, need.blocks)
        return _leases_of_later_programs(need, victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoonestExpiringReclaim:
    """Ends leases for every request that needs blocks, the soonest-expiring first.

    Leases end until there are enough blocks or no leases are left. So leases never delay a request.
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
    """Ends leases for every request that needs blocks, in the eviction order of the leases' programs.

    So under memory pressure a lease does not change which program loses KV first (SAGA §4.2). One exception:
    leases of programs with a waiting request end last, because their KV is about to be used. Without an
    eviction order by program, the leases that expire soonest end first.
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
    """Return the programs whose leases end for an overdue ``ReclaimRequest``, whatever the policy.

    Leases with a TTL from the client end first, because hints could otherwise starve requests without a
    program. Within both kinds of leases, those of programs with a waiting request end last. Leases that are
    still equal end in the order of their expiry. ``None`` without leases. Also ``None`` if other requests run
    and all leases together hold too few blocks, because the request would still have to wait.
    """
    victims = sorted(
        (lease for lease in leases if lease.program_id != need.program_id and lease.blocks),
        key=lambda lease: (not lease.hinted, lease.waiting, lease.expires_s, lease.program_id),
    )
    if need.anything_running and sum(lease.blocks for lease in victims) < need.blocks:
        return None
    return _shortest_sufficient_prefix(victims, need.blocks)


def _latest_first(need: ReclaimRequest, leases: Sequence[LeaseView]) -> list[LeaseView]:
    """Return the leases of other programs than the request's own, the latest-arrived program first."""
    others = (lease for lease in leases if lease.program_id != need.program_id)
    return sorted(others, key=lambda lease: (-lease.program_rank, lease.program_id))


def _leases_of_later_programs(
    need: ReclaimRequest, victims: Sequence[LeaseView]
) -> tuple[ProgramId, ...] | None:
    """Return programs of ``victims`` that arrived after the request's program: in the given order, until
    their leases together hold enough blocks. ``None``: all of them together hold too few blocks."""
    later = [lease for lease in victims if lease.program_rank > need.program_rank]
    enough = sum(lease.blocks for lease in later) >= need.blocks
    return _shortest_sufficient_prefix(later, need.blocks) if enough else None


def _shortest_sufficient_prefix(leases: Sequence[LeaseView], blocks: int) -> tuple[ProgramId, ...] | None:
    """Return the programs of the first ``leases`` that together hold at least ``blocks`` blocks.

    If all leases together hold fewer, the programs of all leases are returned; ``None`` without leases."""
    chosen: list[ProgramId] = []
    gained = 0
    for lease in leases:
        if gained >= blocks:
            break
        chosen.append(lease.program_id)
        gained += lease.blocks
    return tuple(chosen) or None
