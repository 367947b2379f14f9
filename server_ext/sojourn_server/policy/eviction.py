"""In what order cached blocks are reused."""

from __future__ import annotations

from dataclasses import dataclass

from .views import OwnerView


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLru:
    """The engine's own order: the block unused for longest goes first, tails before heads."""

    by_program: bool = False

    def score(self, owner: OwnerView) -> tuple[float, ...]:
        return (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramsBlocks:
    """Programs that are over first, then the latest-arrived: where programs are served in order of
    arrival, the latest is the one whose turn comes last, which is Bélády's victim.
    """

    by_program: bool = True

    def score(self, owner: OwnerView) -> tuple[float, ...]:
        return (not owner.over, -owner.program_rank)
