"""Sums over the programs that have KV in any tier, for ``residency_price_plan``."""

from __future__ import annotations

import math
from bisect import bisect_left
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
    computed when it is first used after a move, because most answers use none."""

    def __init__(self, policy: ProgramRules, view: PlacementView, now: float) -> None:
        self._policy, self._view, self._now = policy, view, now

    def __iter__(self) -> Iterator[tuple[Tier, ProgramTierView]]:
        return iter(self._of.values())

    @cached_property
    def _of(self) -> dict[ProgramId, tuple[Tier, ProgramTierView]]:
        view = self._view
        groups = ((Tier.DEVICE, view.on_device), (Tier.HOST, view.on_host), (Tier.DISK, view.on_disk))
        return {program.program_id: (tier, program) for tier, group in groups for program in group}

    @cached_property
    def _sums(self) -> tuple[float, float]:
        """Sums over all programs, in blocks: demand on the device, and mean context."""
        demand = mean = 0.0
        for _, program in self:
            mean_blocks = self.mean_blocks_of(program)
            demand += self._reasoning_share(program) * mean_blocks
            mean += mean_blocks
        return demand, mean

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
        growths, grown_blocks, shares = self._growths
        if not shares:
            return 0.0
        at = bisect_left(growths, (most_blocks, -math.inf))
        below_blocks, below = (grown_blocks[at - 1], shares[at - 1]) if at else (0.0, 0.0)
        return below_blocks + most_blocks * (shares[-1] - below)

    @cached_property
    def _growths(self) -> tuple[list[tuple[int, float]], list[float], list[float]]:
        """(Predicted growth in blocks, share of its time in which it reasons) of each program, in ascending
        order of growth; and two lists of cumulative sums over it: of growth · share, and of share."""
        growths = sorted((self.growth_of(one), self._reasoning_share(one)) for _, one in self)
        grown = accumulate(share * growth for growth, share in growths)
        return growths, [*grown], [*accumulate(share for _, share in growths)]

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
        worths, demands = self._worths
        at = bisect_left(worths, (worth, -math.inf))
        return (demands[-1] if demands else 0.0) - (demands[at - 1] if at else 0.0)

    @cached_property
    def _worths(self) -> tuple[list[tuple[float, float]], list[float]]:
        """(Worth, demand) of each program, in ascending order of worth; and the cumulative sums of the
        demands."""
        worths = sorted(
            (self._policy.worth(one), self._reasoning_share(one) * self.mean_blocks_of(one))
            for _, one in self
        )
        return worths, [*accumulate(demand for _, demand in worths)]

    def context_blocks(self, program_id: ProgramId) -> int:
        """Return the blocks of the program's context."""
        return self._of[program_id][1].context_blocks

    def move(self, program: ProgramTierView, to: Tier) -> None:
        """Record that a program moves to tier ``to``."""
        self._of.pop(program.program_id, None)
        if to is not Tier.WAITING:
            self._of[program.program_id] = (to, program)
        for name in ("_sums", "_worths", "_growths"):
            vars(self).pop(name, None)
