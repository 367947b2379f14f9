"""Sums over the programs that have KV in any tier, for ``residency_price_plan``."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from sojourn.ids import ProgramId

from .placement_views import PlacementView, ProgramTierView, Tier


class ProgramRules(Protocol):
    """What the sums need from the policy: a program's size on the device, and its worth (the value of its
    progress, relative to a new program of its type)."""

    def device_blocks(self, program: ProgramTierView) -> int: ...
    def worth(self, program: ProgramTierView) -> float: ...


class ProgramsWithKv:
    """The programs with KV after the moves so far, each with its tier, and sums over these programs. A sum is
    computed at its first use, because most answers use none. Afterwards, each move updates the sum."""

    def __init__(self, policy: ProgramRules, view: PlacementView, now: float) -> None:
        self._policy, self._view, self._now = policy, view, now
        self._demands: list[float] | None = None
        """Cumulative sums of the demands in ``_worths``; ``None`` after a move, until the next use."""
        self._growth_sums: tuple[list[float], list[float]] | None = None
        """Two lists of cumulative sums over ``_growths``: of growth · share, and of share. ``None`` after a
        move, until the next use."""

    def __iter__(self) -> Iterator[tuple[Tier, ProgramTierView]]:
        return iter(self._of.values())

    @cached_property
    def _of(self) -> dict[ProgramId, tuple[Tier, ProgramTierView]]:
        view = self._view
        groups = ((Tier.DEVICE, view.on_device), (Tier.HOST, view.on_host), (Tier.DISK, view.on_disk))
        return {program.program_id: (tier, program) for tier, group in groups for program in group}

    @cached_property
    def _sums(self) -> list[float]:
        """Sums over all programs, in blocks: demand on the device, and mean context."""
        sums = [0.0, 0.0]
        for _, program in self:
            self._add(sums, program, 1)
        return sums

    def _add(self, sums: list[float], program: ProgramTierView, sign: int) -> None:
        reasoning_share, mean_blocks = self._reasoning_share(program), self.mean_blocks_of(program)
        for at, blocks in enumerate((reasoning_share * mean_blocks, mean_blocks)):
            sums[at] += sign * blocks

    def _reasoning_share(self, program: ProgramTierView) -> float:
        """Return the share of the program's time in which it reasons."""
        return 1.0 - program.idleness.at(self._now)

    def mean_blocks_of(self, program: ProgramTierView) -> float:
        """Return the predicted mean size of the program's context until the program ends, in blocks."""
        now_blocks = self._policy.device_blocks(program)
        return (now_blocks + max(now_blocks, program.peak_blocks)) / 2

    def growth_of(self, program: ProgramTierView) -> int:
        """Return the blocks by which the program's context is predicted to grow."""
        return max(0, program.peak_blocks - self._policy.device_blocks(program))

    def growth_within(self, most_blocks: int) -> float:
        """Return a sum over all programs, in blocks: min(predicted growth, ``most_blocks``) times the share
        of the program's time in which it reasons. A context grows only while its program reasons."""
        if self._growth_sums is None:
            grown = accumulate(share * growth for growth, share in self._growths)
            self._growth_sums = ([*grown], [*accumulate(share for _, share in self._growths)])
        grown_blocks, shares = self._growth_sums
        if not shares:
            return 0.0
        at = bisect_left(self._growths, (most_blocks, -math.inf))
        below_blocks, below = (grown_blocks[at - 1], shares[at - 1]) if at else (0.0, 0.0)
        return below_blocks + most_blocks * (shares[-1] - below)

    @cached_property
    def _growths(self) -> list[tuple[int, float]]:
        """(predicted growth in blocks, share of its time in which it reasons) of each program, in ascending
        order of growth."""
        return sorted(self._growth(program) for _, program in self)

    def _growth(self, program: ProgramTierView) -> tuple[int, float]:
        return self.growth_of(program), self._reasoning_share(program)

    @property
    def demand_blocks(self) -> float:
        """Device blocks that all programs together use on average until their ends. Each program uses its
        mean context times the share of its time in which it reasons."""
        return self._sums[0]

    @property
    def mean_blocks(self) -> float:
        """Sum of the programs' mean contexts, in blocks."""
        return self._sums[1]

    def demand_above(self, worth: float) -> float:
        """Return the part of ``demand_blocks`` that programs with at least this worth cause."""
        if self._demands is None:
            self._demands = [*accumulate(demand for _, demand in self._worths)]
        at = bisect_left(self._worths, (worth, -math.inf))
        total = self._demands[-1] if self._demands else 0.0
        return total - (self._demands[at - 1] if at else 0.0)

    @cached_property
    def _worths(self) -> list[tuple[float, float]]:
        """(worth, demand) of each program, in ascending order of worth."""
        return sorted(self._pair(program) for _, program in self)

    def _pair(self, program: ProgramTierView) -> tuple[float, float]:
        demand_blocks = self._reasoning_share(program) * self.mean_blocks_of(program)
        return self._policy.worth(program), demand_blocks

    def context_blocks(self, program_id: ProgramId) -> int:
        """Return the blocks of the program's context."""
        return self._of[program_id][1].context_blocks

    def move(self, program: ProgramTierView, to: Tier) -> None:
        """Record that a program moves to tier ``to``."""
        known = self._of.pop(program.program_id, None)
        if to is not Tier.WAITING:
            self._of[program.program_id] = (to, program)
        change = (to is not Tier.WAITING) - (known is not None)
        if change:
            self._demands = self._growth_sums = None
            for name, pair_of in (("_worths", self._pair), ("_growths", self._growth)):
                if name in vars(self):
                    pairs, pair = vars(self)[name], pair_of(program)
                    if change > 0:
                        insort(pairs, pair)
                    else:
                        del pairs[bisect_left(pairs, pair)]
            if "_sums" in vars(self):
                self._add(self._sums, program, change)
