"""The systems that are compared: DualPath's parts one by one (§7.5), its bound, and split reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sojourn_server.policies.prefill_decode.read_side_policies import (
    PrefillSideRead,
    ReadSidePolicy,
    ShorterQueueRead,
    WaterFillingRead,
)

from .round_robin_pairs import AlternatingReadSide


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSystem:
    """What a system does. How much a step computes is the cluster's business, and the same for all."""

    name: str
    title: str
    layerwise: bool = True
    """One layer's KV on the prefill device at a time, copies behind compute."""
    side: Callable[[], ReadSidePolicy]
    """Made anew for each run."""
    scheduled: bool = True
    """D4 and D5; else devices are taken in turn. Who reads is ``side``'s business."""
    free_io: bool = False
    """Reads and copies take no time: the paper's Oracle."""


PD_SYSTEMS = {
    system.name: system
    for system in (
        PdSystem(name="basic", title="Basic", layerwise=False, side=PrefillSideRead, scheduled=False),
        PdSystem(name="layerwise", title="+ layerwise", side=PrefillSideRead, scheduled=False),
        PdSystem(name="dual-path", title="+ dual path", side=AlternatingReadSide, scheduled=False),
        PdSystem(name="scheduling", title="+ scheduling", side=ShorterQueueRead),
        PdSystem(name="split", title="+ split reads", side=WaterFillingRead),
        PdSystem(name="oracle", title="Oracle", side=PrefillSideRead, free_io=True),
    )
}
"""By name, in the order of the ablation. ``scheduling`` is DualPath as published; ``split`` is not in it."""
PUBLISHED_SYSTEMS = ("basic", "layerwise", "dual-path", "scheduling", "oracle")
