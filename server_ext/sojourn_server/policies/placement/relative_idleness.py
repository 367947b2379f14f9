"""Placement by relative idleness (MORI): its rules, its settings, and the plan that applies them to one view.

``docs/mechanisms.md`` explains the numbers M1 to M9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from .placement_plan import PlacementPlan, SortKey, has_elapsed
from .placement_policy import MoveReason, QueuedPlacement, TierMove
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier

Seconds = Annotated[float, Meta(ge=0)]

# Levels of the promotion order.
_ON_HOST, _ON_DISK, _RETURNING, _NEW = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeIdlenessPlacement(QueuedPlacement):
    """Places the busiest programs on the device, more idle programs in lower tiers (MORI §4, §7.1; mechanisms
    M2 to M4, M6, M8 and M9).

    A program is *reasoning* during a turn, *acting* while its tool runs, and *ready* while its next request
    waits. It is *pending* if it will leave the device when its turn ends.

    *Queues.* Each program is in one of four queues: one for each tier, and the Waiting queue. The programs of
    a tier never exceed its capacity. On the device there are two exceptions: a single program may be larger
    than the device, and running requests that grow stay until their turn ends.

    *Demotion.* If the device is over capacity, programs leave it: first pending programs whose turn has
    ended, then acting programs, then reasoning programs after their turn. In each group the most idle program
    leaves first. It moves to host memory if it fits, else to disk. If neither has space, its KV is dropped.
    For a program with an idleness of at least ``disk_idleness``, disk comes first. If such a program is in
    host memory, it moves to disk when a busier program needs its blocks.

    *Promotion.* If the device has free blocks, ready programs enter it: first programs of the host queue,
    then programs of the disk queue, then programs of the Waiting queue that ran before. In each of these
    groups the least idle program goes first. New programs come last, the smallest first. A program that does
    not fit is skipped.

    *Stickiness.* Programs move only if a tier is over capacity, if a ready program fits the device, or by
    rules 3 to 5. An answer of ``moves`` is complete: after it is applied, the next answer is empty. One
    exception: a pending program that became ready and left the device comes back if it then fits.

    *No starvation.* The paper has no rule against starvation. With the rules above alone, a device full of
    acting programs would exclude ready programs while the tools run. If such a tool is a sub-agent that
    cannot enter the device, this would last for ever. Large, idle and new programs could also be skipped for
    ever.

    1. A ready program on the device is never demoted, unless it is pending. A reasoning program is demoted
       only after its turn. So each promoted program completes at least one turn, and programs do not cycle
       without progress.
    2. The first candidate enters an empty device, whatever its size.
    3. If all programs on the device have run tools for ``standstill_s`` while another program is ready,
       enough of them leave for the first candidate. With rule 2, the device never idles while a program could
       run.
    4. A program that has waited for ``patience_s`` is overdue. The longest-waiting overdue program is
       promoted before all other programs, and enough programs leave for it, reasoning programs after their
       turn. So it waits at most for the longest running turn. Overdue programs enter one at a time,
       ``overdue_gap_s`` apart. Promotions and demotions cause recomputation, so a device that promoted many
       overdue programs at once would do little else.
    5. A program that has run a tool for ``absent_s`` makes way for any ready program. Its client may have
       crashed, or may not report the end of programs.

    A negative waiting time, after a clock jump, counts as too long, so that programs still move.
    """

    needs_tiers = True
    tick_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Seconds without an event after which the policy is asked again (§5)."""
    idle_tick_s: Annotated[float, Meta(gt=0, le=3600)] = 0.5
    """Replaces ``tick_s`` while nothing runs although a program waits. It bounds the delay of rule 3."""
    disk_idleness: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Idleness from which a program goes to disk rather than host memory: the second threshold of §7.1."""
    standstill_s: Seconds = 0.5
    """Seconds with nothing running after which programs on the device make way for a ready program (rule
    3)."""
    absent_s: Seconds = 60.0
    """Seconds after which a program that runs a tool makes way for a ready program; ``inf``: never, as in the
    paper. Most tools take less. If a tool takes longer, the client may have crashed."""

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        return RelativeIdlenessPlan(self, view, now).decide()


class RelativeIdlenessPlan(PlacementPlan):
    """Builds one answer of ``RelativeIdlenessPlacement``."""

    _policy: RelativeIdlenessPlacement

    def decide(self) -> tuple[TierMove, ...]:
        """Choose all moves, and return them."""
        if self.is_settled:
            return ()
        may_fill = self._promote_overdue()
        while may_fill and (
            self._fill_device() or self._promote_after_absence() or self._promote_at_standstill()
        ):
            pass
        self._demote_overflow()
        return self.answer()

    # -- the device ---------------------------------------------------------------------------

    def _fill_device(self) -> bool:
        """Promote programs that fit. Returns whether any program was promoted."""
        before = len(self._entered)
        for program in self._candidates():
            if self._free[Tier.DEVICE] <= 0 and not self._is_empty():
                break
            if program.device_blocks <= self._free[Tier.DEVICE] or self._is_empty():
                self._promote(program, MoveReason.FREE_CAPACITY)
        return len(self._entered) > before

    def _promote_after_absence(self) -> bool:
        """Replace programs whose tools have run for ``absent_s`` by the first ready program for which they
        are enough (rule 5). Returns whether a program was promoted."""
        limit_s = self._policy.absent_s
        absent = [
            p
            for p in self._demotion_candidates()
            if p.activity is ProgramActivity.ACTING and has_elapsed(p.last_active_s, limit_s, self._now)
        ]
        most = self._free[Tier.DEVICE] + sum(p.device_blocks for p in absent)
        program = next((p for p in self._candidates() if p.device_blocks <= most), None) if absent else None
        if program is None:
            return False
        self._promote(program, MoveReason.ABSENT)
        for victim in absent:
            if self._free[Tier.DEVICE] >= 0:
                break
            self._send(victim, self._place_below(victim), MoveReason.ABSENT)
        return True

    def _promote_at_standstill(self) -> bool:
        """Promote a program if all programs on the device have run tools for ``standstill_s`` (rule 3).
        Returns whether a program was promoted."""
        here, first = self._staying.values(), next(iter(self._candidates()), None)
        if first is None or not here or self._entered:
            return False
        if any(program.activity is not ProgramActivity.ACTING for program in here):
            return False
        last_s = max(program.last_active_s for program in here)
        if not has_elapsed(last_s, self._policy.standstill_s, self._now):
            return False
        return self._demote_until_free(first.device_blocks, MoveReason.STANDSTILL, first)

    def _is_empty(self) -> bool:
        return not self._staying and not self._entered

    # -- the tiers below ----------------------------------------------------------------------

    def _tiers_below(self, program: ProgramTierView) -> Sequence[Tier]:
        to_disk = self._idleness(program) >= self._policy.disk_idleness
        return (Tier.DISK, Tier.HOST) if to_disk else (Tier.HOST, Tier.DISK)

    def _place_below(self, program: ProgramTierView) -> Tier:
        """Return the tier for a program that leaves the device, as ``_tier_below`` does. If host memory is
        full, first make room in it: move programs that are idle enough from host memory to disk."""
        threshold, room = self._policy.disk_idleness, self._free[Tier.DISK]
        to = self._tier_below(program)
        if to is Tier.HOST or room <= 0 or self._idleness(program) >= threshold or not program.context_blocks:
            return to
        short = program.context_blocks - self._free[Tier.HOST]
        down = []
        idle = [
            other
            for other in self._view.on_host
            if other.program_id not in self._moved
            and other.activity is ProgramActivity.ACTING
            and self._idleness(other) >= threshold
        ]
        for other in sorted(idle, key=self._demotion_key):
            if short > 0 and other.context_blocks <= room:
                down.append(other)
                room -= other.context_blocks
                short -= other.context_blocks
        if short > 0:
            return to
        for other in down:
            self._send(other, Tier.DISK, MoveReason.HOST_FULL)
        return Tier.HOST

    # -- candidates and their order ------------------------------------------------------------

    @cached_property
    def _in_promotion_order(self) -> list[ProgramTierView]:
        return sorted(self.ready, key=self._promotion_key)

    def _promotion_key(self, program: ProgramTierView) -> SortKey:
        """Return the sort key of the promotion order: host memory, disk, programs that ran before, new
        programs. New programs by size, the others by idleness."""
        if program.tier is Tier.WAITING and not program.returning:
            level, measure = _NEW, float(max(program.context_blocks, program.required_blocks))
        else:
            levels = {Tier.HOST: _ON_HOST, Tier.DISK: _ON_DISK}
            level, measure = levels.get(program.tier, _RETURNING), self._idleness(program)
        return (level, measure, program.waiting_since_s, program.program_id)

    def _demotion_candidates(self) -> list[ProgramTierView]:
        return [p for p in self._in_demotion_order if p.program_id in self._staying]

    @cached_property
    def _in_demotion_order(self) -> list[ProgramTierView]:
        """The programs on the device that may leave it, by rule 1."""
        here = [
            program
            for program in self._view.on_device
            if program.activity is not ProgramActivity.READY or program.pending
        ]
        return sorted(here, key=self._demotion_key)

    def _demotion_key(self, program: ProgramTierView, tier: Tier = Tier.DEVICE) -> SortKey:
        """Return the sort key of the demotion order: first pending programs whose turn has ended, then acting
        programs, then others; within each group the most idle first.

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
