"""Base class of placement plans. A plan builds one answer of a placement policy: the moves to make now."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

from sojourn.ids import ProgramId

from .placement_policy import MoveReason, MoveTiming, TierMove
from .placement_views import PlacementView, ProgramActivity, ProgramTierView, Tier

SortKey = tuple[int, float, float, str]


class PlacementRules(Protocol):
    """The settings and sizes that a plan gets from its policy."""

    @property
    def patience_s(self) -> float: ...
    @property
    def overdue_gap_s(self) -> float: ...
    def device_blocks(self, program: ProgramTierView) -> int: ...


class PlacementPlan(ABC):
    """Collects the moves of one answer, and counts the free blocks after them."""

    def __init__(self, policy: PlacementRules, view: PlacementView, now: float) -> None:
        self._policy = policy
        self._view = view
        self._now = now
        self.ready = [p for group in (view.on_host, view.on_disk, view.waiting) for p in group if is_ready(p)]
        """Ready programs that are not on the device."""
        self._free = {
            Tier.DEVICE: view.device.budget_blocks - sum(map(policy.device_blocks, view.on_device)),
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
                to = self._tier_below(program, self._free)
                answer.append(TierMove(program.program_id, to, MoveTiming.AFTER_TURN, reason))
            elif reason is None and program.pending:
                answer.append(TierMove(program.program_id, Tier.DEVICE, MoveTiming.NOW, MoveReason.KEPT))
        return tuple(answer)

    @abstractmethod
    def _demotion_candidates(self) -> Iterable[ProgramTierView]:
        """Return the programs that may leave the device, in demotion order. A ready program may leave only if
        it is pending."""

    @abstractmethod
    def _tier_below(self, program: ProgramTierView, free: Mapping[Tier, int]) -> Tier:
        """Return the tier for a program that leaves the device, given the free blocks of each tier."""

    def _place_below(self, program: ProgramTierView) -> Tier:
        """Return the tier for a program that leaves the device now. A plan may first make room in that
        tier."""
        return self._tier_below(program, self._free)

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
            gained = self._policy.device_blocks(victim)
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
        self._free[Tier.DEVICE] -= self._policy.device_blocks(program)
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
            self._free[Tier.DEVICE] += self._policy.device_blocks(program)
        else:
            self._free[program.tier] += program.context_blocks
        if to is not Tier.WAITING:
            self._free[to] -= program.context_blocks
        self._moved[program.program_id] = TierMove(
            program.program_id, to, MoveTiming.NOW, reason, tuple(terms.items())
        )


def is_ready(program: ProgramTierView) -> bool:
    """Return whether the program's next request waits."""
    return program.activity is ProgramActivity.READY


def has_elapsed(since_s: float, limit_s: float, now: float) -> bool:
    """Return whether ``limit_s`` seconds have passed since ``since_s``. False if ``limit_s`` is ``inf``;
    otherwise true if ``since_s`` is after ``now`` (a clock jump)."""
    return limit_s < math.inf and not 0 <= now - since_s < limit_s
