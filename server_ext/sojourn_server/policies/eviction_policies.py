"""Eviction (``eviction`` in presets): in which order are cached blocks reused?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from .placement.placement_views import Tier
from .policy_views import EvictionCandidateView, EvictionScoreScale

DEVICE_EVICTION_ORDER = (Tier.WAITING, Tier.DISK, Tier.HOST, Tier.DEVICE)
"""Eviction order on the device, first to last, by the tier in which a block's program is placed. These are
MORI's labels (§4.3.2; mechanism M5) inactive, idle and busy; ours is ``DISK``, for a program so idle that its
KV belongs on disk. A block is inactive (``WAITING``) if its program has ended, is unknown or is placed in no
tier. MORI also schedules requests of busy programs first. Here only programs that are placed on the device
are admitted."""
HOST_EVICTION_ORDER = (Tier.WAITING, Tier.DISK, Tier.DEVICE, Tier.HOST)
"""Eviction order in host memory. ``HOST`` is last, since placement puts the KV of idle programs there."""

RECENCY_WEIGHT, REUSE_WEIGHT = 0.3, 0.5
"""α and β of SAGA's equation 1; γ is ``WorkflowAwareLruEviction.size``."""
COLD_REUSE = 0.5
"""P_reuse of a program without prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """Orders the eviction of programs' cached blocks: ascending ``score``. The base leaves the order to the
    engine: least recently used block first, later blocks of a prefix before earlier ones."""

    by_program = False
    """Whether blocks are evicted in the order of scores."""

    def score_inputs(self, owner: EvictionCandidateView) -> tuple[float, ...]:
        """Return the data from which a program's score is computed. The scheduler stores them at each event
        of the program."""
        return (0.0,)

    def score(self, inputs: tuple[float, ...], scale: EvictionScoreScale) -> tuple[float, ...]:
        """Compute the score from the stored data and the present scale. When the scale changes, all scores
        are computed again."""
        return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLabelEviction(EvictionPolicy):
    """Evicts blocks by the tier in which their program is placed (MORI §4.3.2; mechanism M5).

    Blocks of ended programs are evicted first, then others by ``DEVICE_EVICTION_ORDER``. Of one tier, those
    whose program ended its last turn earliest are first.
    """

    by_program = True

    def score_inputs(self, owner: EvictionCandidateView) -> tuple[float, ...]:
        rank = DEVICE_EVICTION_ORDER.index(owner.tier)
        return (not owner.over, rank, owner.last_turn_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowAwareLruEviction(EvictionPolicy):
    """Orders eviction by recency, probability of reuse and size: WA-LRU (SAGA §4.1, eq. 1–4; mechanism S3).

        P_evict = 0.3·(now − t_last)/τ_max + 0.5·(1 − P_reuse) + size·(blocks/size_max)

    τ_max and size_max are the longest gap and the largest context (``EvictionScoreScale``). Blocks of ended
    programs are evicted first, then those with the highest P_evict. The score leaves out ``now/τ_max``, which
    is the same for all blocks. So a score stays valid until its program has an event or the scale changes.
    P_reuse is 1 while a request of the program is in the engine, and ``COLD_REUSE`` without a prediction:
    among such programs, recency and size decide. Blocks that a program's newest turn did not use belong to an
    abandoned branch. Their P_reuse is multiplied by the share of blocks in abandoned branches that is used
    again.
    """

    by_program = True
    size: Annotated[float, Meta(ge=0, le=1)] = 0.2

    def score_inputs(self, owner: EvictionCandidateView) -> tuple[float, ...]:
        p_reuse = COLD_REUSE if owner.p_reuse is None else owner.p_reuse
        if owner.has_request:
            p_reuse = 1.0
        return (not owner.over, owner.last_turn_s, p_reuse, owner.blocks, owner.in_abandoned_branch)

    def score(self, inputs: tuple[float, ...], scale: EvictionScoreScale) -> tuple[float, ...]:
        living, last_turn_s, p_reuse, blocks, in_abandoned_branch = inputs
        recent = last_turn_s / scale.longest_gap_s if scale.longest_gap_s > 0 else 0.0
        size = min(1.0, blocks / scale.most_blocks) if scale.most_blocks > 0 else 0.0
        if in_abandoned_branch:
            p_reuse *= scale.branch_reuse
        return (living, RECENCY_WEIGHT * recent - REUSE_WEIGHT * (1.0 - p_reuse) - self.size * size)
