"""Computes one answer of the policy ``relative-idleness``: the moves of all programs for one view.

The rules and their numbers are in ``relative_idleness``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Protocol

from .placement_plan import PlacementPlan, PlacementRules, has_elapsed, is_ready
from .placement_policy import LOOKAHEAD, MoveReason
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier


class RelativeIdlenessRules(PlacementRules, Protocol):
    """The settings that the plan gets from its policy, ``RelativeIdlenessPlacement``."""

    @property
    def disk_idleness(self) -> float: ...
    @property
    def standstill_s(self) -> float: ...
    @property
    def absent_s(self) -> float: ...
    @property
    def exchange_reserve(self) -> float: ...


class RelativeIdlenessPlan(PlacementPlan):
    """Builds one answer of ``RelativeIdlenessPlacement``."""

    _policy: RelativeIdlenessRules

    def __init__(self, policy: RelativeIdlenessRules, view: PlacementView, now: float) -> None:
        super().__init__(policy, view, now)
        self._exchanges = 0
        """Number of exchanges in this answer."""
        self._below = sorted(self.ready, key=self._promotion_key)

    # -- the device ---------------------------------------------------------------------------

    def promote_overdue(self) -> bool:
        """Promote overdue programs (rule 4), then demote until the device is within capacity.

        Returns whether other programs may be promoted now: false if an overdue program must first wait until
        running turns end."""
        gap_s = self._policy.overdue_gap_s
        if has_elapsed(self._view.last_overdue_promotion_s, gap_s, self._now):
            for program in self._overdue_programs()[: 1 if gap_s else LOOKAHEAD]:
                if not self._promote_with_demotions(program, MoveReason.OVERDUE):
                    return False
        self._demote_until_free(0, MoveReason.OVER_CAPACITY)
        return True

    def fill_device(self) -> bool:
        """Promote programs that fit. Returns whether any program was promoted."""
        if self._is_full():
            return False
        before = len(self._entered)
        misses = 0
        for program in self._candidates():
            if self._policy.device_blocks(program) <= self._free[Tier.DEVICE] or self._is_empty():
                self._promote(program, MoveReason.FREE_CAPACITY)
                if self._is_full():
                    break
            elif program.tier is Tier.WAITING:
                misses += 1
                if misses == LOOKAHEAD:
                    break
        for program in self._view.further_waiting:
            fits = self._policy.device_blocks(program) <= self._free[Tier.DEVICE]
            if fits and is_ready(program) and program.program_id not in self._moved and not self._is_full():
                self._promote(program, MoveReason.FREE_CAPACITY)
        return len(self._entered) > before

    def promote_after_absence(self) -> bool:
        """Replace programs whose tools have run for ``absent_s`` by a ready program (rule 5). Returns whether
        a program was promoted."""
        if not any(program.program_id in self._staying for program in self._absent):
            return False
        for program in islice(self._candidates(), LOOKAHEAD):
            room = self._free[Tier.DEVICE]
            leaving = []
            for victim in self._absent:
                if self._policy.device_blocks(program) <= room:
                    break
                if victim.program_id in self._staying:
                    leaving.append(victim)
                    room += self._policy.device_blocks(victim)
            if self._policy.device_blocks(program) <= room:
                self._promote(program, MoveReason.ABSENT)
                for victim in leaving:
                    self._send(victim, self._place_below(victim), MoveReason.ABSENT)
                return True
        return False

    @cached_property
    def _absent(self) -> list[ProgramTierView]:
        """The acting programs whose tools have run for ``absent_s``. Computed once for each answer."""
        limit_s = self._policy.absent_s
        return [p for p in self._acting() if has_elapsed(p.last_active_s, limit_s, self._now)]

    def promote_at_standstill(self) -> bool:
        """Promote a program if all programs on the device have run tools for ``standstill_s`` (rule 3).
        Returns whether a program was promoted."""
        if self._is_empty() or self._entered:
            return False
        if any(program.activity is not ProgramActivity.ACTING for program in self._staying.values()):
            return False
        last_s = max(program.last_active_s for program in self._staying.values())
        first = next(self._candidates(), None)
        if first is None or not has_elapsed(last_s, self._policy.standstill_s, self._now):
            return False
        return self._promote_with_demotions(first, MoveReason.STANDSTILL)

    def exchange(self) -> bool:
        """Exchange acting programs for ready programs while the tiers below have free blocks. Returns whether
        any program was promoted."""
        below = self._view.host.budget_blocks + self._view.disk.budget_blocks
        if self._policy.exchange_reserve == 1 or not below:
            return False
        acting = [victim for victim in self._acting() if victim.context_blocks]
        most = self._free[Tier.DEVICE] + sum(map(self._policy.device_blocks, acting))
        least = min((victim.context_blocks for victim in acting), default=0)
        before = len(self._entered)
        for program in [*islice(self._candidates(), LOOKAHEAD - self._exchanges)]:
            wanted = self._policy.device_blocks(program)
            leaving = self._exchange_demotions(program, acting, least) if wanted <= most else None
            if leaving is None:
                continue
            reason = MoveReason.EXCHANGE if leaving else MoveReason.FREE_CAPACITY
            self._promote(program, reason)
            self._exchanges += 1
            for victim, to in leaving:
                self._send(victim, to, reason)
            acting = [victim for victim in acting if victim.program_id in self._staying]
            most -= wanted
        return len(self._entered) > before

    def _exchange_demotions(
        self, program: ProgramTierView, acting: list[ProgramTierView], least: int
    ) -> list[tuple[ProgramTierView, Tier]] | None:
        """Return the acting programs that make way for ``program``, each with its new tier; ``None``: the
        acting programs would free too few blocks. ``least``: blocks of the smallest context of ``acting``."""
        wanted, room = self._policy.device_blocks(program), self._free[Tier.DEVICE]
        free = dict(self._free)
        if program.tier in free:
            free[program.tier] += program.context_blocks
        free[Tier.HOST] -= math.ceil(self._policy.exchange_reserve * self._view.host.budget_blocks)
        leaving: list[tuple[ProgramTierView, Tier]] = []
        for victim in acting:
            if wanted <= room or max(free[Tier.HOST], free[Tier.DISK]) < least:
                break
            to = self._tier_below(victim, free)
            busy = self._idleness(victim) < self._policy.disk_idleness
            if to is Tier.WAITING or (to is Tier.DISK and busy):
                continue
            leaving.append((victim, to))
            free[to] -= victim.context_blocks
            room += self._policy.device_blocks(victim)
        if wanted > room:
            return None
        for each in reversed(leaving[:-1]):  # small victims may be unnecessary after the last, larger one
            size = self._policy.device_blocks(each[0])
            if wanted <= room - size:
                leaving.remove(each)
                room -= size
        return leaving

    def _promote_with_demotions(self, program: ProgramTierView, reason: MoveReason) -> bool:
        """Demote programs to make way for ``program``, and promote it. Returns whether ``program`` was
        promoted. If not, running turns must end first."""
        return self._demote_until_free(self._policy.device_blocks(program), reason, program)

    def _demotion_candidates(self) -> Iterator[ProgramTierView]:
        """Yield the programs that may leave the device, in demotion order. Ready programs may not (rule 1),
        unless they are pending."""
        for program in self._in_demotion_order:
            if program.program_id in self._staying:
                yield program

    def _acting(self) -> list[ProgramTierView]:
        """Demotion candidates that run a tool."""
        return [
            program for program in self._demotion_candidates() if program.activity is ProgramActivity.ACTING
        ]

    @cached_property
    def _in_demotion_order(self) -> list[ProgramTierView]:
        # Cached, because the sort keys do not change while the answer is built.
        leavers = [
            program
            for program in self._staying.values()
            if program.activity is not ProgramActivity.READY or program.pending
        ]
        return sorted(leavers, key=self._demotion_key)

    def _is_empty(self) -> bool:
        return not self._staying and not self._entered

    def _is_full(self) -> bool:
        """Whether the device has programs and no free block, so that no program can enter."""
        return self._free[Tier.DEVICE] <= 0 and not self._is_empty()

    # -- the tiers below ----------------------------------------------------------------------

    def demote_overflow(self, tier: Tier) -> bool:
        """Demote programs from ``tier`` (host or disk) while the tier is over capacity. Returns whether a
        program moved."""
        if self._free[tier] >= 0:
            return False
        before = len(self._moved)
        group = self._view.on_host if tier is Tier.HOST else self._view.on_disk
        for program in sorted(group, key=self._demotion_key):
            if self._free[tier] >= 0:
                break
            if program.program_id not in self._moved:
                fits = tier is Tier.HOST and 0 < program.context_blocks <= self._free[Tier.DISK]
                self._send(program, Tier.DISK if fits else Tier.WAITING, MoveReason.OVER_CAPACITY)
        return len(self._moved) > before

    def _tier_below(self, program: ProgramTierView, free: Mapping[Tier, int]) -> Tier:
        to_disk = self._idleness(program) >= self._policy.disk_idleness
        for tier in (Tier.DISK, Tier.HOST) if to_disk else (Tier.HOST, Tier.DISK):
            if 0 < program.context_blocks <= free[tier]:
                return tier
        return Tier.WAITING

    def _place_below(self, program: ProgramTierView) -> Tier:
        """Return the tier for a program that leaves the device, as ``_tier_below`` does. If host memory is
        full, first make room in it: move programs that are idle enough from host memory to disk."""
        threshold = self._policy.disk_idleness
        to = self._tier_below(program, self._free)
        if to is Tier.HOST or self._free[Tier.DISK] <= 0 or self._idleness(program) >= threshold:
            return to
        if not program.context_blocks:  # there is no KV to keep
            return Tier.WAITING
        short = program.context_blocks - self._free[Tier.HOST]
        room = self._free[Tier.DISK]
        down = []
        idle = (
            p
            for p in self._view.on_host
            if p.activity is ProgramActivity.ACTING and p.program_id not in self._moved
        )
        for other in sorted(idle, key=self._demotion_key):
            if short <= 0 or self._idleness(other) < threshold:
                break
            if other.context_blocks <= room:
                down.append(other)
                room -= other.context_blocks
                short -= other.context_blocks
        if short > 0:
            return to
        for other in down:
            self._send(other, Tier.DISK, MoveReason.HOST_FULL)
        return Tier.HOST

    # -- candidates and their order ------------------------------------------------------------

    def _candidates(self) -> Iterator[ProgramTierView]:
        """Ready programs off the device in promotion order, without programs that this answer has moved."""
        for program in self._below:
            if program.program_id not in self._moved:
                yield program
        for program in self._in_line():
            if program.activity is ProgramActivity.READY and program.program_id not in self._moved:
                yield program

    def _in_line(self) -> Iterator[ProgramTierView]:
        if self._view.waiting_sorted:
            yield from self._view.waiting
            return
        # A heap finds the first few of thousands without sorting the rest.
        keyed = [(self._policy.waiting_key(program, self._now), program) for program in self._view.waiting]
        heapq.heapify(keyed)
        while keyed:
            yield heapq.heappop(keyed)[1]

    def _overdue_programs(self) -> list[ProgramTierView]:
        """Ready programs off the device that have waited for too long, the longest-waiting first."""
        if self._view.waiting_sorted:
            return [*filter(self._is_overdue, self._view.longest_waiting)]
        overdue = [*filter(self._is_overdue, self._below), *filter(self._is_overdue, self._view.waiting)]
        return sorted(overdue, key=lambda program: (program.waiting_since_s, program.program_id))

    def _is_overdue(self, program: ProgramTierView) -> bool:
        ready = program.activity is ProgramActivity.READY
        return ready and has_elapsed(program.waiting_since_s, self._policy.patience_s, self._now)

    def _promotion_key(self, program: ProgramTierView) -> tuple[bool, float, float, str]:
        """Promotion order of programs in lower tiers: host before disk, the least idle first."""
        on_disk = program.tier is Tier.DISK
        return (on_disk, self._idleness(program), program.waiting_since_s, program.program_id)

    def _demotion_key(self, program: ProgramTierView) -> tuple[int, float, float, str]:
        """Sort key of the demotion order: first pending programs whose turn has ended, then acting programs,
        then others; within each group the most idle first.

        A reasoning program has the same key whether it is pending or not. Otherwise, marking a program as
        pending would change the order for the next answer.
        """
        if program.pending and program.activity is not ProgramActivity.REASONING:
            level = 0
        else:
            level = 1 if program.activity is ProgramActivity.ACTING else 2
        return (level, -self._idleness(program), program.last_active_s, program.program_id)

    def _idleness(self, program: ProgramTierView) -> float:
        return program.idleness.at(self._now)
