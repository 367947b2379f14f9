"""Base class of placement plans. A plan builds one answer of a placement policy: the moves to make now."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from sojourn.ids import ProgramId

from .placement_policy import MoveReason, MoveTiming, QueuedPlacement, TierMove
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier

SortKey = tuple[float | str, ...]


class PlacementPlan(ABC):
    """Collects the moves of one answer, and counts the free blocks after them."""

    def __init__(self, policy: QueuedPlacement, view: PlacementView, now: float) -> None:
        self._policy = policy
        self._view = view
        self._now = now
        below = (*view.on_host, *view.on_disk, *view.waiting)
        self.ready = [program for program in below if program.activity is ProgramActivity.READY]
        """Ready programs that are not on the device."""
        self._free = {
            Tier.DEVICE: view.device.budget_blocks - sum(p.device_blocks for p in view.on_device),
            Tier.HOST: view.host.budget_blocks - sum(program.context_blocks for program in view.on_host),
            Tier.DISK: view.disk.budget_blocks - sum(program.context_blocks for program in view.on_disk),
        }
        """Free blocks by tier; negative if over capacity."""
        self._staying = {program.program_id: program for program in view.on_device}
        """Programs on the device that this answer does not move away now."""
        self._leaving: dict[ProgramId, MoveReason] = {}
        """Programs in ``_staying`` that leave after their turn."""
        self._entered: dict[ProgramId, ProgramTierView] = {}
        """Programs that this answer promotes to the device."""
        self._moved: dict[ProgramId, TierMove] = {}

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to do: no program waits or is pending, and no tier is over capacity."""
        pending = any(program.pending for program in self._view.on_device)
        return not self.ready and not pending and min(self._free.values()) >= 0

    def answer(self) -> tuple[TierMove, ...]:
        """Return all moves of this answer."""
        answer = list(self._moved.values())
        for program in self._staying.values():
            reason = self._leaving.get(program.program_id)
            if reason is not None and not program.pending:
                to = self._tier_below(program)
                answer.append(TierMove(program.program_id, to, MoveTiming.AFTER_TURN, reason))
            elif reason is None and program.pending:
                answer.append(TierMove(program.program_id, Tier.DEVICE, MoveTiming.NOW, MoveReason.KEPT))
        return tuple(answer)

    @abstractmethod
    def _demotion_candidates(self) -> Iterable[ProgramTierView]:
        """Return the programs that may leave the device, in demotion order. A ready program may leave only if
        it is pending."""

    @property
    @abstractmethod
    def _in_promotion_order(self) -> Sequence[ProgramTierView]:
        """``ready``, the first to enter first."""

    @abstractmethod
    def _demotion_key(self, program: ProgramTierView, tier: Tier) -> SortKey:
        """Return the sort key of the demotion order in ``tier``; the lowest leaves first."""

    def _candidates(self) -> list[ProgramTierView]:
        """Return the ready programs off the device in promotion order, without those that this answer has
        moved."""
        return [program for program in self._in_promotion_order if program.program_id not in self._moved]

    def _patience_s(self, program: ProgramTierView) -> float:
        """Return the seconds of waiting after which the program is overdue."""
        return self._policy.patience_s

    def _waits_for_long_turn(self, program: ProgramTierView) -> bool:
        """Return whether other programs may enter although this overdue one cannot yet."""
        return False

    def _tiers_below(self, program: ProgramTierView) -> Sequence[Tier]:
        """Return the tiers below the device in the order in which a program that leaves it tries them."""
        return (Tier.HOST, Tier.DISK)

    def _tier_below(
        self, program: ProgramTierView, free: Mapping[Tier, int] | None = None, tier: Tier = Tier.DEVICE
    ) -> Tier:
        """Return the first tier below ``tier`` with room for the program's context; ``WAITING`` if none has
        room. ``free``: free blocks by tier, by default those of this plan."""
        free = self._free if free is None else free
        to_disk = (Tier.DISK,) if tier is Tier.HOST else ()
        for below in self._tiers_below(program) if tier is Tier.DEVICE else to_disk:
            if 0 < program.context_blocks <= free[below]:
                return below
        return Tier.WAITING

    def _place_below(self, program: ProgramTierView) -> Tier:
        """Return the tier for a program that leaves the device now. A plan may first make room in that
        tier."""
        return self._tier_below(program)

    def _promote_overdue(self) -> bool:
        """Promote overdue programs, the longest-waiting first, then demote until the device is within
        capacity. With a gap between two of them, one program is promoted.

        Returns whether other programs may be promoted now: false if an overdue program must first wait until
        running turns end."""
        now, gap_s = self._now, self._policy.overdue_gap_s
        if has_elapsed(self._view.last_overdue_promotion_s, gap_s, now):
            overdue = [p for p in self.ready if has_elapsed(p.waiting_since_s, self._patience_s(p), now)]
            overdue.sort(key=lambda program: (program.waiting_since_s, program.program_id))
            for program in overdue[:1] if gap_s else overdue:
                if self._waits_for_long_turn(program):
                    continue
                if not self._demote_until_free(program.device_blocks, MoveReason.OVERDUE, program):
                    return False
        self._demote_until_free(0, MoveReason.OVER_CAPACITY)
        return True

    def _demote_overflow(self) -> bool:
        """Demote programs from host memory and from disk while the tier is over capacity. Returns whether a
        program moved."""
        before = len(self._moved)
        for tier, group in ((Tier.HOST, self._view.on_host), (Tier.DISK, self._view.on_disk)):
            if self._free[tier] >= 0:
                continue
            for program in sorted(group, key=lambda one: self._demotion_key(one, tier)):
                if self._free[tier] >= 0:
                    break
                if program.program_id not in self._moved:
                    self._send(program, self._tier_below(program, tier=tier), MoveReason.OVER_CAPACITY)
        return len(self._moved) > before

    def _demote_until_free(
        self, blocks: int, reason: MoveReason, program: ProgramTierView | None = None
    ) -> bool:
        """Demote programs in demotion order until ``blocks`` blocks are free, then promote ``program`` if
        possible.

        Returns whether ``program`` was promoted. Victims that are reasoning are marked to leave after their
        turn. These marks replace all earlier marks.
        """
        over = -self._free[Tier.DEVICE]
        short = over + blocks
        left = len(self._staying) + len(self._entered)
        now: list[tuple[ProgramTierView, MoveReason]] = []
        self._leaving = {}
        for victim in list(self._demotion_candidates()) if short > 0 else ():
            if short <= 0 or (left == 1 and program is None):
                break  # a program that is alone may exceed the device
            why = MoveReason.OVER_CAPACITY if over > 0 else reason
            if victim.activity is ProgramActivity.REASONING:
                self._leaving[victim.program_id] = why
            else:
                now.append((victim, why))
            gained = victim.device_blocks
            over, short, left = over - gained, short - gained, left - 1
        enters = program is not None and not self._leaving and (short <= 0 or not left)
        if program is not None and enters:
            self._promote(program, reason)  # first, since this may free blocks below for the victims
        for victim, why in now:
            # Done even if ``program`` cannot enter yet. Otherwise these programs may begin their next turns
            # before the reasoning victims end theirs, and ``program`` would wait for ever.
            self._send(victim, self._place_below(victim), why)
        return enters

    def _promote(self, program: ProgramTierView, reason: MoveReason, **terms: float) -> None:
        self._free[Tier.DEVICE] -= program.device_blocks
        if program.tier in self._free:
            self._free[program.tier] += program.context_blocks
        self._entered[program.program_id] = program
        self._moved[program.program_id] = TierMove(
            program.program_id, Tier.DEVICE, MoveTiming.NOW, reason, tuple(terms.items())
        )

    def _send(self, program: ProgramTierView, to: Tier, reason: MoveReason, **terms: float) -> None:
        """Move a program to a lower tier, from the device or from a tier below the device."""
        if program.tier is Tier.DEVICE:
            del self._staying[program.program_id]
            self._free[Tier.DEVICE] += program.device_blocks
        else:
            self._free[program.tier] += program.context_blocks
        if to is not Tier.WAITING:
            self._free[to] -= program.context_blocks
        self._moved[program.program_id] = TierMove(
            program.program_id, to, MoveTiming.NOW, reason, tuple(terms.items())
        )


def has_elapsed(since_s: float, limit_s: float, now: float) -> bool:
    """Return whether ``limit_s`` seconds have passed since ``since_s``. False if ``limit_s`` is ``inf``;
    otherwise true if ``since_s`` is after ``now`` (a clock jump)."""
    return limit_s < math.inf and not 0 <= now - since_s < limit_s
