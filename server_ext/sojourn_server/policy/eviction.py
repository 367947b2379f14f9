"""In what order cached blocks are reused."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .labels import device_rank, label
from .views import OwnerView, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLru:
    """The engine's own order: the block unused for longest goes first, tails before heads."""

    by_program: bool = False

    def standing(self, owner: OwnerView) -> tuple[float, ...]:
        return (0.0,)

    def score(self, standing: tuple[float, ...], scale: Scale) -> tuple[float, ...]:
        return standing


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramsBlocks:
    """Programs that are over first, then the latest-arrived: where programs are served in order of
    arrival, the latest is the one whose turn comes last, which is Bélády's victim.
    """

    by_program: bool = True

    def standing(self, owner: OwnerView) -> tuple[float, ...]:
        return (not owner.over, -owner.program_rank)

    def score(self, standing: tuple[float, ...], scale: Scale) -> tuple[float, ...]:
        return standing


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLabels:
    """Inactive programs' blocks first, then idle ones', then busy ones'; each the LRU (M5; MORI §4.3.2).

    Of the inactive ones, those that are over before those that lost their place.
    """

    by_program: bool = True

    def standing(self, owner: OwnerView) -> tuple[float, ...]:
        return (not owner.over, device_rank(label(owner.tier)), owner.last_turn_s)

    def score(self, standing: tuple[float, ...], scale: Scale) -> tuple[float, ...]:
        return standing


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowAwareLru:
    """WA-LRU: recency, likelihood of reuse and size in one score (S3; SAGA §4.1, eq. 1–4).

        P_evict = recency·(now − t_last)/τ_max + reuse·(1 − P_reuse) + size·(blocks/size_max)

    Highest goes first, after programs that are over. ``now/τ_max`` is the same for all and left out, so that
    a score holds until something happens to its program, or the scale moves. A
    cold program's P_reuse is ``cold_reuse``: among cold ones the order is one of recency and size. What a
    program's newest turn did without is another branch of a tree: its P_reuse is less by the share of such
    blocks that are ever used again. Raises ``ValueError`` for weights that are not finite numbers ≥ 0.
    """

    recency: float = 0.3
    reuse: float = 0.5
    size: float = 0.2
    cold_reuse: float = 0.5
    by_program: bool = True

    def __post_init__(self) -> None:
        weights = (self.recency, self.reuse, self.size)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(f"weights recency, reuse, size are {weights}; expected finite numbers ≥ 0")
        if not 0 <= self.cold_reuse <= 1:
            raise ValueError(f"cold_reuse is {self.cold_reuse}; expected 0 to 1")

    def standing(self, owner: OwnerView) -> tuple[float, ...]:
        p_reuse = self.cold_reuse if owner.p_reuse is None else owner.p_reuse
        if owner.wanted:
            p_reuse = 1.0
        return (not owner.over, owner.last_turn_s, p_reuse, owner.blocks, owner.left_behind)

    def score(self, standing: tuple[float, ...], scale: Scale) -> tuple[float, ...]:
        living, last_turn_s, p_reuse, blocks, left_behind = standing
        recent = last_turn_s / scale.longest_gap_s if scale.longest_gap_s > 0 else 0.0
        size = min(1.0, blocks / scale.most_blocks) if scale.most_blocks > 0 else 0.0
        if left_behind:
            p_reuse *= scale.branch_reuse
        return (living, self.recency * recent - self.reuse * (1.0 - p_reuse) - self.size * size)
